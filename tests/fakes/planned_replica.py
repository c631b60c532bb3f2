"""One replica, or one part of one, on a node that carries out what its agent plans; on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from workers.agent.facts import (
    Action,
    AttemptFacts,
    BeginDrain,
    CheckModel,
    Close,
    Decision,
    Ending,
    ForgetCrashes,
    Kill,
    Launch,
    ModelCheck,
    Policy,
    ReplicaFacts,
    Terminate,
)
from workers.agent.supervisor import launch_digest, plan
from workers.protocol.wish import ReplicaSpec

STEP = 0.5
IDLE_SCRAPES = 2


@dataclass
class Process:
    """An engine's process, with the number by which its launch is told."""

    number: int
    launched_at: float
    obeys_term: bool
    dying_at: float | None = None


@dataclass
class PlannedReplica:
    """It misbehaves as it is told to. What a look at its process says is up to who derives from it."""

    spec: ReplicaSpec | None
    policy: Policy = field(default_factory=Policy)
    now: float = 100.0
    wish_known: bool = True
    facts: ReplicaFacts = field(default_factory=lambda: ReplicaFacts("r", None))
    live: list[Process] = field(default_factory=list)
    launched_at: list[float] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    decision: Decision | None = None
    obeys_term: bool = True
    dies_by_kill: bool = True
    idle: bool = True

    def tick(self) -> Decision:
        """Let half a second pass, look, plan, and carry out."""
        self.now += STEP
        self.live = [p for p in self.live if p.dying_at is None or p.dying_at > self.now]
        (decision,) = plan([self._observed()], wish_known=self.wish_known, now=self.now, policy=self.policy)
        for action in decision.actions:
            self.actions.append(action)
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

    # -- what is its own -----------------------------------------------------------------------------
    def seen(self, attempt: AttemptFacts) -> dict[str, Any]:
        """What a look at the process changes of an attempt."""
        raise NotImplementedError

    def launch(self, action: Launch, spec: ReplicaSpec) -> ReplicaFacts:
        """The facts after a launch, but for what is the same for all."""
        raise NotImplementedError

    # -- what all have -------------------------------------------------------------------------------
    def _observed(self) -> ReplicaFacts:
        attempt = self.facts.attempt
        if attempt is not None:
            attempt = replace(
                attempt,
                pids=tuple(p.number for p in self.live),
                idle_scrapes=IDLE_SCRAPES if self.idle and attempt.drain_since_seconds is not None else 0,
                **self.seen(attempt),
            )
        self.facts = replace(self.facts, spec=self.spec, attempt=attempt)
        return self.facts

    def _carry_out(self, action: Action) -> None:
        match action:
            case CheckModel():
                self.facts = replace(self.facts, model=ModelCheck.GOOD)
            case Launch():
                self._launch(action)
            case BeginDrain():
                self._mark(drain_since_seconds=self.now)
            case Terminate():
                self._terminate(action)
            case Kill():
                self._mark(kill_sent_at_seconds=self.now)
                self.live = [] if self.dies_by_kill else self.live
            case Close():
                self._close(action)
            case ForgetCrashes():
                self.facts = replace(self.facts, crashes=0)

    def _mark(self, **changes: object) -> None:
        assert self.facts.attempt is not None
        self.facts = replace(self.facts, attempt=replace(self.facts.attempt, **changes))  # type: ignore[arg-type]  # a test's

    def _launch(self, action: Launch) -> None:
        spec = self.spec
        assert spec is not None
        assert self.facts.attempt is None
        assert not self.live
        number = action.attempt if spec.member is None else spec.member.epoch
        self.launched_at.append(self.now)
        self.live.append(Process(number, self.now, self.obeys_term))
        self.facts = replace(
            self.launch(action, spec),
            generation=spec.generation,
            last_attempt=action.attempt,
            attempt=AttemptFacts(
                action.attempt,
                launch_digest(spec),
                self.now,
                (number,),
                epoch=0 if spec.member is None else number,
            ),
        )

    def _terminate(self, action: Terminate) -> None:
        self._mark(
            term_sent_at_seconds=self.now,
            stop_reason=action.why,
            stop_blames_engine=action.blames_engine,
        )
        for process in self.live:
            if process.obeys_term and self.obeys_term:
                process.dying_at = self.now + STEP

    def _close(self, action: Close) -> None:
        assert not self.live
        self.endings.append(action.ending)
        self.facts = replace(
            self.facts,
            attempt=None,
            crashes=action.crashes,
            port_conflicts=action.port_conflicts,
            last_ended_at_seconds=self.now,
            last_exit_text=action.why,
        )
