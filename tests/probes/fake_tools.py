"""Vendors' tools as small programs on PATH that answer with the sample texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SAMPLES = Path(__file__).with_name("samples")


def sample(name: str) -> str:
    """A sample text by its file name."""
    return (SAMPLES / name).read_text()


def install(folder: Path, tool: str, answers: Mapping[str, str | Path], *, otherwise: str = "exit 2") -> None:
    """Write a program that prints the answer to its whole command line (a path's text, or a string)."""
    cases = []
    for number, (arguments, answer) in enumerate(answers.items()):
        page = answer if isinstance(answer, Path) else folder / f"{tool}.{number}"
        if isinstance(answer, str):
            page.write_text(answer)
        cases.append(f"  '{arguments}') exec /bin/cat '{page}' ;;")
    script = folder / tool
    body = "\n".join(cases)
    script.write_text(f'#!/bin/sh\ncase "$*" in\n{body}\n  *) {otherwise} ;;\nesac\n')
    script.chmod(0o755)


def install_nvidia(folder: Path, kind: str, **more: str | Path) -> None:
    """An nvidia-smi of the host that the samples call `kind`; `more` by the first argument's name."""
    install(
        folder,
        "nvidia-smi",
        {
            "-L": more.get("listing", SAMPLES / f"{kind}.L.txt"),
            "-q -x": more.get("query", SAMPLES / f"{kind}.q.xml"),
            "topo -m": more.get("topo", SAMPLES / f"{kind}.topo.txt"),
            "--query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits": more.get(
                "processes", ""
            ),
            "--query-gpu=index,uuid,name,pci.bus_id,memory.total,memory.used,temperature.gpu,power.draw,"
            "utilization.gpu --format=csv": more.get("columns", ""),
        },
    )
