"""A store of weights that runs, for the tests that fetch with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.weights import Store, running_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store in a folder of its own."""
    with running_store(tmp_path) as store:
        yield store
