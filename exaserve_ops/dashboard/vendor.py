"""Serves `vendor/plotly.min.js` out of the plotly wheel, and nothing else of it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.contrib.staticfiles.finders import BaseFinder
from django.core.files.storage import FileSystemStorage, Storage

FILE = "plotly.min.js"
PREFIX = "vendor"


class PlotlyFinder(BaseFinder):
    """Finds plotly.js where pip put it, so that it is never copied into the repository."""

    def __init__(self, *_: object, **__: object) -> None:
        spec = find_spec("plotly")  # found, not imported: plotly itself is large and not needed here
        if spec is None or spec.origin is None:
            raise RuntimeError("the plotly wheel is not installed; see requirements.txt")
        self._folder = Path(spec.origin).parent / "package_data"

    def check(self, **_: object) -> list[Any]:
        """Nothing to check: no settings."""
        return []

    def find(self, path: str, find_all: bool = False, **_: object) -> Any:  # noqa: ANN401, FBT001, FBT002 - Django's
        """Return the file's place, or an empty list as Django's own finders do."""
        if path != f"{PREFIX}/{FILE}":
            return []
        found = str(self._folder / FILE)
        return [found] if find_all else found

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterable[tuple[str, Storage]]:  # noqa: ARG002 - Django's signature
        """Return the one file, for `collectstatic`."""
        storage = FileSystemStorage(location=str(self._folder))
        storage.prefix = PREFIX  # type: ignore[attr-defined]  # how collectstatic learns the folder
        return [(FILE, storage)]
