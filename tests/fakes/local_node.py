"""The reconcile half of an agent in the test's own process: real engines, no Redis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fakes.node import make_home, wait_for
from tests.fakes.tiny_adapter import TinyAdapter
from workers.agent.attempts import AttemptRunner
from workers.agent.config import AgentConfig
from workers.agent.journal import Journal, Wish
from workers.agent.memory_gate import HostMemory
from workers.agent.model_files import ModelVerifier
from workers.agent.reconcile import Reconciler
from workers.agent.scraper import Scraper
from workers.agent.sleep_sight import SleepSight
from workers.agent.snapshot import Observer
from workers.agent.stopping import stop_replicas
from workers.agent.strays import StrayWatch
from workers.agent.supervisor import Policy
from workers.engines.base import EngineAdapter
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ReplicaSpec


class LocalNode:
    """One node; `tick` is called by the waiting functions."""

    def __init__(
        self,
        folder: Path,
        *,
        adapter: EngineAdapter | None = None,
        config: AgentConfig | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.home = make_home(folder)
        self.home.create()
        self.identity = self.home.load_identity()
        self.node_id = self.identity.node_id
        self.config = config or AgentConfig(address="127.0.0.1")
        chosen: EngineAdapter = adapter or TinyAdapter()
        self.adapters = {"tiny": chosen, chosen.name: chosen}
        self.policy = policy or Policy(stop_grace_seconds=0.5, crash_limit=3)
        self.host_memory: HostMemory | None = None
        """Unknown, unless a test says how much there is."""
        self._revision = 0
        self._runners: list[AttemptRunner] = []
        self.begin()

    def begin(self) -> None:
        """What an agent does at its start, on whatever the home holds."""
        self.journal = Journal(self.home.journal_file)
        self.scraper = Scraper()
        verifier = ModelVerifier(self.journal)
        self.runner = AttemptRunner(
            home=self.home,
            identity=self.identity,
            config=self.config,
            journal=self.journal,
            verifier=verifier,
            adapters=self.adapters,
        )
        self._runners.append(self.runner)
        self.sleep = SleepSight(self.runner.sleeps, self.adapters, lambda: self.host_memory)
        self.reconciler = Reconciler(
            Observer(self.node_id, self.journal, self.scraper, verifier, sleep=self.sleep),
            self.runner,
            self.scraper,
            StrayWatch(self.node_id, 0.5),
            self.adapters,
            policy=self.policy,
            log_cap_bytes=self.config.log_cap_bytes,
        )
        self.scraper.start()

    def close(self) -> None:
        self.scraper.stop()
        left = stop_replicas(self.node_id, self.journal, grace_seconds=0.5)
        for runner in self._runners:
            runner.close()
            runner.reap()
        self.journal.close()
        assert left == ()

    def wish(self, *specs: ReplicaSpec) -> None:
        self._revision += 1
        self.journal.save_wish(Wish(revision=self._revision, lease_epoch=1, specs=specs))

    def replica(self, replica_id: str) -> ReplicaObserved:
        found = {replica.replica_id: replica for replica in self.reconciler.replicas}
        return found.get(replica_id) or ReplicaObserved(
            replica_id=replica_id, generation=0, state=ObservedState.WAITING
        )

    def wait(self, condition: Callable[[], object], what: str, *, seconds: float = 20.0) -> None:
        """Tick until the condition holds."""

        def ticked() -> bool:
            self.reconciler.tick()
            return bool(condition())

        wait_for(ticked, f"{what}; replicas: {self.reconciler.replicas}", seconds=seconds)

    def wait_state(
        self, replica_id: str, state: ObservedState, *, attempt: int | None = None
    ) -> ReplicaObserved:
        def reached() -> bool:
            replica = self.replica(replica_id)
            return replica.state is state and attempt in (None, replica.attempt)

        self.wait(reached, f"{replica_id} is {state.value}")
        return self.replica(replica_id)

    def wait_backing_off(self, replica_id: str) -> ReplicaObserved:
        """Tick until it waits for its next attempt, which the round that closes one cannot tell yet."""

        def reached() -> bool:
            replica = self.replica(replica_id)
            return replica.state is ObservedState.BACKING_OFF and replica.retry_in_seconds is not None

        self.wait(reached, f"{replica_id} waits for its next attempt")
        return self.replica(replica_id)
