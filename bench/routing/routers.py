"""Which real routers take part, and how each is started in front of the simulated replicas."""

from __future__ import annotations

import bisect
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from bench.gateway.contenders import (
    REPLICAS_PER_NODE,
    Contender,
    Site,
    Tools,
    find_python,
    run_ours,
    run_router,
    upstream_hosts,
)
from bench.gateway.programs import free_port
from bench.replay import name_sessions
from bench.routing.lockstep import ThroughRouter, listening
from bench.routing.world import SimulatedReplica
from bench.traces import TraceRequest
from exaserve_ops.adapters.route_table import RouteTableWriter
from exaserve_ops.routing.domain.records import NodeFacts, ReplicaFacts

_CLOCK_BOUND = ["--health-check-interval-secs", "3600", "--eviction-interval-secs", "5"]
"""What goes by a router's own clock, which runs some ten times as slowly as the simulation's."""

_POLL_SECONDS = 0.2
_NEWS_SECONDS = 0.05
"""A tenth of a gateway's own times, because the simulation runs some ten times as fast as they do."""


@dataclass(frozen=True, slots=True)
class RealRouter:
    """One router process with one policy."""

    start: Callable[[Site], contextlib.AbstractContextManager[Contender]]
    is_told_sessions: bool = False
    """Whether requests carry a session header; anonymous ones show what a policy knows of prefixes."""


def _vllm(policy: str) -> Callable[[Site], contextlib.AbstractContextManager[Contender]]:
    def start(site: Site) -> contextlib.AbstractContextManager[Contender]:
        python = find_python("vllm_router", site.tools.vllm_python, "--vllm-python")
        command = [python, "-m", "vllm_router.launch_router", "--policy", policy, *_CLOCK_BOUND]
        return run_router(f"vllm-router-{policy}", command, site)

    return start


def _sglang(site: Site) -> contextlib.AbstractContextManager[Contender]:
    python = find_python("sglang_router", site.tools.sglang_python, "--sglang-python")
    command = [python, "-m", "sglang_router.launch_router", "--policy", "cache_aware", *_CLOCK_BOUND]
    return run_router("sglang-router-cache_aware", command, site)


def _gateways(count: int) -> Callable[[Site], contextlib.AbstractContextManager[Contender]]:
    settings = {
        "EXAOPS_GATEWAY_POLL_SECONDS": str(_POLL_SECONDS),
        "EXAOPS_GATEWAY_PREFIX_NEWS_SECONDS": str(_NEWS_SECONDS),
    }
    return functools.partial(run_ours, gateways=count, settings=settings)


class Facts:
    """What replicas say of themselves, written to the gateways' store as controllers do.

    Ages are told in the gateways' time, which the simulation's does not keep step with.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._writer = RouteTableWriter(client)
        self._simulated: list[float] = []
        self._real: list[float] = []
        self._written_at = 0.0

    def tell(self, replicas: Sequence[SimulatedReplica], now: float) -> None:
        """Note what time it is there and here, and write what is new from time to time."""
        real = time.monotonic()
        self._simulated.append(now)
        self._real.append(real)
        if real - self._written_at < _POLL_SECONDS:
            return
        self._written_at = real
        self._writer.write_facts(
            [
                NodeFacts(
                    f"node-{number:04d}",
                    real,
                    tuple(
                        ReplicaFacts(
                            replica.name,
                            len(replica.running),
                            len(replica.waiting),
                            kv_evicted_idle_seconds=self._idle(replica, real),
                        )
                        for replica in here
                    ),
                )
                for number, here in enumerate(_by_node(replicas))
            ]
        )

    def _idle(self, replica: SimulatedReplica, real: float) -> float | None:
        used_at = replica.evicted_used_at
        if used_at is None:
            return None
        place = bisect.bisect_right(self._simulated, used_at) - 1
        return real - self._real[max(0, place)]


def _by_node(replicas: Sequence[SimulatedReplica]) -> Iterator[Sequence[SimulatedReplica]]:
    for first in range(0, len(replicas), REPLICAS_PER_NODE):
        yield replicas[first : first + REPLICAS_PER_NODE]


ROUTERS = {
    "exaserve-gateway": RealRouter(_gateways(1)),
    "exaserve-gateway, two": RealRouter(_gateways(2)),
    "exaserve-gateway, sessions": RealRouter(_gateways(1), is_told_sessions=True),
    "vllm-router cache_aware": RealRouter(_vllm("cache_aware")),
    "vllm-router consistent_hash, sessions": RealRouter(_vllm("consistent_hash"), is_told_sessions=True),
    "sglang-router cache_aware": RealRouter(_sglang),
}


@contextlib.contextmanager
def started(
    name: str, requests: Sequence[TraceRequest], names: Sequence[str], folder: Path, tools: Tools
) -> Iterator[ThroughRouter]:
    """Start a router before replicas of these names. Raises `ProgramError`, `OSError`."""
    router = ROUTERS[name]
    hosts, port = upstream_hosts(len(names)), free_port()
    with (
        listening(hosts, names, port) as (loop, engines),
        router.start(Site(folder, port, hosts, tools)) as it,
    ):
        sessions = name_sessions(requests) if router.is_told_sessions else None
        policy = ThroughRouter(loop, engines, (it.port, *it.more_ports), sessions)
        with contextlib.ExitStack() as stack:
            stack.callback(policy.close)
            if it.store_url:
                policy.tells_waiting = True
                policy.tell = Facts(stack.enter_context(redis.Redis.from_url(it.store_url))).tell
            yield policy
