"""Reads what lies on the disk, slowly and for ever, to find bytes that the disk has changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from workers.weights.checks import bad_pieces
from workers.weights.disk_io import yield_disk
from workers.weights.inventory import Inventory
from workers.weights.swarm.rates import RateCap

_PAUSE_SECONDS = 30.0
_SLICE_BYTES = 256 * 1024

logger = logging.getLogger(__name__)

OnDamage = Callable[[str, set[str]], None]
"""Told of a revision and of its files that are not what they were."""


class _EndedError(Exception):
    """The scrub is told to stop, or to check another revision first."""


class Scrub:
    """One thread; the revision that was checked longest ago is next."""

    def __init__(self, inventory: Inventory, bytes_per_second: float, on_damage: OnDamage) -> None:
        self._inventory = inventory
        self._cap = RateCap(bytes_per_second)
        self._enabled = bytes_per_second > 0
        self._on_damage = on_damage
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._urgent: dict[str, None] = {}
        self._thread = threading.Thread(target=self._run, name="scrub-weights", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; at most one piece is waited for."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check_first(self, revision: str) -> None:
        """Read a revision now and as fast as it goes: somebody waits to start from it."""
        self._urgent.setdefault(revision)
        self._wake.set()

    def check(self, revision: str) -> set[str]:
        """Read a whole revision; returns its files that are not what the manifest says. Raises `OSError`."""
        known = self._inventory.shelf.manifest(revision)
        folder = self._inventory.shelf.ready_folder(revision)
        urgent = revision in self._urgent
        damaged = set()
        for file in known[1].files if known else ():
            if bad_pieces(
                folder, file, known[1].piece_bytes if known else 1, lambda n: self._pace(n, urgent)
            ):
                damaged.add(file.path)
        return damaged

    def _pace(self, length: int, urgent: bool) -> None:  # noqa: FBT001 - the one thing that differs
        for start in range(0, length, _SLICE_BYTES):
            if self._stop.is_set() or (self._urgent and not urgent):
                raise _EndedError
            if not urgent:
                self._cap.take(min(_SLICE_BYTES, length - start))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                rested = self._step()
            except _EndedError:
                continue
            except OSError as error:
                logger.warning("weights could not be read: %s", error)
                rested = True
            except Exception:  # top of the loop: one odd revision must not end the scrub
                logger.exception("checking weights failed")
                rested = True
            if rested:
                self._wake.wait(_PAUSE_SECONDS)
            self._wake.clear()

    def _step(self) -> bool:
        """Check one revision. Returns whether it is time to rest."""
        urgent = next(iter(self._urgent), None)
        ready = self._inventory.ready()
        if urgent is not None and urgent not in ready:
            self._urgent.pop(urgent, None)
            return False
        revision = urgent or next(iter(ready), None)
        if revision is None or (urgent is None and not self._enabled):
            return True
        yield_disk(to_everybody=urgent is None)
        damaged = self.check(revision)
        self._urgent.pop(revision, None)
        if damaged:
            self._on_damage(revision, damaged)
        else:
            self._inventory.note_checked(revision)
        return urgent is None
