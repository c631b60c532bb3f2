"""The plan, in a simulated world with a virtual clock: safety apart from liveness."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.node import make_spec
from workers.agent.supervisor import (
    AttemptFacts,
    BeginDrain,
    CheckModel,
    Close,
    Decision,
    Ending,
    Kill,
    Launch,
    ModelCheck,
    Policy,
    Probe,
    ReplicaFacts,
    Terminate,
    launch_digest,
    merge_wish,
    plan,
)
from workers.protocol.v1 import ObservedState, ReplicaSpec, WantedState

POLICY = Policy(crash_limit=4, stop_grace_seconds=3.0, stable_seconds=20.0)
STEP = 0.5


@dataclass
class Process:
    """An engine process of the simulated world."""

    attempt: int
    ready_after: float
    obeys_term: bool
    launched_at: float
    dying_at: float | None = None


@dataclass
class World:
    """One replica on a node: carries out what is planned, and misbehaves as it is told to."""

    spec: ReplicaSpec | None
    now: float = 100.0
    wish_known: bool = True
    facts: ReplicaFacts = field(default_factory=lambda: ReplicaFacts("r", None))
    live: list[Process] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    obeys_term: bool = True
    dies_by_kill: bool = True
    starts_up: bool = True
    idle: bool = True
    decision: Decision | None = None

    def tick(self) -> Decision:
        self.now += STEP
        self.live = [p for p in self.live if p.dying_at is None or p.dying_at > self.now]
        (decision,) = plan(
            [self._observed()], wish_known=self.wish_known, now=self.now, policy=POLICY
        )
        for action in decision.actions:
            self._carry_out(action)
        self.decision = decision
        assert len(self.live) <= 1, "two live processes of one replica"
        return decision

    def run(self, seconds: float) -> Decision:
        decision = self.tick()
        for _ in range(int(seconds / STEP)):
            decision = self.tick()
        return decision

    def crash(self) -> None:
        self.live.clear()

    def _observed(self) -> ReplicaFacts:
        facts = msgspec.structs.replace if False else None
        del facts
        attempt = self.facts.attempt
        if attempt is not None:
            process = self.live[0] if self.live else None
            ready = process is not None and self.starts_up and (
                self.now - process.launched_at >= process.ready_after
            )
            ready_at = attempt.ready_at_seconds
            if ready and ready_at is None:
                ready_at = self.now
            idle = 2 if self.idle and attempt.drain_since_seconds is not None else 0
            attempt = _change(
                attempt,
                pids=(process.attempt,) if process else (),
                probe=Probe.READY if ready else Probe.CLOSED,
                ready_at_seconds=ready_at,
                idle_scrapes=idle,
            )
        self.facts = _change(self.facts, spec=self.spec, attempt=attempt)
        return self.facts

    def _carry_out(self, action: object) -> None:
        attempt = self.facts.attempt
        match action:
            case CheckModel():
                self.facts = _change(self.facts, model=ModelCheck.GOOD)
            case Launch():
                assert self.spec is not None
                assert self.facts.attempt is None
                self._launch(action, self.spec)
            case BeginDrain():
                assert attempt is not None
                self.facts = _change(self.facts, attempt=_change(attempt, drain_since_seconds=self.now))
            case Terminate():
                assert attempt is not None
                self.facts = _change(
                    self.facts,
                    attempt=_change(
                        attempt,
                        term_sent_at_seconds=self.now,
                        stop_reason=action.why,
                        stop_blames_engine=action.blames_engine,
                    ),
                )
                if self.live and self.live[0].obeys_term:
                    self.live[0].dying_at = self.now + STEP
            case Kill():
                assert attempt is not None
                self.facts = _change(self.facts, attempt=_change(attempt, kill_sent_at_seconds=self.now))
                if self.dies_by_kill:
                    self.live.clear()
            case Close():
                assert not self.live
                self.endings.append(action.ending)
                self.facts = _change(
                    self.facts,
                    attempt=None,
                    crashes=action.crashes,
                    port_conflicts=action.port_conflicts,
                    last_ended_at_seconds=self.now,
                )

    def _launch(self, action: Launch, spec: ReplicaSpec) -> None:
        self.launches.append(self.now)
        self.live.append(Process(action.attempt, 2.0, self.obeys_term, self.now))
        same = self.facts.generation == spec.generation
        self.facts = _change(
            self.facts,
            generation=spec.generation,
            crashes=self.facts.crashes if same else 0,
            last_attempt=action.attempt,
            attempt=AttemptFacts(action.attempt, launch_digest(spec), self.now, (action.attempt,)),
        )


def _change(thing, **changes):  # noqa: ANN001, ANN003, ANN202 - dataclasses.replace, shorter
    import dataclasses  # noqa: PLC0415 - only here

    return dataclasses.replace(thing, **changes)
