"""What the import contracts promise holds, and each was seen to catch a violation of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINTER = Path(sys.executable).with_name("lint-imports")

PLANTS = {
    "Layers": ("exaserve_ops/lib/clock.py", "import exaserve_ops.serving.models"),
    "Inside an app": (
        "exaserve_ops/serving/models/deployments.py",
        "import exaserve_ops.serving.services.replicas",
    ),
    "Domain code does no I/O": ("exaserve_ops/serving/domain/manifest.py", "import os"),
    "Agents know nothing of the control plane": ("workers/agent/home.py", "import exaserve_ops.lib.clock"),
    "Only the agent link speaks the agent protocol": (
        "exaserve_ops/controllers/__init__.py",
        "import workers.protocol.v1",
    ),
    "The control plane uses nothing of the agents but the protocol": (
        "exaserve_ops/adapters/processes.py",
        "import workers.agent.home",
    ),
    "The KV pool serves engines and agent and knows neither": (
        "workers/kv/pool.py",
        "import workers.engines.base",
    ),
    "The weight store serves the agent and does not know it": (
        "workers/weights/__init__.py",
        "import workers.agent.config",
    ),
    "The gateway is a data plane of its own": ("exaserve_ops/gateway/headers.py", "import django.http"),
    "Edges are handed their adapters by the wiring": (
        "exaserve_ops/api/errors.py",
        "import exaserve_ops.adapters.live_store",
    ),
    "Only adapters hold network clients": ("exaserve_ops/dashboard/ports.py", "import redis"),
    "No cycles": ("workers/protocol/digests.py", "import workers.agent.home"),
}
"""One line for each contract that must break it."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources to do harm to."""
    copy = tmp_path_factory.mktemp("tree")
    only_sources = shutil.ignore_patterns("__pycache__", "static", "templates")
    for package in ("exaserve_ops", "workers"):
        shutil.copytree(ROOT / package, copy / package, ignore=only_sources)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def contracts() -> list[str]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [contract["name"] for contract in config["tool"]["importlinter"]["contracts"]]


@contextmanager
def planted(file: Path, line: str) -> Iterator[None]:
    before = file.read_text()
    file.write_text(f"{before}\n{line}\n")
    try:
        yield
    finally:
        file.write_text(before)


def lint(tree: Path) -> tuple[int, str]:
    """Run the linter on a tree; it finds the packages in its working directory."""
    done = subprocess.run(
        [LINTER, "--no-logo", "--no-cache"],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_contracts_hold(tree: Path) -> None:
    code, output = lint(tree)
    assert code == 0, output
    assert f"{len(contracts())} kept, 0 broken" in output


def test_every_contract_has_a_violation_to_catch() -> None:
    assert sorted(PLANTS) == sorted(contracts())


@pytest.mark.parametrize("contract", PLANTS)
def test_planted_violation_is_caught(tree: Path, contract: str) -> None:
    path, line = PLANTS[contract]
    with planted(tree / path, line):
        code, output = lint(tree)
    assert code == 1, output
    assert f"{contract} BROKEN" in output
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert module in output.partition("Broken contracts")[2]


def test_module_without_a_place_in_its_app_is_caught(tree: Path) -> None:
    stray = tree / "exaserve_ops" / "serving" / "helpers.py"
    stray.write_text("")
    try:
        code, output = lint(tree)
    finally:
        stray.unlink()
    assert code == 1
    assert "exaserve_ops.serving.helpers" in output
