"""Keeps a node's weights as they are wanted: the one face of the store to the agent.

A thread plans every moment anew from what is wanted and what is there, so that nothing has to be undone
when a wish changes, an agent is killed, or a disk fills up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.protocol.imports import WeightsImport
from workers.protocol.manifest import ManifestError
from workers.protocol.weights import WeightsReport, WeightsWanted
from workers.weights.checks import DamagedError
from workers.weights.imports.desk import ImportDesk, is_import
from workers.weights.inventory import Inventory
from workers.weights.job import BeginFetch, FetchJob, OpenSource, Order, Phase
from workers.weights.planning import StoreFacts, StorePlan, StorePolicy, Wanted, plan_store
from workers.weights.reporting import JobFacts, Moment, make_report
from workers.weights.scrub import Scrub
from workers.weights.shelf import Shelf, StoreTakenError
from workers.weights.swarm.rates import RateCap
from workers.weights.swarm_desk import SwarmDesk

URGENT_PRIORITY = 100
"""From here on replicas wait for it: it yields to nothing."""
_PAUSE_SECONDS = 0.25
_OPEN_AGAIN_SECONDS = 5.0
_MANIFEST_AGAIN_SECONDS = 3.0
_FIRST_RETRY_SECONDS = 10.0
_LONGEST_RETRY_SECONDS = 600.0

logger = logging.getLogger(__name__)

ReadManifest = Callable[[str], bytes | None]
"""Bytes of the manifest of that name; `None` where they are not to be had now."""


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """How a node keeps weights."""

    policy: StorePolicy
    streams: int = 4
    """Connections that one revision is fetched by."""
    bytes_per_second: float = 0.0
    """Of all fetching on this node. 0: as fast as it goes."""
    scrub_bytes_per_second: float = 16e6
    """What is read to find bytes that the disk has changed. 0: nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an engine can start from a revision now."""

    folder: Path | None
    """Its files; `None`: not now."""
    reason: str = ""
    hopeless: bool = False
    """It will not be by waiting."""


@dataclass(slots=True)
class _Retry:
    failures: int = 0
    not_before: float = 0.0
    reason: str = ""
    hopeless: bool = False
    spoilt: bool = False
    """It was the fault of the weights, not of this node or of a source that was away."""


class WeightsKeeper:
    """The store of one node. All public methods may be called from any thread and wait for nothing."""

    def __init__(
        self,
        shelf: Shelf,
        settings: KeeperSettings,
        *,
        read_manifest: ReadManifest,
        open_source: OpenSource,
        in_use: Callable[[], frozenset[str]],
        on_change: Callable[[], None] = lambda: None,
        swarm: SwarmDesk | None = None,
        open_imports: Callable[[RateCap, Callable[[], None]], ImportDesk] | None = None,
    ) -> None:
        """Keep weights on a shelf. `open_imports` takes the node's cap, and what to call for a look."""
        self._shelf = shelf
        self._settings = settings
        self._read_manifest = read_manifest
        self._open_source = open_source
        self._in_use = in_use
        self._on_change = on_change
        self._swarm = swarm
        self._inventory = Inventory(shelf)
        self._cap = RateCap(settings.bytes_per_second)
        self._caps: dict[str, RateCap] = {}
        self._scrub = Scrub(self._inventory, settings.scrub_bytes_per_second, self._take_damage)
        self._lock = threading.Lock()
        self._wanted: tuple[WeightsWanted, ...] = ()
        self._revision = 0
        self._jobs: dict[str, FetchJob] = {}
        self._retries: dict[str, _Retry] = {}
        self._manifest_tries: dict[str, float] = {}
        self._damage: dict[str, set[str]] = {}
        self._problem = "the store is not open yet"
        self._report = WeightsReport(problem=self._problem)
        self._opened_at = -1e9
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._imports = open_imports(self._cap, self._wake.set) if open_imports is not None else None
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    # -- for the agent ---------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to keep."""
        self._thread.start()
        self._scrub.start()

    def stop(self) -> None:
        """Stop fetching, keep what is there, let go of the store."""
        self._stop.set()
        self._wake.set()
        self._scrub.stop()
        if self._thread.ident is not None:
            self._thread.join()
        for job in self._jobs.values():
            job.stop()
        if self._imports is not None:
            self._imports.stop()
        if self._swarm is not None:
            self._swarm.close()
        self._shelf.close()

    def take(
        self, wanted: Sequence[WeightsWanted], revision: int, imports: Sequence[WeightsImport] = ()
    ) -> None:
        """Have these revisions from now on, and no others but as room allows."""
        if self._imports is not None:
            self._imports.take(imports)
        with self._lock:
            before = {one.revision: one.sources for one in self._wanted}
            for one in wanted:
                retry = self._retries.get(one.revision)
                if retry is not None and not retry.hopeless and before.get(one.revision) != one.sources:
                    del self._retries[one.revision]  # other sources deserve a try at once
            self._wanted, self._revision = tuple(wanted), revision
        if self._swarm is not None:
            self._swarm.take(wanted)
        self._wake.set()

    def report(self) -> WeightsReport:
        """What is here and how it goes, as of the last look."""
        return self._report

    def verdict(self, revision: str) -> Verdict:
        """Whether an engine can start from a revision now; if not, what it waits for."""
        if self._inventory.is_ready(revision):
            return self._verdict_of_ready(revision)
        held = next((one for one in self._report.held if one.revision == revision), None)
        with self._lock:
            retry = self._retries.get(revision)
        if retry is not None and retry.hopeless:
            return Verdict(None, retry.reason, hopeless=True)
        if held is None:
            known = any(one.revision == revision for one in self._wanted)
            why = self._problem or (
                "being looked at" if known else "the control plane has not named them yet"
            )
            return Verdict(None, f"weights are not on this node: {why}")
        return Verdict(None, f"weights {held.state.value}: {held.reason}")

    def _verdict_of_ready(self, revision: str) -> Verdict:
        try:
            suspicion = self._inventory.suspicion(revision)
        except DamagedError as error:
            self._take_damage(revision, {str(path) for path in self._inventory.broken_files(revision)})
            return Verdict(None, f"weights were damaged on this disk and are fetched again: {error}")
        if suspicion:
            self._scrub.check_first(revision)
            return Verdict(None, f"{suspicion}: all of it is read and checked first")
        return Verdict(self._shelf.ready_folder(revision))

    # -- the thread ------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except OSError as error:
                self._say_problem(f"{error.filename or self._shelf.root}: {error.strerror or error}")
            except Exception:  # top of the loop: whatever happened, weights are kept on
                logger.exception("keeping weights failed")
                self._say_problem("keeping weights failed; the agent's log says why")
            self._wake.wait(_PAUSE_SECONDS)
            self._wake.clear()

    def step(self) -> None:
        """Look once, plan, and act. May raise `OSError`."""
        now = time.monotonic()
        if not self._open(now):
            return
        with self._lock:
            wanted = self._wanted
        changed = self._settle_jobs(now) | self._settle_imports(now)
        self._repair()
        self._inventory.note_use(self._in_use())
        plan = plan_store(self._facts(wanted, now), self._settings.policy)
        changed |= self._carry_out(plan, {one.revision: one for one in wanted})
        if self._imports is not None and self._revision:
            self._imports.carry_out(plan, now)
        self._give(wanted)
        self._report = self._make_report(wanted, plan)
        if changed:
            self._on_change()

    def _open(self, now: float) -> bool:
        """Own the store; what is wrong with it is looked at again after a while."""
        if self._problem and now - self._opened_at < _OPEN_AGAIN_SECONDS:
            return False
        if self._problem:
            self._opened_at = now
            try:
                self._shelf.open()
                self._shelf.sweep()
                self._inventory.look()
                self._shelf.save_facts()
            except StoreTakenError as error:
                self._say_problem(str(error))
                return False
            except OSError as error:
                self._say_problem(f"{error.filename or self._shelf.root}: {error.strerror or error}")
                return False
            self._problem = ""
        return True

    def _say_problem(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("weights cannot be stored: %s", problem)
        self._problem = problem
        self._opened_at = time.monotonic()
        with self._lock:
            self._report = WeightsReport(revision=self._revision, problem=problem, held=self._report.held)

    def _facts(self, wanted: Sequence[WeightsWanted], now: float) -> StoreFacts:
        disk, imports = self._shelf.disk(), self._imports
        told = [
            Wanted(one.revision, one.total_bytes, one.priority, one.paused, self._blocked(one, now))
            for one in wanted
        ]
        in_use = self._in_use() | (imports.protects() if imports is not None else frozenset())
        return StoreFacts(
            wanted=(*told, *(imports.wanted(now) if imports is not None else ())),
            ready=self._inventory.ready_facts(in_use),
            staged=self._inventory.staged_bytes() | (imports.staged_bytes() if imports is not None else {}),
            free_bytes=disk.free_bytes,
            used_bytes=self._inventory.used_bytes,
            damaged_bytes=self._inventory.damaged_bytes,
        )

    def _blocked(self, one: WeightsWanted, now: float) -> str:
        """Why a revision cannot be fetched now, whatever room there is."""
        retry = self._retries.get(one.revision)
        if retry is not None and (retry.hopeless or now < retry.not_before):
            return retry.reason
        if one.revision in self._jobs or self._inventory.is_ready(one.revision):
            return ""
        return self._get_manifest(one, now)

    def _get_manifest(self, one: WeightsWanted, now: float) -> str:
        known = self._shelf.manifest(one.revision)
        if known is not None and known[0] == one.manifest_digest:
            return ""
        if now - self._manifest_tries.get(one.manifest_digest, -1e9) < _MANIFEST_AGAIN_SECONDS:
            return "its manifest is not to be had yet"
        self._manifest_tries[one.manifest_digest] = now
        body = self._read_manifest(one.manifest_digest)
        if body is None:
            return "its manifest is not to be had yet"
        try:
            manifest = self._shelf.keep_manifest(one.manifest_digest, body)
        except ManifestError as error:
            return f"its manifest is refused: {error}"
        return "" if manifest.revision == one.revision else "its manifest is of other weights"

    def _carry_out(self, plan: StorePlan, wanted: Mapping[str, WeightsWanted]) -> bool:
        changed = self._stop_others(plan, wanted)
        # Before the first wish is known nobody has said that what is staged is not wanted any more.
        for revision in plan.drop if self._revision else ():
            if is_import(revision):
                continue
            logger.info("dropping staged %s: nobody wants it", revision[:19])
            self._inventory.drop_staged(revision)
        if plan.delete_damaged:
            self._inventory.delete_damaged()
        for revision in plan.evict:
            logger.info("evicting %s to make room", revision[:19])
            self._inventory.evict(revision)
            changed = True
        for revision in (one for one in plan.fetch if not is_import(one)):
            self._set_cap(wanted[revision])
            if revision not in self._jobs:
                self._begin(wanted[revision])
                changed = True
        return changed

    def _stop_others(self, plan: StorePlan, wanted: Mapping[str, WeightsWanted]) -> bool:
        """Stop what is not fetched any more, or from elsewhere."""
        stale = [
            revision
            for revision, job in self._jobs.items()
            if revision not in plan.fetch
            or job.order.sources != wanted[revision].sources
            or job.in_swarm != self._by_swarm(wanted[revision])
        ]
        for revision in stale:
            self._jobs.pop(revision).stop()
        if stale:
            self._inventory.look()
        return bool(stale)

    def _begin(self, one: WeightsWanted) -> None:
        order = Order(one.revision, one.sources, self._settings.streams, nice=one.priority < URGENT_PRIORITY)
        caps = (self._cap, self._caps[one.revision])
        job = self._jobs[one.revision] = FetchJob(
            self._shelf, order, caps, self._open_source, self._wake.set, by_swarm=self._swarm_fetch(one, caps)
        )
        job.start()

    def _swarm_fetch(self, one: WeightsWanted, caps: Sequence[RateCap]) -> BeginFetch | None:
        """How this revision is fetched by its swarm; `None` where it is in none."""
        swarm, nice = self._swarm, one.priority < URGENT_PRIORITY
        if swarm is None or one.swarm is None:
            return None
        return lambda staged, sources: swarm.begin(staged, sources, caps, nice=nice)

    def _by_swarm(self, one: WeightsWanted) -> bool:
        return one.swarm is not None and self._swarm is not None

    def _give(self, wanted: Sequence[WeightsWanted]) -> None:
        """Give what is whole to the swarms that want it."""
        for one in wanted:
            known = self._shelf.manifest(one.revision) if self._by_swarm(one) else None
            if known is not None and self._inventory.is_ready(one.revision) and self._swarm is not None:
                self._swarm.give(known[0], known[1])

    def _set_cap(self, one: WeightsWanted) -> None:
        self._caps.setdefault(one.revision, RateCap()).set(one.bytes_per_second)

    def _settle_jobs(self, now: float) -> bool:
        ended = [key for key, job in self._jobs.items() if job.ended]
        for revision in ended:
            job = self._jobs.pop(revision)
            self._inventory.note_sources(revision, job.progress())
            if job.phase is Phase.DONE:
                self._retries.pop(revision, None)
                self._inventory.note_activated(revision)
                logger.info("revision %s is ready", revision[:19])
            elif job.phase is Phase.FAILED:
                self._note_failure(revision, job, now)
        if ended:
            self._inventory.look()
        return bool(ended)

    def _settle_imports(self, now: float) -> bool:
        """Take what imports have put in its place."""
        found = self._imports.look(now) if self._imports is not None and self._revision else []
        for one in found:
            self._inventory.note_imported(one.revision, f"{one.kind} {one.host}", one.total_bytes)
            self._inventory.note_activated(one.revision)
            logger.info("revision %s was taken in", one.revision[:19])
        return bool(found)

    def _note_failure(self, revision: str, job: FetchJob, now: float) -> None:
        with self._lock:
            retry = self._retries.setdefault(revision, _Retry())
            retry.failures += 1
            retry.reason, retry.hopeless, retry.spoilt = job.reason, job.hopeless, job.spoilt
            pause = _FIRST_RETRY_SECONDS * 2 ** min(retry.failures - 1, 16)
            retry.not_before = now + min(pause, _LONGEST_RETRY_SECONDS)

    # -- damage ----------------------------------------------------------------------------------
    def _take_damage(self, revision: str, paths: set[str]) -> None:
        """Note files that are not what they were; they are fetched again with the next look."""
        with self._lock:
            self._damage.setdefault(revision, set()).update(paths)
        self._inventory.hide(revision)
        self._wake.set()

    def _repair(self) -> None:
        with self._lock:
            damage, self._damage = self._damage, {}
        for revision, paths in damage.items():
            logger.warning("revision %s is damaged: %s", revision[:19], ", ".join(sorted(paths)))
            self._inventory.take_back(revision, paths)

    def _make_report(self, wanted: Sequence[WeightsWanted], plan: StorePlan) -> WeightsReport:
        disk = self._shelf.disk()
        return make_report(
            Moment(
                revision=self._revision,
                disk=disk,
                used_bytes=self._inventory.used_bytes,
                wanted=wanted,
                plan=plan,
                jobs={key: JobFacts.of(job) for key, job in self._jobs.items()},
                failures={key: retry.reason for key, retry in self._retries.items()},
                spoilt={key for key, retry in self._retries.items() if retry.spoilt},
                held=self._inventory.held(self._in_use()),
                staged=self._inventory.staged_have_bytes(),
                in_swarms=self._swarm is not None and not self._swarm.problem,
                piece_port=self._swarm.port if self._swarm is not None else 0,
                swarms=self._swarm.seen() if self._swarm is not None else {},
                imports=self._imports.seen(plan, time.monotonic()) if self._imports is not None else (),
            )
        )
