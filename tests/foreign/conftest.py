"""Real engines in an environment of their own: `make vllm`, or `EXAOPS_VLLM_PYTHON` for one that exists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fakes.foreign_engines import find_vllm_python


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter of an environment with vLLM; the test is skipped without one."""
    return find_vllm_python()


@pytest.fixture(scope="session")
def sglang_folder(vllm_python: Path) -> Path:
    """Where SGLang lies for the same interpreter; the test is skipped without it."""
    folder = Path(os.environ.get("EXAOPS_SGLANG_FOLDER") or vllm_python.parents[1] / "sglang")
    if not (folder / "sglang").is_dir():
        pytest.skip(f"no SGLang in {folder}: run `make vllm`, or set EXAOPS_SGLANG_FOLDER")
    return folder
