"""A node runs without the control plane's packages, and the agent without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_IMPORT_ALL = """
import importlib, pkgutil, sys

class Blocked:
    names = ("django", "psycopg", "exaserve_ops", "channels", "rest_framework")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} must not be imported on a node")
        return None

sys.meta_path.insert(0, Blocked())
import workers
count = 0
for module in pkgutil.walk_packages(workers.__path__, "workers."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        count += 1
print(count)
"""

_IMPORT_AGENT = """
import sys
import workers.agent.cli
print(sorted({"torch", "numpy", "transformers", "django", "celery"} & sys.modules.keys()))
"""


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_everything_under_workers_imports_without_the_control_plane() -> None:
    modules = len([path for path in (ROOT / "workers").rglob("*.py") if path.name != "__main__.py"])
    assert int(_python(_IMPORT_ALL)) == modules - 1  # `workers` itself is where the walk starts


def test_agent_process_stays_light() -> None:
    assert _python(_IMPORT_AGENT) == "[]"
