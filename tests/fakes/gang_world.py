"""A replica over several nodes and the agents of its nodes, in memory: the leader's own code, no store."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.gang_rules import HEAD, GangStep, order_of, plan_gang_step
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.observed import ObservedExit, ObservedReplica
from exaserve_ops.serving.models import Deployment, Model, Release, Replica, ReplicaMember
from exaserve_ops.serving.selectors.members import gang_facts
from exaserve_ops.serving.services.gangs import observe_member, take_step
from exaserve_ops.serving.services.replicas import Move, advance_row
from workers.protocol import v1

START = datetime(2026, 1, 1, tzinfo=UTC)
START_SECONDS = 60
COUNT = 3


@dataclass(frozen=True)
class Wish:
    """What one node was told of its part."""

    revision: int
    order: str
    epoch: int
    generation: int
    rendezvous: str = ""


@dataclass
class MemberAgent:
    """Keeps the agents' side of the rules: one launch for each epoch, ever."""

    number: int
    wish: Wish | None = None
    epoch: int = 0
    """Of its process."""
    state: str = ""
    """Of its process; empty: there is none."""
    launched: set[int] = field(default_factory=set)
    ended_by_itself: int = 0
    """Epoch of the last process that did."""
    attempt: int = 0
    is_stuck: bool = False
    """Its process never gets ready."""
    is_up: bool = True

    def hear(self, wish: Wish) -> None:
        known = self.wish
        if known is None or (wish.generation, wish.revision) > (known.generation, known.revision):
            self.wish = wish

    def die(self) -> None:
        """Its process ends by itself."""
        if self.state:
            self.state, self.ended_by_itself = "", self.epoch

    def act(self, head: MemberAgent) -> None:
        """One round of its loop."""
        wish = self.wish
        if wish is None or not self.is_up:
            return
        if self.state and (wish.order != "run" or self.epoch != wish.epoch):
            self.state = "" if self.state == states.STOPPING else states.STOPPING
        elif self.state:
            self._go_on(head)
        elif self._may_launch(wish):
            self.launched.add(wish.epoch)
            self.attempt += 1
            self.epoch, self.state = wish.epoch, states.STARTING

    def report(self) -> ObservedReplica:
        wish = self.wish
        assert wish is not None
        state = self.state or self._idle(wish)
        ended = None
        if self.ended_by_itself:
            ended = ObservedExit(self.attempt, None, 9, 5.0, ())
        return ObservedReplica(
            replica_id="r",
            generation=wish.generation,
            state=state,
            attempt=self.attempt,
            last_exit=ended,
            member_number=self.number,
            epoch=self.epoch if self.state else wish.epoch,
            rendezvous=f"head:{self.epoch}" if self.state and self.number == HEAD else "",
        )

    def _may_launch(self, wish: Wish) -> bool:
        knows_head = self.number == HEAD or bool(wish.rendezvous)
        return wish.order == "run" and wish.epoch not in self.launched and knows_head

    def _idle(self, wish: Wish) -> str:
        if wish.order != "run":
            return states.STOPPED
        return states.FAILED if wish.epoch in self.launched else "waiting"

    def _go_on(self, head: MemberAgent) -> None:
        if self.state == states.STARTING:
            self.state = states.LOADING
        elif self.state == states.LOADING and not self.is_stuck:
            with_head = head.epoch == self.epoch and head.state in (states.LOADING, states.READY)
            self.state = states.READY if self.number == HEAD or with_head else states.LOADING


class GangWorld:
    """Everything between the leader and the nodes may be late or lost; a test says what happens when."""

    def __init__(self, count: int = COUNT) -> None:
        self.now = START
        self.revision = 0
        self.in_flight: list[tuple[int, Wish]] = []
        self.agents = [MemberAgent(number) for number in range(count)]
        model = Model(name="m", digest="sha256:0", source="file:///m")
        deployment = Deployment(name="d", model=model, replicas=1, start_seconds=START_SECONDS)
        self.replica = Replica(
            name="d-1", deployment=deployment, release=Release(deployment=deployment, model=model, number=1),
            memory_bytes=1, status=states.PLACED, node_count=count,
        )  # fmt: skip
        self.members = [
            ReplicaMember(
                replica=self.replica,
                number=number,
                node=Node(name=f"n{number}", liveness="alive", protocol_minor=v1.MINOR),
            )
            for number in range(count)
        ]

    def lead(self) -> GangStep | None:
        """One look of the leader: whichever leads, it has the record alone."""
        step = plan_gang_step(gang_facts(self.replica, self.members), now=self.now)
        if step is not None:
            take_step(self.replica, step, self.now)
        return step

    def tell(self, number: int) -> None:
        """Send a node its wish; it arrives when the test says so, if ever."""
        if not self.replica.gang_epoch and self.replica.wanted == "run":
            return
        self.revision += 1
        head = self.members[HEAD]
        tells = number != HEAD and head.epoch == self.replica.gang_epoch
        order = order_of(
            number,
            wanted=self.replica.wanted,
            hands_over=False,
            began=self.replica.gang_began_at is not None,
            head_ended=head.ended_at is not None,
        )
        rendezvous = head.rendezvous if tells else ""
        wish = Wish(self.revision, order, self.replica.gang_epoch, self.replica.generation, rendezvous)
        self.in_flight.append((number, wish))

    def arrive(self, index: int) -> None:
        """One of the wishes on their way arrives, in whatever order."""
        if self.in_flight:
            number, wish = self.in_flight.pop(index % len(self.in_flight))
            if self.agents[number].is_up:
                self.agents[number].hear(wish)

    def hear(self, number: int) -> None:
        """The leader takes in what a node says now."""
        agent = self.agents[number]
        if agent.is_up and agent.wish is not None and self.members[number].node.liveness == "alive":
            observe_member(self.replica, self.members, number, agent.report(), self.now)

    def act(self, number: int) -> None:
        self.agents[number].act(self.agents[HEAD])

    def lose(self, number: int, *, with_processes: bool) -> None:
        """A node is declared dead: because it is, or because nobody hears it."""
        self.members[number].node.liveness = "dead"
        if with_processes:
            self.agents[number].is_up = False
            self.agents[number].state = ""
        if REPLICA.allows(self.replica.status, "node_lost"):
            advance_row(self.replica, Move("node_lost", "no report"), self.now)

    def bring_back(self, number: int) -> None:
        agent = self.agents[number]
        if not agent.is_up:
            agent.is_up = True
            agent.wish = None  # it was restarted; its journal knows what was launched
        self.members[number].node.liveness = "alive"

    def calm_round(self) -> None:
        """Everything gets through, and a second passes."""
        for number in range(len(self.agents)):
            self.tell(number)
        while self.in_flight:
            self.arrive(0)
        for number in range(len(self.agents)):
            self.act(number)
        for number in range(len(self.agents)):
            self.hear(number)
        self.lead()
        self.now += timedelta(seconds=1)

    def settle(self, rounds: int = 400) -> None:
        """Calm until all are ready; a person starts it again where it was given up."""
        for _ in range(rounds):
            self.calm_round()
            if self.replica.status == states.READY:
                return
            if self.replica.status == states.FAILED and self.replica.gang_retry_at is None:
                self.replica.gang_crashes, self.replica.gang_retry_at = 0, self.now
                self.replica.generation += 1
        raise AssertionError(f"{self.replica.status} after {rounds} calm rounds: {self.replica.reason}")

    @property
    def running_epochs(self) -> set[int]:
        """Of all processes that live anywhere."""
        return {agent.epoch for agent in self.agents if agent.state}
