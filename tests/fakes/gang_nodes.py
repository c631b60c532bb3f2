"""Two nodes with the two members of one replica, and what a leader does for them: starts, and passing on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec, wait_for
from workers.agent.facts import Policy
from workers.engines.base import EngineAdapter
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import GangMember, WantedState

REPLICA = "r1"
HOSTS = ("127.0.0.1", "127.0.0.1")


class GangNodes:
    """Node 0 has the head. `tick` does a round of both agents and tells what the head has told."""

    def __init__(
        self, folder: Path, adapter: Callable[[], EngineAdapter] | None = None, **changes: object
    ) -> None:
        policy = Policy(stop_grace_seconds=0.5, head_away_seconds=3.0)
        self.nodes = [
            LocalNode(folder / name, policy=policy, adapter=adapter() if adapter else None)
            for name in ("n0", "n1")
        ]
        self.epoch = 0
        self.wanted = [WantedState.RUN, WantedState.RUN]
        self.generation = 1
        self.tells_head = True
        self._changes = changes
        self._sent: list[object] = [None, None]

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def begin_start(self) -> None:
        """Start the whole (again)."""
        self.epoch += 1
        self._tell()

    def ask(self, *wanted: WantedState) -> None:
        self.generation += 1
        self.wanted = list(wanted)
        self._tell()

    def tick(self) -> None:
        self._tell()
        for node in self.nodes:
            node.reconciler.tick()

    def seen(self, number: int) -> ReplicaObserved:
        return self.nodes[number].replica(REPLICA)

    @property
    def states(self) -> tuple[ObservedState, ...]:
        return tuple(self.seen(number).state for number in (0, 1))

    def wait(self, condition: Callable[[], object], what: str) -> None:
        def ticked() -> bool:
            self.tick()
            return bool(condition())

        def describe() -> str:
            return f"{what}; {self.seen(0)}; {self.seen(1)}"

        try:
            wait_for(ticked, what)
        except AssertionError as error:
            raise AssertionError(describe()) from error

    def wait_states(self, *states: ObservedState) -> None:
        self.wait(
            lambda: self.states == states and all(self.seen(n).epoch == self.epoch for n in (0, 1)),
            f"start {self.epoch}: {[state.value for state in states]}",
        )

    def _tell(self) -> None:
        head = self.seen(0)
        known = self.tells_head and head.epoch == self.epoch and head.rendezvous
        for number, node in enumerate(self.nodes):
            member = GangMember(
                number=number,
                count=2,
                epoch=self.epoch,
                head_address=head.address if number and known else "",
                rendezvous=head.rendezvous if number and known else "",
                hosts=HOSTS,
            )
            changes = {"member": member, "wanted": self.wanted[number], **self._changes}
            spec = make_spec(REPLICA, generation=self.generation, **changes)
            if spec != self._sent[number]:
                self._sent[number] = spec
                node.wish(spec)
