"""Which real routers take part, and how each is started in front of the simulated replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.contenders import Contender, Site, Tools, find_python, run_ours, run_router, upstream_hosts
from bench.gateway.programs import free_port
from bench.replay import name_sessions
from bench.routing.lockstep import ThroughRouter, listening
from bench.traces import TraceRequest

_CLOCK_BOUND = ["--health-check-interval-secs", "3600", "--eviction-interval-secs", "5"]
"""What goes by a router's own clock, which runs some ten times as slowly as the simulation's."""


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


ROUTERS = {
    "exaserve-gateway": RealRouter(run_ours),
    "exaserve-gateway, sessions": RealRouter(run_ours, is_told_sessions=True),
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
        policy = ThroughRouter(loop, engines, it.port, sessions, tells_waiting=router.start is run_ours)
        try:
            yield policy
        finally:
            policy.close()
