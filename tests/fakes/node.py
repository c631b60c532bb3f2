"""A node's agent seen from the outside: its home, its process, and the control plane's end of Redis."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from celery import Celery

from tests.fakes.valkey import Valkey
from workers.agent.home import Home, Identity
from workers.agent.redis_link import kombu_url
from workers.protocol import digests, names, v1
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ModelRef, ReplicaSpec, WantedState

_AGENT = Path(__file__).with_name("tiny_agent.py")
_T = TypeVar("_T")


def wait_for(condition: Callable[[], _T | None], what: str, *, seconds: float = 20.0) -> _T:
    """Poll until the condition returns something true, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)


def make_home(folder: Path, redis_url: str = "redis://127.0.0.1:1/0") -> Home:
    """A home that has joined, with keys as the control plane would derive them."""
    home = Home(folder)
    node_id = str(uuid.uuid4())
    key = digests.node_key(b"s" * 32, node_id, 1)
    home.save_identity(
        Identity(node_id=node_id, name="node-a", node_key=key.hex(), key_epoch=1, redis_url=redis_url)
    )
    return home


def make_spec(replica_id: str, *, generation: int = 1, **changes: object) -> ReplicaSpec:
    """A wish for a tiny engine; the model is an empty folder without files."""
    model = ModelRef(name="tiny", digest="d", source="file:///tmp")
    spec = ReplicaSpec(
        replica_id=replica_id,
        deployment="demo",
        generation=generation,
        wanted=WantedState.RUN,
        model=model,
        engine="tiny",
    )
    return msgspec.structs.replace(spec, **changes)


class Node:
    """An agent in a process of its own, and both ends of its line."""

    def __init__(self, home: Home, valkey: Valkey, env: dict[str, str] | None = None) -> None:
        self.home = home
        self.identity = home.load_identity()
        self.node_id = self.identity.node_id
        self._valkey = valkey
        # How much memory this machine has left is no matter of most tests.
        self._env = {"EXAOPS_AGENT_MEMORY_WAIT_SECONDS": "0"} | (env or {})
        self._celery = Celery("control", broker=kombu_url(valkey.url), set_as_current=False)
        self._last_id = b"0"
        self._revision = 0
        self.reports: list[v1.Report] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.log = home.root / "agent.log"
        self.script = _AGENT
        self.prefix: tuple[str, ...] = ()
        """What to start it with, such as `ip netns exec`."""

    # -- the process -----------------------------------------------------------------------------
    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, str(self.script), str(self.home.root)],
                env=os.environ | self._env,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(20)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGTERM)
        subprocess.run(
            [
                *self.prefix,
                *(sys.executable, "-m", "workers.agent", "stop-replicas", "--home", str(self.home.root)),
            ],
            check=True,
            env=os.environ | {"EXAOPS_AGENT_STOP_GRACE_SECONDS": "1"},
            timeout=60,
        )
        self._celery.close()

    # -- reports ---------------------------------------------------------------------------------
    def read(self) -> list[v1.Report]:
        """Take in what is new on the stream."""
        with self._valkey.client() as client:
            entries = client.xrange(names.REPORT_STREAM, min=b"(" + self._last_id)
        for entry_id, fields in entries:
            self._last_id = entry_id
            envelope = v1.open_envelope(fields[b"m"])
            if envelope.node_id == self.node_id:
                self.reports.append(v1.decode_report(envelope, node_key=self.identity.key))
        return self.reports

    def forget_reports(self) -> None:
        """Look only at what comes from now on."""
        self.read()
        self.reports.clear()

    def all(self, kind: type[_T]) -> list[_T]:
        return [report for report in self.read() if isinstance(report, kind)]

    def heartbeat(self) -> v1.Heartbeat | None:
        beats = self.all(v1.Heartbeat)
        return beats[-1] if beats else None

    def replica(self, replica_id: str) -> ReplicaObserved | None:
        beat = self.heartbeat()
        if beat is None:
            return None
        return next((r for r in beat.replicas if r.replica_id == replica_id), None)

    def wait_state(
        self,
        replica_id: str,
        state: ObservedState,
        *,
        attempt: int | None = None,
        seconds: float = 20.0,
    ) -> ReplicaObserved:
        def found() -> ReplicaObserved | None:
            replica = self.replica(replica_id)
            if replica is None or replica.state is not state:
                return None
            return replica if attempt in (None, replica.attempt) else None

        what = f"{replica_id} is {state.value}; now {self.replica(replica_id)}"
        return wait_for(found, what, seconds=seconds)

    # -- commands --------------------------------------------------------------------------------
    def send(self, command: v1.Command) -> None:
        data = v1.encode_command(command, node_id=self.node_id, node_key=self.identity.key)
        self._celery.send_task(
            names.COMMAND_TASK,
            args=[base64.b64encode(data).decode()],
            queue=names.node_queue(self.node_id),
            ignore_result=True,
        )

    def wish(self, *specs: ReplicaSpec, epoch: int = 1) -> v1.ApplyDesired:
        """Send a new wish and return it."""
        self._revision += 1
        command = v1.ApplyDesired(
            command_id=str(uuid.uuid4()),
            lease_epoch=epoch,
            deadline_seconds=60,
            revision=self._revision,
            replicas=specs,
        )
        self.send(command)
        return command
