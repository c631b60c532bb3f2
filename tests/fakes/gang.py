"""A replica over two nodes as its leader drives it: one start of the whole after another, told to both."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fakes.node import make_spec, wait_for
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import GangMember, ReplicaSpec, WantedState

REPLICA = "r1"


class Gang:
    """Node 0 has the head. A round passes on where the head is, once its agent has told it for this start."""

    def __init__(self, hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"), **changes: object) -> None:
        """Nothing is started yet. `changes`: of the wish, for both members."""
        self.epoch = 0
        self.tells_head = True
        self._hosts = hosts
        self._changes = changes
        self._generation = 1
        self._wanted = (WantedState.RUN, WantedState.RUN)
        self._sent: list[ReplicaSpec | None] = [None, None]

    def seen(self, number: int) -> ReplicaObserved:
        """The member as its agent sees it."""
        raise NotImplementedError

    def send(self, number: int, spec: ReplicaSpec) -> None:
        """Give a node its wish."""
        raise NotImplementedError

    def begin_start(self) -> None:
        """Start the whole (again)."""
        self.epoch += 1
        self.pass_on()

    def ask(self, *wanted: WantedState) -> None:
        """Want something else of the members."""
        self._generation += 1
        self._wanted = (wanted[0], wanted[1])
        self.pass_on()

    def round(self) -> None:
        """Do what is due."""
        self.pass_on()

    def pass_on(self) -> None:
        """Tell each member what has changed for it."""
        head = self.seen(0)
        known = self.tells_head and head.epoch == self.epoch and bool(head.rendezvous)
        for number in (0, 1):
            member = GangMember(
                number=number,
                count=2,
                epoch=self.epoch,
                head_address=head.address if number and known else "",
                rendezvous=head.rendezvous if number and known else "",
                hosts=self._hosts,
                key=f"xg-{self.epoch}",
            )
            changes = {"member": member, "wanted": self._wanted[number], **self._changes}
            spec = make_spec(REPLICA, generation=self._generation, **changes)
            if spec != self._sent[number]:
                self._sent[number] = spec
                self.send(number, spec)

    def wait(self, condition: Callable[[], object], what: str, *, seconds: float = 60.0) -> None:
        """Do rounds until the condition holds."""

        def holds() -> bool:
            self.round()
            return bool(condition())

        try:
            wait_for(holds, what, seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.seen(0)}; {self.seen(1)}") from error

    def wait_states(self, *states: ObservedState, seconds: float = 60.0) -> None:
        """Do rounds until both are in these states, of the newest start, or one has failed in it."""

        def reached() -> bool:
            both = [self.seen(number) for number in (0, 1)]
            failed = [s.reason for s in both if s.state is ObservedState.FAILED and s.epoch == self.epoch]
            if failed and ObservedState.FAILED not in states:
                pytest.fail(f"start {self.epoch}: {failed[0]}; {both}")
            return self.states == states and all(seen.epoch == self.epoch for seen in both)

        self.wait(
            reached,
            f"start {self.epoch}: {[state.value for state in states]}",
            seconds=seconds,
        )

    @property
    def states(self) -> tuple[ObservedState, ...]:
        """Of both members."""
        return tuple(self.seen(number).state for number in (0, 1))
