"""`python -m bench.density --json`: what a further replica of a model costs a node that has one.

Twelve replicas of one model of made weights are started twice in the same run. *Private*: each is a
program of its own that loads the files, which is what loading twelve times means. *Shared*: as the
agent does it, forked off a process that has the imports and one that has read the model's tokenizer,
mapping the node's copy of the weights, with KV blocks from the node's pool. Every
replica answers a request, so that all of its weights were read, before memory is counted: PSS of the
engine, its shim and, for the shared ones, the template processes, summed. The first replica carries what
there is once; the others' share is the cost of an extra one, everything but GPU memory included.

`rebuild_seconds` is from SIGKILL of a shared replica until its successor answers `/health`;
`cold_seconds` is from launch until a private one does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch

from bench.engines.made_model import make_model
from workers.agent import processes
from workers.agent.processes import LaunchLabel, ProcessId
from workers.agent.templates import Template, Templates
from workers.engines.base import Launch, LaunchContext
from workers.engines.torch_adapter import TorchAdapter
from workers.kv.pool import pools_folder

_READY_SECONDS = 120.0
_POLL_SECONDS = 0.005
_KV_BLOCKS = 16
"""Of 16 tokens, brought by each replica. Blocks of the node's pool count as far as they were written to."""


class DensityError(RuntimeError):
    """A replica did not come up."""


