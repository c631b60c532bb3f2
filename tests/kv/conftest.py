from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.kv.pool import NodePools, pools_folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Folder of a node's pools, in memory, removed afterwards."""
    folder = pools_folder(f"test-{uuid.uuid4().hex}", tmp_path)
    yield folder
    NodePools(folder).remove_all()
