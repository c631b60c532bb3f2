"""`python -m bench.routing [TRACE] --json`: policies of routing on one trace, in virtual time, simulated.

Prints for each policy the share of prompt tokens found in cache, TTFT, goodput (share of requests whose
first token and rate meet the objective), and how uneven the load was. Policies run inside this program;
routers (ours, vllm-router, sglang-router) are real processes that get each request by HTTP and pass it
to the simulated replicas. One that is not installed is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.gateway.contenders import Tools
from bench.gateway.programs import ProgramError
from bench.routing import routers
from bench.routing.policies import POLICIES
from bench.routing.world import Job, Policy, ReplicaModel, SimulatedReplica, World
from bench.traces import TraceRequest, attainable_hit_ratio, make_conversations, read_trace, with_bursts

TTFT_OBJECTIVE_SECONDS = 3.0
TPOT_OBJECTIVE_SECONDS = 0.05
SHORT_PROMPT_TOKENS = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Run all policies on one trace."""
    parser = argparse.ArgumentParser(prog="bench.routing", description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, help="a public trace; else conversations are made")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals so many times as fast as recorded")
    parser.add_argument("--kv-blocks", type=int, default=ReplicaModel().kv_blocks)
    parser.add_argument("--limit", type=int, help="only so many requests")
    parser.add_argument("--burst", type=int, help="add so many long prompts at once, each two minutes")
    parser.add_argument("--policy", action="append", choices=[*POLICIES, *routers.ROUTERS])
    parser.add_argument("--vllm-python", default="", help="a Python that has vllm-router")
    parser.add_argument("--sglang-python", default="", help="a Python that has sglang-router")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args(argv)
    requests = (
        read_trace(arguments.trace, limit=arguments.limit)
        if arguments.trace
        else make_conversations(sessions=600, turns=6, seconds=600, seed=1)[: arguments.limit]
    )
    if arguments.burst:
        requests = with_bursts(requests, prompts=arguments.burst, every_seconds=120.0, seed=1)
    attainable = attainable_hit_ratio(requests)
    results: dict[str, dict[str, float | None]] = {}
    missing: dict[str, str] = {}
    for name in arguments.policy or [*POLICIES, *routers.ROUTERS]:
        try:
            results[name] = _run(name, requests, arguments)
        except (ProgramError, OSError) as error:
            missing[name] = str(error)
            continue
        hits = results[name]["hit_ratio"] or 0.0
        results[name]["hits_of_attainable_ratio"] = hits / attainable if attainable else None
        _say_progress(name, results[name])
    report = {
        "simulated": True,
        "trace": arguments.trace.name if arguments.trace else "conversations made by this program",
        "requests": len(requests),
        "replicas": arguments.replicas,
        "kv_blocks": arguments.kv_blocks,
        "speed": arguments.speed,
        "burst": arguments.burst,
        "attainable_hit_ratio": attainable,
        "ttft_objective_seconds": TTFT_OBJECTIVE_SECONDS,
        "tpot_objective_seconds": TPOT_OBJECTIVE_SECONDS,
        "missing": missing,
        "policies": results,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_table(report, results)
    return 0


@contextmanager
def _made(
    name: str, requests: Sequence[TraceRequest], names: Sequence[str], arguments: argparse.Namespace
) -> Iterator[Policy]:
    if name in POLICIES:
        yield POLICIES[name]()
        return
    tools = Tools(arguments.vllm_python, arguments.sglang_python)
    with (
        tempfile.TemporaryDirectory(prefix="bench-routing-") as folder,
        routers.started(name, requests, names, Path(folder), tools) as policy,
    ):
        yield policy


def _run(
    name: str, requests: Sequence[TraceRequest], arguments: argparse.Namespace
) -> dict[str, float | None]:
    model = ReplicaModel(kv_blocks=arguments.kv_blocks)
    count = arguments.replicas
    replicas = [SimulatedReplica(f"replica-{number:05d}", model) for number in range(count)]
    began = time.process_time()
    with _made(name, requests, [replica.name for replica in replicas], arguments) as policy:
        world = World(replicas, policy)
        jobs = world.run(requests, speed=arguments.speed)
    return {
        **_figures(jobs),
        "hit_ratio": sum(r.hit_tokens for r in replicas) / sum(r.prompt_tokens for r in replicas),
        "imbalance_mean": statistics.fmean(world.imbalance),
        "served_max_over_mean": max(r.served for r in replicas) * count / len(jobs),
        "cpu_seconds": time.process_time() - began,
    }


def _say_progress(name: str, result: dict[str, float | None]) -> None:
    print(
        f"{name:38} hits {result['hit_ratio']:.3f}  ttft p99 {result['ttft_p99_seconds']:.2f} s"
        f"  goodput {result['goodput_ratio']:.3f}",
        file=sys.stderr,
        flush=True,
    )


def _figures(jobs: Sequence[Job]) -> dict[str, float | None]:
    ttft = sorted(job.first_token_at - job.sent_at for job in jobs if job.first_token_at is not None)
    good = sum(1 for job in jobs if _is_good(job))
    return {
        "ttft_p50_seconds": ttft[len(ttft) // 2],
        "ttft_p95_seconds": ttft[int(len(ttft) * 0.95)],
        "ttft_p99_seconds": ttft[int(len(ttft) * 0.99)],
        "ttft_mean_seconds": statistics.fmean(ttft),
        **_short_figures(jobs),
        "goodput_ratio": good / len(jobs),
    }


def _short_figures(jobs: Sequence[Job]) -> dict[str, float | None]:
    """TTFT of the prompts that nothing but others can make slow."""
    ttft = sorted(
        job.first_token_at - job.sent_at
        for job in jobs
        if job.first_token_at is not None and job.request.prompt_tokens <= SHORT_PROMPT_TOKENS
    )
    shares = {"p50": 0.5, "p99": 0.99}
    return {
        f"short_ttft_{name}_seconds": ttft[int(len(ttft) * share)] if ttft else None
        for name, share in shares.items()
    }


def _is_good(job: Job) -> bool:
    if job.first_token_at is None or job.ended_at is None:
        return False
    if job.first_token_at - job.sent_at > TTFT_OBJECTIVE_SECONDS:
        return False
    gaps = job.request.output_tokens - 1
    return gaps < 1 or (job.ended_at - job.first_token_at) / gaps <= TPOT_OBJECTIVE_SECONDS


def _print_table(report: Mapping[str, Any], results: Mapping[str, Mapping[str, float | None]]) -> None:
    print(f"simulated: {report['requests']} requests of {report['trace']}, {report['replicas']} replicas,")
    print(f"attainable hit ratio {report['attainable_hit_ratio']:.3f}")
    columns = (
        "hit_ratio",
        "ttft_p50_seconds",
        "ttft_p99_seconds",
        "short_ttft_p99_seconds",
        "goodput_ratio",
        "imbalance_mean",
    )
    print(f"{'policy':<38}" + "".join(f"{name:>23}" for name in columns))
    for name, result in results.items():
        print(f"{name:<38}" + "".join(f"{result[column] or 0.0:>23.3f}" for column in columns))
    for name, reason in report["missing"].items():
        print(f"{name:<38}left out: {reason}")


if __name__ == "__main__":
    sys.exit(main())
