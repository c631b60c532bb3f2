"""The whole way of one revision to this disk: staging, fetching, activating, in a thread of its own."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.protocol.weights import WeightsSource
from workers.weights.checks import DamagedError
from workers.weights.fetching import Fetch, Fetching, FetchPolicy, FetchProgress
from workers.weights.shelf import Shelf
from workers.weights.sources.port import Source, SourceError
from workers.weights.staging import Staged
from workers.weights.swarm.rates import RateCap

_LOOK_SECONDS = 0.1
_IDLE = FetchProgress(ended=False, failure="", note="", bytes_per_second=0.0, damaged_pieces=0)

logger = logging.getLogger(__name__)

OpenSource = Callable[[WeightsSource], Source]
BeginFetch = Callable[[Staged, Sequence[Source]], Fetching]


class Phase(enum.Enum):
    """What a job is doing."""

    STAGING = "staging"
    """Going through what is here already."""
    FETCHING = "fetching"
    ACTIVATING = "activating"
    """Syncing and putting it into its place."""
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Order:
    """What is fetched, and from where, nearest first."""

    revision: str
    sources: Sequence[WeightsSource]
    streams: int
    nice: bool
    """It yields to what serves: nobody waits for it."""


class FetchJob:
    """One revision on its way. Ends by itself; may be stopped at any time, and what is verified stays."""

    def __init__(
        self,
        shelf: Shelf,
        order: Order,
        caps: Sequence[RateCap],
        open_source: OpenSource,
        on_end: Callable[[], None] = lambda: None,
        *,
        by_swarm: BeginFetch | None = None,
    ) -> None:
        """Fetch by a swarm where `by_swarm` makes such a fetch, else straight from the sources."""
        self.order = order
        self._shelf = shelf
        self._caps = caps
        self._open_source = open_source
        self._on_end = on_end
        self._by_swarm = by_swarm
        self._ended = threading.Event()
        self._staged: Staged | None = None
        self._fetch: Fetching | None = None
        self._stop = threading.Event()
        self.phase = Phase.STAGING
        self.reason = ""
        self.hopeless = False
        """Whole and verified, and no engine could load it: fetching again is of no use."""
        self._thread = threading.Thread(target=self._run, name="weights-job", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End it and wait until nothing is written any more."""
        self._stop.set()
        self._thread.join()

    @property
    def spoilt(self) -> bool:
        """Whether it failed by fault of the weights: of what their sources give, or of what they are."""
        return self.hopeless or self.progress().spoilt

    @property
    def ended(self) -> bool:
        """Whether nothing is done any more."""
        return self._ended.is_set()

    @property
    def have_bytes(self) -> int:
        """Verified and on disk."""
        return self._staged.have_bytes if self._staged is not None else 0

    def progress(self) -> FetchProgress:
        """How fetching goes."""
        return self._fetch.progress() if self._fetch is not None else _IDLE

    def _run(self) -> None:
        try:
            self.phase = self._work()
        except DamagedError as error:
            self._fail(str(error))
            self.hopeless = True
        except OSError as error:
            self._fail(f"{error.filename or self._shelf.root}: {error.strerror or error}")
        except Exception as error:  # top of a thread: the job must not stay open
            logger.exception("job of %s failed", self.order.revision)
            self._fail(f"it failed: {type(error).__name__}")
        finally:
            if self._staged is not None and self.phase is not Phase.DONE:
                self._staged.close()
            self._ended.set()
            self._on_end()

    def _fail(self, reason: str) -> None:
        logger.warning("revision %s: %s", self.order.revision[:19], reason)
        self.phase, self.reason = Phase.FAILED, reason

    def _work(self) -> Phase:
        self._staged = staged = self._shelf.stage(self.order.revision)
        if not staged.whole:
            self.phase = Phase.FETCHING
            failure = self._fetch_all(staged)
            if failure:
                self._fail(failure)
                return Phase.FAILED
        if not staged.whole:
            return Phase.STOPPED
        self.phase = Phase.ACTIVATING
        self._shelf.activate(staged)
        return Phase.DONE

    def _fetch_all(self, staged: Staged) -> str:
        """Fetch until it is whole or told to stop. Returns why it cannot go on, if it cannot."""
        sources, refusals = [], []
        for told in self.order.sources:
            try:
                sources.append(self._open_source(told))
            except SourceError as error:
                refusals.append(str(error))
        if not sources and self._by_swarm is None:
            return "no source can be used: " + ("; ".join(refusals) or "none was named")
        self._fetch = fetch = (self._by_swarm or self._from_sources)(staged, sources)
        fetch.start()
        while not self._stop.wait(_LOOK_SECONDS) and not fetch.progress().ended:
            pass
        fetch.stop()
        return fetch.progress().failure

    def _from_sources(self, staged: Staged, sources: Sequence[Source]) -> Fetching:
        policy = FetchPolicy(streams=self.order.streams)
        return Fetch(staged, sources, self._caps, policy=policy, nice=self.order.nice)

    @property
    def in_swarm(self) -> bool:
        """Whether its pieces come by a swarm."""
        return self._by_swarm is not None
