"""Real engines in an environment of their own: `make vllm`, or `EXAOPS_VLLM_PYTHON` for one that exists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MADE = Path(__file__).parents[2] / ".venv-vllm"


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter of an environment with vLLM; the test is skipped without one."""
    python = Path(os.environ.get("EXAOPS_VLLM_PYTHON") or MADE / "bin" / "python")
    if not python.exists():
        pytest.skip(f"no vLLM at {python}: run `make vllm`, or set EXAOPS_VLLM_PYTHON")
    return python


@pytest.fixture(scope="session")
def sglang_folder(vllm_python: Path) -> Path:
    """Where SGLang lies for the same interpreter; the test is skipped without it."""
    folder = Path(os.environ.get("EXAOPS_SGLANG_FOLDER") or vllm_python.parents[1] / "sglang")
    if not (folder / "sglang").is_dir():
        pytest.skip(f"no SGLang in {folder}: run `make vllm`, or set EXAOPS_SGLANG_FOLDER")
    return folder
