"""One fleet with both engines for all steps, and a table of what they took."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.conftest import CHROMIUM
from tests.engine_figures import PROPERTY
from tests.engines_live.fleet import EngineFleet, engine_fleet
from tests.fakes.foreign_engines import find_vllm_python

Figures = Callable[..., None]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    """Two nodes that offer both engines, and nothing deployed. Its logs stay in pytest's own folder."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; see `make chromium`")
    python = find_vllm_python()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # each request is a line, and there are thousands
    # Not below pytest's own folder: addresses of vLLM's sockets must be short.
    logs = tmp_path_factory.mktemp("engines")
    with (
        tempfile.TemporaryDirectory(prefix="engines-") as folder,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
        engine_fleet(Path(folder), browser, python) as fleet,
    ):
        try:
            yield fleet
        finally:
            shutil.copytree(fleet.run.var / "logs", logs / "logs")


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Figures:
    """Called with a step's name and its figures, which are printed at the end."""

    def record(step: str, **found: Any) -> None:
        record_property(PROPERTY, {"step": step, "figures": found})

    return record
