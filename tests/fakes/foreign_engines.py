"""Where real engines of others are, for tests that launch them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MADE = Path(__file__).parents[2] / ".venv-vllm"


def find_vllm_python() -> Path:
    """Interpreter of an environment with vLLM; the test is skipped where there is none."""
    python = Path(os.environ.get("EXAOPS_VLLM_PYTHON") or MADE / "bin" / "python")
    if not python.exists():
        pytest.skip(f"no vLLM at {python}: run `make vllm`, or set EXAOPS_VLLM_PYTHON")
    return python
