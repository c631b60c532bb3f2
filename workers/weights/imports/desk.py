"""All imports of a node: which run, which wait, which failed, and what is told of them.

Imports are planned with the revisions that the node is to have: by `import:<id>` instead of a digest they get
room, wait for their turn, and go when nobody wants them any more.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from urllib.parse import urlsplit

from workers.protocol.imports import (
    FINDINGS_PART_BYTES,
    ImportSeen,
    ImportState,
    WeightsImport,
    part_count,
)
from workers.protocol.v1 import ImportFindings
from workers.weights.imports.records import FILES, ImportRecord
from workers.weights.imports.run import ImportRun, Phase, Places
from workers.weights.planning import StorePlan, Wanted
from workers.weights.shelf import Shelf

PREFIX = "import:"
PRIORITY = 20
"""As what a person asked for by hand."""
_TRIES = 5
_FIRST_RETRY_SECONDS = 10.0
_PARTS_AT_A_TIME = 4
_TELL_AGAIN_SECONDS = 15.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_BLOCK_BYTES = 512

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Past:
    """What became of earlier tries of one import."""

    attempt: int
    tries: int = 0
    not_before: float = 0.0
    reason: str = ""
    failed: bool = False
    """Not tried again before the attempt rises."""


@dataclass(slots=True)
class _Telling:
    next_part: int = 0
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class Imported:
    """A revision that an import has put into its place."""

    revision: str
    kind: str
    location: str
    total_bytes: int

    @property
    def host(self) -> str:
        """Where it came from, for people: as sources are named."""
        parts = urlsplit(self.location)
        return parts.netloc if parts.scheme.startswith("http") else f"{parts.scheme}://{parts.netloc}"


class ImportDesk:
    """Used by the keeper's thread; `take` by any."""

    def __init__(
        self,
        node_id: str,
        shelf: Shelf,
        places: Places,
        *,
        tell: Callable[[ImportFindings], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._node_id = node_id
        self._shelf = shelf
        self._places = places
        self._tell = tell
        self._on_change = on_change
        self._orders: Mapping[str, WeightsImport] = {}
        self._runs: dict[str, ImportRun] = {}
        self._past: dict[str, _Past] = {}
        self._telling: dict[str, _Telling] = {}
        self._settled: set[str] = set()

    def take(self, orders: Sequence[WeightsImport]) -> None:
        """Take in these models from now on, and no others."""
        self._orders = {f"{PREFIX}{one.import_id}": one for one in orders if _ID.fullmatch(one.import_id)}

    def stop(self) -> None:
        """Stop fetching; what is on the disk for sure stays."""
        for run in self._runs.values():
            run.stop()

    # -- for the plan ----------------------------------------------------------------------------
    def look(self, now: float) -> list[Imported]:
        """Begin and end runs as they are wanted. Returns what is whole since the last look."""
        orders = self._orders
        for key in [
            key for key in self._runs if key not in orders or not _goes_on(self._runs[key], orders[key])
        ]:
            self._runs.pop(key).stop()
        self._past = {key: past for key, past in self._past.items() if key in orders}
        for key, run in list(self._runs.items()):
            if run.ended and run.going.phase is not Phase.FOUND:
                self._note_end(key, self._runs.pop(key), now)
        for key, order in orders.items():
            if key not in self._runs and not order.paused and not self._why_not(key, order, now):
                self._begin(key, order)
        found = {
            run.going.revision: Imported(
                run.going.revision, run.order.kind, run.going.location, run.going.total_bytes
            )
            for run in self._runs.values()
            if run.going.phase is Phase.FOUND
        }
        news = [one for revision, one in found.items() if revision not in self._settled]
        self._settled = set(found)
        return news

    def wanted(self, now: float) -> list[Wanted]:
        """What the store is to plan with."""
        return [self._wanted(key, order, now) for key, order in self._orders.items()]

    def staged_bytes(self) -> dict[str, int]:
        """What each import takes on the disk, wanted or not. Raises `OSError`."""
        return {f"{PREFIX}{folder.name}": _taken_bytes(folder / FILES) for folder in self._folder().iterdir()}

    def protects(self) -> frozenset[str]:
        """Revisions that were found, and that nobody may have claimed yet."""
        return frozenset(self._settled)

    def carry_out(self, plan: StorePlan, now: float) -> None:
        """Admit what has room, drop what nobody wants, tell what was found."""
        for key in plan.drop:
            if key.startswith(PREFIX):
                logger.info("dropping %s: nobody wants it", key)
                shutil.rmtree(self._folder() / key.removeprefix(PREFIX), ignore_errors=True)
        for key, run in list(self._runs.items()):
            if key in plan.fetch:
                run.admit()
            elif run.going.phase is Phase.FETCHING:
                self._runs.pop(key).stop()  # something else goes first; it is begun again in its turn
        self._tell_findings(now)

    def seen(self, plan: StorePlan, now: float) -> tuple[ImportSeen, ...]:
        """How all of them go."""
        return tuple(self._seen(key, order, plan, now) for key, order in self._orders.items())

    # -- inside ----------------------------------------------------------------------------------
    def _folder(self) -> Path:
        return self._shelf.root / "imports"

    def _begin(self, key: str, order: WeightsImport) -> None:
        record = ImportRecord(self._folder() / order.import_id, order)
        run = self._runs[key] = ImportRun(self._shelf, record, order, self._places, self._on_change)
        run.start()

    def _note_end(self, key: str, run: ImportRun, now: float) -> None:
        if run.going.phase is Phase.STOPPED:
            return
        past = self._past.setdefault(key, _Past(run.order.attempt))
        past.tries += 1
        past.reason = run.going.note
        past.failed = run.going.hopeless or past.tries >= _TRIES
        pause = _FIRST_RETRY_SECONDS * 2 ** (past.tries - 1)
        past.not_before = now + max(pause, run.going.retry_after_seconds)

    def _why_not(self, key: str, order: WeightsImport, now: float) -> str:
        """Why it is not begun now; empty where it may be."""
        past = self._past.get(key)
        if past is None:
            return ""
        if past.attempt != order.attempt:
            del self._past[key]
            return ""
        if past.failed:
            return past.reason
        left = past.not_before - now
        return f"tried again in {left:.0f} s: {past.reason}" if left > 0 else ""

    def _wanted(self, key: str, order: WeightsImport, now: float) -> Wanted:
        run = self._runs.get(key)
        phase = run.going.phase if run is not None else None
        blocked = self._why_not(key, order, now)
        if run is None:
            blocked = blocked or "begins in a moment"
        elif phase is Phase.LISTING:
            blocked = "its files are being listed"
        elif phase not in (Phase.LISTED, Phase.FETCHING):
            blocked = "all of it is here"
        total_bytes = run.going.total_bytes if run is not None else 0
        return Wanted(key, total_bytes, PRIORITY, order.paused, blocked)

    def _tell_findings(self, now: float) -> None:
        found = {key: run for key, run in self._runs.items() if run.going.phase is Phase.FOUND}
        self._telling = {key: self._telling.get(key, _Telling()) for key in found}
        for key, run in found.items():
            telling, going = self._telling[key], run.going
            count = part_count(len(going.findings))
            if now < telling.not_before:
                continue
            for index in range(telling.next_part, min(count, telling.next_part + _PARTS_AT_A_TIME)):
                part = going.findings[index * FINDINGS_PART_BYTES : (index + 1) * FINDINGS_PART_BYTES]
                self._tell(
                    ImportFindings(
                        node_id=self._node_id,
                        import_id=run.order.import_id,
                        digest=going.findings_digest,
                        index=index,
                        count=count,
                        data=part,
                    )
                )
            telling.next_part += _PARTS_AT_A_TIME
            if telling.next_part >= count:
                # Reports may get lost: all of it is told again until it is recorded.
                self._telling[key] = _Telling(0, now + _TELL_AGAIN_SECONDS)

    def _seen(self, key: str, order: WeightsImport, plan: StorePlan, now: float) -> ImportSeen:
        run = self._runs.get(key)
        if run is None or order.paused:
            past = self._past.get(key)
            failed = past is not None and past.failed
            reason = self._why_not(key, order, now) or "begins in a moment"
            return ImportSeen(
                import_id=order.import_id,
                state=ImportState.FAILED if failed else ImportState.WAITING,
                attempt=order.attempt,
                reason="kept until somebody has it tried again" if order.paused else reason,
            )
        going = run.going
        speed = going.meter.rate()
        left = max(0, going.total_bytes - going.have_bytes)
        fetching = going.phase is Phase.FETCHING
        return ImportSeen(
            import_id=order.import_id,
            state=_STATES.get(going.phase, ImportState.WAITING),
            attempt=order.attempt,
            reason=_reason(key, run, plan),
            location=going.location,
            files=going.files,
            files_done=going.files_done,
            total_bytes=going.total_bytes,
            have_bytes=going.have_bytes,
            bytes_per_second=round(speed, 1) if fetching else 0.0,
            eta_seconds=round(left / speed, 1) if fetching and speed > 0 else None,
            findings_digest=going.findings_digest,
        )


_STATES = {
    Phase.LISTING: ImportState.LISTING,
    Phase.FETCHING: ImportState.FETCHING,
    Phase.FOUND: ImportState.FOUND,
}


def is_import(key: str) -> bool:
    """Whether a key of the plan is an import's."""
    return key.startswith(PREFIX)


def _goes_on(run: ImportRun, order: WeightsImport) -> bool:
    return run.order == order and not order.paused


def _reason(key: str, run: ImportRun, plan: StorePlan) -> str:
    if run.going.phase is Phase.LISTED:
        return plan.refused.get(key) or plan.waits.get(key) or "begins in a moment"
    return run.going.note


def _taken_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            stat = path.lstat()
            total += stat.st_blocks * _BLOCK_BYTES if S_ISREG(stat.st_mode) else 0
    return total
