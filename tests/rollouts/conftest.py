"""One fleet of real engines for all tests of a file, and models to roll to."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.rolling_fleet import RollingFleet, rolling_fleet
from workers.engines.demo_model import make_demo_model


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Three nodes with one replica each of the demo model."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # each request is a line, and there are thousands
    with rolling_fleet(tmp_path_factory.mktemp("rolling")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def other_weights(fleet: RollingFleet) -> Path:
    """The demo model with weights of another seed."""
    folder = fleet.run.var / "models" / "demo-other"
    make_demo_model(folder, seed=7)
    return folder


class Spoiler:
    """Makes copies of the demo model, has them registered, and spoils them afterwards."""

    def __init__(self, fleet: RollingFleet) -> None:
        self._fleet = fleet
        self._source = fleet.run.var / "models" / "demo-llama"

    def registered(self, name: str, *, storage: str = "in_place") -> tuple[dict[str, Any], Path]:
        """A registered model of its own and its shard. Its name is in its files: no digest is shared."""
        folder = self._source.with_name(name)
        shutil.copytree(self._source, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": name}))
        model = self._fleet.register(name, folder)
        if storage != "in_place":
            body = {"storage": storage, "reason": "try"}
            self._fleet.api.post(f"/models/{model['id']}/storage", json=body).raise_for_status()
        return model, folder / "model.safetensors"


@pytest.fixture(scope="module")
def spoiler(fleet: RollingFleet) -> Spoiler:
    """See `Spoiler`."""
    return Spoiler(fleet)
