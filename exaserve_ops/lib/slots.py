"""A place for something from outside: the wiring fills it, an edge asks for it."""

from __future__ import annotations

from typing import Generic, TypeVar

_T = TypeVar("_T")


class Slot(Generic[_T]):
    """Called, it gives what was handed in last."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._held: _T | None = None

    def use(self, value: _T) -> None:
        """Hand it in."""
        self._held = value

    def __call__(self) -> _T:
        """Return it. Raises `RuntimeError` where nothing was handed in."""
        if self._held is None:
            raise RuntimeError(f"no {self._what}: the entry point must call wiring.connect_pages()")
        return self._held
