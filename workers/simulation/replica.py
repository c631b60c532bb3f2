"""One simulated replica: follows its wish through the states that a real agent reports."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from workers.protocol.observed import ExitInfo, ObservedState, ReplicaObserved
from workers.protocol.wish import GangMember, ReplicaSpec, WantedState
from workers.simulation.engine import KV_EXTENT_BLOCKS, EngineModel, EngineShape, Traffic

_SIGKILL = 9
_LOOK_AGAIN_SECONDS = 0.5
"""While its weights are on their way."""
_OFF = (
    ObservedState.WAITING,
    ObservedState.BACKING_OFF,
    ObservedState.FAILED,
    ObservedState.STOPPED,
)
"""States without a process."""
_RENDEZVOUS_ABOVE = 10_000
"""From the port of a replica over several nodes to the one where its members are said to meet."""
_AFRESH = (ObservedState.BACKING_OFF, ObservedState.FAILED, ObservedState.STOPPED)


@dataclass(frozen=True, slots=True)
class Durations:
    """How long the steps of a replica's life take, in seconds."""

    start: float = 1.2
    load: float = 2.0
    stop: float = 0.4
    backoff: float = 0.5
    longest_backoff: float = 60.0
    stable: float = 30.0
    """Ready for this long, and earlier crashes are forgotten."""
    crash_limit: int = 6


