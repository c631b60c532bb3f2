"""NVIDIA's MPS control program as a script: a daemon answers behind each folder with a `servers` file."""

from __future__ import annotations

from pathlib import Path

_SCRIPT = """#!/bin/sh
if [ ! -e "${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps}/servers" ]; then
  echo "Cannot find MPS control daemon process"
  exit 1
fi
read -r command
[ "$command" = get_server_list ] && cat "$CUDA_MPS_PIPE_DIRECTORY/servers"
exit 0
"""


def install(folder: Path) -> None:
    """Put the program into a folder that is on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "nvidia-cuda-mps-control"
    script.write_text(_SCRIPT)
    script.chmod(0o755)


def start_daemon(pipes: Path, servers: str = "4711\n") -> None:
    """Let a daemon listen there, with servers of these pids."""
    pipes.mkdir(parents=True, exist_ok=True)
    (pipes / "control").touch()
    (pipes / "servers").write_text(servers)


def kill_daemon(pipes: Path) -> None:
    """Let it end as by SIGKILL: its socket is left, and nobody behind it."""
    (pipes / "servers").unlink()
