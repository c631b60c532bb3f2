"""Whether an engine is installed behind an interpreter, and which version: asked of its distributions.

The engine itself is not imported: that takes seconds, and a gigabyte of memory.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_SECONDS = 60.0
"""A large environment on a network disk takes its time to be listed for the first time."""
_SCRIPT = """
import importlib.metadata, importlib.util, json, sys
found = {}
for name in sys.argv[2:]:
    try:
        found = {"distribution": name, "version": importlib.metadata.version(name)}
        break
    except importlib.metadata.PackageNotFoundError:
        pass
if found and importlib.util.find_spec(sys.argv[1]) is None:
    found = {}
print(json.dumps(found))
"""


class EngineAbsentError(Exception):
    """No such engine behind this interpreter; the text says what to do."""


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """A distribution that has the engine."""

    distribution: str
    version: str


def find_engine(python: Path, module: str, distributions: tuple[str, ...]) -> FoundEngine:
    """Ask an interpreter for the first of these distributions. Raises `EngineAbsentError`."""
    if not python.is_absolute():
        raise EngineAbsentError(f"{python} is no absolute path of a Python interpreter")
    try:
        answer = subprocess.run(  # noqa: S603 - the operator's interpreter, arguments of ours
            [str(python), "-I", "-c", _SCRIPT, module, *distributions],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        said = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineAbsentError(f"{python} does not run: {_why(error)}") from error
    if not said:
        raise EngineAbsentError(f"{python} has none of {', '.join(distributions)} installed")
    return FoundEngine(str(said["distribution"]), str(said["version"]))


def _why(error: Exception) -> str:
    match error:
        case OSError():
            return error.strerror or type(error).__name__
        case subprocess.TimeoutExpired():
            return f"no answer within {_TIMEOUT_SECONDS:g} s"
        case subprocess.CalledProcessError():
            lines = str(error.stderr).strip().splitlines()
            return lines[-1][:200] if lines else f"exit {error.returncode}"
        case _:
            return "its answer is none of ours"