class SimulatedReplica:
    """Changes only through its methods; `advance` carries every state to its due end."""

    def __init__(
        self,
        replica_id: str,
        *,
        host: str,
        port: int,
        shape: EngineShape,
        traffic: Traffic,
        durations: Durations,
        rng_of_attempt: Callable[[str, int], random.Random],
        now: float,
    ) -> None:
        self.missing_weights: Callable[[str], str] = lambda _: ""
        """Says why the node's own copy of a revision cannot be started from; set by its node."""
        self.replica_id = replica_id
        self.spec: ReplicaSpec | None = None
        self.generation = 0
        self.state = ObservedState.WAITING
        self.attempt = 0
        self.port = port
        self.engine: EngineModel | None = None
        self.latency_factor = 1.0
        self._host = host
        self._shape = shape
        self._traffic = traffic
        self._durations = durations
        self._rng_of_attempt = rng_of_attempt
        self._due = math.inf
        """Nothing is launched before it is known what."""
        self._drain_deadline = math.inf
        self._launched_at = now
        self._ready_at: float | None = None
        self._crashes = 0
        self._restarts = 0
        self._epoch = 0
        """Start of a replica over several nodes that was begun last; each is begun once."""
        self._reason = ""
        self._last_exit: ExitInfo | None = None
        self._limits: tuple[int, int] | None = None
        self.has_served = False
        """Whether an engine of it was ever up, so that it has a place in the node's KV pool."""
        self.reclaimed_extents = 0
        """Of KV blocks, that its killed engines held."""

    @property
    def is_serving(self) -> bool:
        """Whether an engine answers."""
        return self.engine is not None

    def follow(self, spec: ReplicaSpec | None, now: float) -> None:
        """Take over the newest wish; `None`: not wanted on this node."""
        self.advance(now)
        if self.spec is None and self.attempt == 0:
            self._due = now
        self.spec = spec
        renewed = spec is not None and spec.generation > self.generation
        if spec is not None:
            self.generation = spec.generation
        wanted = spec.wanted if spec is not None else WantedState.STOP
        if wanted is not WantedState.RUN:
            self._let_go(wanted, now)
        elif self._member is not None:
            self._follow_start(self._member, now)
        elif renewed:
            self._crashes = 0
            if self.state in _AFRESH:
                self._enter(ObservedState.WAITING, due=now)

    @property
    def _member(self) -> GangMember | None:
        return None if self.spec is None else self.spec.member

    def _follow_start(self, member: GangMember, now: float) -> None:
        """Begin the start that is wanted, once; one before it makes way at once."""
        if member.epoch <= self._epoch:
            return
        if self.state in _OFF:
            self._enter(ObservedState.WAITING, due=now)
        elif self.state is not ObservedState.STOPPING:
            self._enter(ObservedState.STOPPING, due=now + self._durations.stop)

    def limit(self, minimum_blocks: int, ceiling_blocks: int) -> None:
        """Change what the engine may have of the node's KV pool, until it ends."""
        self._limits = (minimum_blocks, ceiling_blocks)
        if self.engine is not None:
            self.engine.kv_blocks = ceiling_blocks

    def limits_of(self, shape: EngineShape) -> tuple[int, int]:
        """What it is guaranteed and may have at most; what such an engine brings unless changed."""
        return self._limits or (shape.kv_blocks, shape.kv_blocks)

    def crash(self, now: float) -> None:
        """Kill the engine, if one runs."""
        self.advance(now)
        if self.state in _OFF:
            return
        self._note_exit(now)
        self._note_reclaim(now)
        if self.state in (ObservedState.DRAINING, ObservedState.STOPPING):
            self._stopped(now)
            return
        if self._member is not None:
            self._end_member("killed by signal 9", now)
            return
        if self._ready_at is not None and now - self._ready_at >= self._durations.stable:
            self._crashes = 0
        self._crashes += 1
        self._restarts += 1
        self._end_engine()
        if self._crashes >= self._durations.crash_limit:
            self._enter(ObservedState.FAILED, reason=f"{self._crashes} crashes in a row (simulated)")
            return
        pause = min(self._durations.longest_backoff, self._durations.backoff * 2 ** (self._crashes - 1))
        self._enter(ObservedState.BACKING_OFF, due=now + pause, reason="killed by signal 9 (simulated)")

    def power_off(self, now: float) -> None:
        """The machine is gone, and every process with it; the wish is still on its disk."""
        self.advance(now)
        if self.state in (ObservedState.FAILED, ObservedState.STOPPED):
            return
        if self._member is not None and self._epoch == self._member.epoch:
            self._end_member("the machine was restarted", now)
            return
        self._end_engine()
        keeps = self.spec is not None and self.spec.wanted is WantedState.RUN
        self._enter(ObservedState.WAITING if keeps else ObservedState.STOPPED)

    def power_on(self, now: float) -> None:
        """The machine is back: what is wanted starts anew."""
        if self.state is ObservedState.WAITING:
            self._due = now

    def advance(self, now: float) -> None:
        """Carry out every step that is due by now, each at its own time."""
        if self.state is ObservedState.DRAINING:
            self._drain(now)
        while self._due <= now:
            self._step(self._due)

    def observe(self, now: float) -> ReplicaObserved:
        """What the agent's heartbeat says of it."""
        self.advance(now)
        running = self.state not in _OFF
        engine = self.engine
        if engine is not None:
            engine.latency_factor = self.latency_factor
        telemetry = engine.telemetry(now) if engine is not None else None
        took = self._ready_at - self._launched_at if self._ready_at is not None else None
        backing_off = self.state is ObservedState.BACKING_OFF
        member = self._member
        answers = running and (member is None or member.number == 0)
        return ReplicaObserved(
            replica_id=self.replica_id,
            generation=self.generation,
            state=self.state,
            attempt=self.attempt,
            restarts=self._restarts,
            reason=self._reason,
            address=f"{self._host}:{self.port}" if answers else "",
            ports=(self.port,) if running else (),
            uptime_seconds=now - self._launched_at if running else 0.0,
            start_took_seconds=took if running else None,
            retry_in_seconds=max(0.0, self._due - now) if backing_off else None,
            active_requests=engine.active_requests if engine is not None else None,
            last_exit=self._last_exit,
            telemetry=telemetry if answers else None,
            member_number=member.number if member is not None else 0,
            epoch=self._epoch if running or member is None else member.epoch,
            rendezvous=f"{self._host}:{self.port + _RENDEZVOUS_ABOVE}" if answers and self._epoch else "",
        )

    # ------------------------------------------------------------------ steps
    def _step(self, at: float) -> None:
        durations = self._durations
        match self.state:
            case ObservedState.WAITING | ObservedState.BACKING_OFF:
                self._launch(at)
            case ObservedState.STARTING:
                self._enter(ObservedState.LOADING, due=at + durations.load)
            case ObservedState.LOADING:
                rng = self._rng_of_attempt(self.replica_id, self.attempt)
                self.engine = EngineModel(self._shape, self._traffic, rng, at)
                self._ready_at = at
                self.has_served = True
                self._enter(ObservedState.READY)
            case ObservedState.STOPPING:
                self._stopped(at)
            case _:
                self._due = math.inf

    def _launch(self, at: float) -> None:
        model = self.spec.model if self.spec is not None else None
        missing = self.missing_weights(model.digest) if model and model.manifest_digest else ""
        if missing:
            self._enter(ObservedState.WAITING, due=at + _LOOK_AGAIN_SECONDS, reason=missing)
            return
        member = self._member
        if member is not None and member.number and not (member.head_address and member.rendezvous):
            self._enter(ObservedState.WAITING, reason="waits for the head's address (simulated)")
            return
        self._epoch = member.epoch if member is not None else 0
        self.attempt += 1
        self._launched_at, self._ready_at = at, None
        self._enter(ObservedState.STARTING, due=at + self._durations.start)

    def _let_go(self, wanted: WantedState, now: float) -> None:
        if self.state in _OFF:
            self._stopped(now)
        elif self.state is ObservedState.STOPPING:
            return
        elif wanted is WantedState.DRAIN and self._member is not None and self._member.number:
            return  # it runs until its head has drained
        elif wanted is WantedState.DRAIN and self.state is ObservedState.READY and self.engine:
            self.engine.drain()
            self._drain_deadline = now + (self.spec.drain_seconds if self.spec else 0.0)
            self._enter(ObservedState.DRAINING)
            self._drain(now)
        elif wanted is WantedState.STOP or self.state is not ObservedState.DRAINING:
            self._enter(ObservedState.STOPPING, due=now + self._durations.stop)

    def _drain(self, now: float) -> None:
        if self.engine is None:
            raise AssertionError(self.replica_id)  # only a ready replica drains
        self.engine.advance(now)
        if self.engine.active_requests == 0 or now >= self._drain_deadline:
            at = min(now, self._drain_deadline)
            self._enter(ObservedState.STOPPING, due=at + self._durations.stop)

    def _stopped(self, at: float) -> None:
        self._end_engine()
        self._enter(ObservedState.STOPPED)
        if self._member is not None and self.spec is not None and self.spec.wanted is WantedState.RUN:
            self._follow_start(self._member, at)

    def _end_member(self, how: str, now: float) -> None:
        if self.spec is None or self.spec.wanted is not WantedState.RUN:
            self._stopped(now)
            return
        self._end_engine()
        self._restarts += 1
        why = f"its part of start {self._epoch} ended ({how}, simulated)"
        self._enter(ObservedState.FAILED, reason=f"{why}: waits until the whole is started again")

    def _note_exit(self, now: float) -> None:
        self._last_exit = ExitInfo(
            attempt=self.attempt,
            signal=_SIGKILL,
            duration_seconds=now - self._launched_at,
            log_tail=("simulated: killed by the fault script",),
        )

    def _note_reclaim(self, now: float) -> None:
        """The blocks that a killed engine held are taken back; one that ends by itself gives them back."""
        if self.engine is not None:
            use = self.engine.kv_use(now)
            held = use.live_blocks + sum(use.cached_by_age_blocks)
            self.reclaimed_extents += -(-held // KV_EXTENT_BLOCKS)

    def _end_engine(self) -> None:
        self.engine = self._limits = None
        self._ready_at = None

    def _enter(self, state: ObservedState, *, due: float = math.inf, reason: str = "") -> None:
        self.state, self._due, self._reason = state, due, reason
