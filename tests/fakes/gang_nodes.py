"""Two nodes with the members of one replica: agents' loops in the test itself, or agents of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fakes.gang import REPLICA, Gang
from tests.fakes.installed_agent import InstalledAgent
from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_home
from tests.fakes.valkey import Valkey
from workers.agent import processes
from workers.agent.facts import Policy
from workers.engines.base import EngineAdapter
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ReplicaSpec


class GangNodes(Gang):
    """The loops of both agents run as the test waits."""

    def __init__(
        self, folder: Path, adapter: Callable[[], EngineAdapter] | None = None, **changes: object
    ) -> None:
        policy = Policy(stop_grace_seconds=0.5)
        self.nodes = [
            LocalNode(folder / name, policy=policy, adapter=adapter() if adapter else None)
            for name in ("n0", "n1")
        ]
        super().__init__(**changes)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def seen(self, number: int) -> ReplicaObserved:
        return self.nodes[number].replica(REPLICA)

    def send(self, number: int, spec: ReplicaSpec) -> None:
        self.nodes[number].wish(spec)

    def round(self) -> None:
        self.pass_on()
        for node in self.nodes:
            node.reconciler.tick()


class GangAgents(Gang):
    """Both agents are processes, as operators run them, with the engines that they really have."""

    def __init__(
        self,
        folder: Path,
        valkey: Valkey,
        env: dict[str, str] | None = None,
        prefixes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
        hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
        **changes: object,
    ) -> None:
        self.agents = []
        for number, host in enumerate(hosts):
            address = {"EXAOPS_AGENT_ADDRESS": host, "EXAOPS_AGENT_STOP_GRACE_SECONDS": "2"}
            home = make_home(folder / f"n{number}", valkey.url)
            agent = InstalledAgent(home, valkey, address | (env or {}))
            agent.prefix = prefixes[number]
            self.agents.append(agent)
        super().__init__(hosts, **changes)

    def start(self) -> None:
        for agent in self.agents:
            agent.start()

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        assert not [p for agent in self.agents for p in processes.labelled(agent.node_id)]

    def seen(self, number: int) -> ReplicaObserved:
        nothing = ReplicaObserved(replica_id=REPLICA, generation=0, state=ObservedState.WAITING)
        return self.agents[number].replica(REPLICA) or nothing

    def send(self, number: int, spec: ReplicaSpec) -> None:
        self.agents[number].wish(spec)