@dataclass(slots=True)
class Replica:
    """One running replica."""

    label: LaunchLabel
    leader: ProcessId
    port: int
    key: str
    ready_seconds: float

    def pids(self) -> list[int]:
        """Its shim and its engine."""
        return [member.pid for member in processes.members(self.leader, self.label)]

    def ask(self) -> None:
        """Let it read all of its weights."""
        answer = httpx.post(
            f"http://127.0.0.1:{self.port}/v1/completions",
            headers={"authorization": f"Bearer {self.key}"},
            json={"model": "m", "prompt": [1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": 8, "temperature": 0},
            timeout=_READY_SECONDS,
        )
        answer.raise_for_status()

    def kill(self) -> None:
        """End the engine with SIGKILL, its shim after it."""
        while members := processes.members(self.leader, self.label):
            processes.kill_group(self.leader, members)
            time.sleep(_POLL_SECONDS)


class Node:
    """Launches replicas the way an agent does."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._adapter = TorchAdapter()
        self._templates = Templates(folder / "template.log")
        self._pools = pools_folder(f"bench-{os.getpid()}", folder)
        self._count = 0

    def close(self) -> None:
        """End the template processes and remove the pool of KV memory."""
        self._templates.stop()
        shutil.rmtree(self._pools, ignore_errors=True)

    def start(self, *, shared: bool) -> Replica:
        """Start one and wait until it is ready. Raises `DensityError`."""
        self._count += 1
        label = LaunchLabel("bench", f"r{os.getpid()}-{self._count}", 1)
        port = _free_port()
        context = LaunchContext(
            replica_id=label.replica_id,
            attempt=1,
            served_model_name="m",
            model_dir=self._model,
            host="127.0.0.1",
            ports=(port,),
            api_key=secrets.token_hex(16),
            runtime_dir=self._folder / label.replica_id,
            model_digest="made",
            weights_cache=self._folder / "weights",
            kv_pool_dir=self._pools if shared else None,
        )
        options = {"num_blocks": _KV_BLOCKS, "threads": 1, "weights": "shared" if shared else "private"}
        launch = self._adapter.build_launch(options, context)
        log_file = self._folder / f"{label.replica_id}.log"
        began = time.monotonic()
        if shared:
            template = self._ready_template(launch)
            # The template is there before any replica but the first; its start is not theirs.
            began = time.monotonic()
            pid = template.start_attempt(launch, label, runtime_dir=context.runtime_dir, log_file=log_file)
        else:
            pid = processes.start_attempt(
                launch, label, runtime_dir=context.runtime_dir, log_file=log_file
            ).pid
        stat = processes.read_stat(pid)
        if stat is None:
            raise DensityError(f"{label.replica_id} ended at once; see {log_file}")
        replica = Replica(label, stat.id, port, context.api_key, 0.0)
        _wait_until_ready(replica, log_file)
        replica.ready_seconds = time.monotonic() - began
        return replica

    @property
    def template_pids(self) -> list[int]:
        """The processes that replicas are forked off."""
        return self._templates.pids

    def _ready_template(self, launch: Launch) -> Template:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            template = self._templates.find(launch, engine="torch", model="made", now=time.monotonic())
            if template is None:
                raise DensityError("the template process failed")
            if template.is_ready:
                return template
            time.sleep(_POLL_SECONDS)
        raise DensityError("the template process did not become ready")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(replica: Replica, log_file: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    with httpx.Client() as client:
        while time.monotonic() < deadline and processes.is_alive(replica.leader):
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"http://127.0.0.1:{replica.port}/health").is_success:
                    return
            time.sleep(_POLL_SECONDS)
    raise DensityError(f"{replica.label.replica_id} is not ready: {log_file.read_text()[-2000:]}")


def unique_bytes(pids: Sequence[int]) -> int:
    """Memory of these processes, a page that several map counted in parts (PSS)."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)


@contextlib.contextmanager
def replicas(node: Node, count: int, *, shared: bool) -> Iterator[tuple[list[Replica], list[int]]]:
    """Start `count` replicas one by one; yield them and the unique memory after each of them."""
    running: list[Replica] = []
    grown: list[int] = []
    try:
        for number in range(count):
            running.append(node.start(shared=shared))
            running[-1].ask()
            pids = [pid for replica in running for pid in replica.pids()]
            if shared:
                pids += node.template_pids
            grown.append(unique_bytes(pids))
            kind = "shared" if shared else "private"
            print(f"{kind} {number + 1}: {grown[-1] / 1e6:.0f} MB", file=sys.stderr, flush=True)
        yield running, grown
    finally:
        for replica in running:
            replica.kill()


def measure(folder: Path, count: int) -> dict[str, float | int]:
    """Run both parts and return the figures by name."""
    model = folder / "model"
    model.mkdir()
    weights_bytes = make_model(model, seed=1, dtype="float32") * torch.float32.itemsize
    node = Node(folder, model)
    try:
        with replicas(node, count, shared=False) as (running, grown):
            cold_seconds = statistics.median(replica.ready_seconds for replica in running)
            private_bytes = _each_extra(grown)
        with replicas(node, count, shared=True) as (running, grown):
            first_seconds = running[0].ready_seconds
            shared_bytes, total_bytes = _each_extra(grown), grown[-1]
            rebuilds = [_rebuild(node, running) for _ in range(count // 2)]
    finally:
        node.close()
    rebuild_seconds = statistics.median(rebuilds)
    return {
        "replicas": count,
        "weights_bytes": weights_bytes,
        "private_memory_bytes_per_extra_replica": private_bytes,
        "unique_memory_bytes_per_extra_replica": shared_bytes,
        "unique_memory_ratio_of_weights": round(shared_bytes / weights_bytes, 4),
        "shared_memory_bytes_in_all": total_bytes,
        "cold_seconds": round(cold_seconds, 3),
        "first_shared_seconds": round(first_seconds, 3),
        "rebuild_seconds": round(rebuild_seconds, 3),
        "rebuild_ratio_of_cold": round(rebuild_seconds / cold_seconds, 4),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _each_extra(grown: Sequence[int]) -> int:
    return (grown[-1] - grown[0]) // (len(grown) - 1)


def _rebuild(node: Node, running: list[Replica]) -> float:
    """Kill the oldest replica and start one in its place; return the seconds from the kill."""
    victim = running.pop(0)
    began = time.monotonic()
    victim.kill()
    running.append(node.start(shared=True))
    return time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 0, or 1 if a replica did not come up."""
    parser = argparse.ArgumentParser(prog="bench.density", description=__doc__)
    parser.add_argument("--replicas", type=int, default=12, help="2 or more; each takes some 450 MB")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args(argv)
    if arguments.replicas < 2:  # noqa: PLR2004 - one has no extra ones
        parser.error("--replicas must be at least 2")
    with tempfile.TemporaryDirectory(prefix="exaops-density-") as folder:
        try:
            figures = measure(Path(folder), arguments.replicas)
        except DensityError as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps(figures) if arguments.json else _table(figures))
    return 0


def _table(figures: Mapping[str, float | int]) -> str:
    return "\n".join(f"{name:40} {value}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
