"""What the tests of faults share: a control plane whose lines to its stores can be cut."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.control_plane import ControlPlane, PaperNodes


@pytest.fixture
def plane_store() -> Path | None:
    """Socket of the control plane's store, for tests that need one of their own."""
    return None


@pytest.fixture
def plane(
    tmp_path: Path,
    plane_store: Path | None,
    redis_client: object,  # noqa: ARG001 - empties the store
) -> Iterator[ControlPlane]:
    sockets = Path(tempfile.mkdtemp(prefix="tap-"))
    plane = ControlPlane(tmp_path, sockets, plane_store)
    try:
        yield plane
        assert plane.strange_errors() == []
    finally:
        plane.end()
        shutil.rmtree(sockets, ignore_errors=True)


@pytest.fixture
def nodes(plane: ControlPlane) -> Iterator[PaperNodes]:
    """Six simulated nodes in two racks whose replicas answer chats; the test starts them."""
    nodes = PaperNodes(plane.redis_url, serve=True)
    yield nodes
    nodes.stop()


@pytest.fixture
def away_seconds() -> float:
    """How long what fails stays away: seconds, or a minute in a long run."""
    return float(os.environ.get("EXAOPS_TEST_AWAY_SECONDS", "8"))


@pytest.fixture
def stay_away(away_seconds: float) -> Callable[[], None]:
    """Let the time of the outage pass: the one wait that is itself the fault."""
    return lambda: time.sleep(away_seconds)
