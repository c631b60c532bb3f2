"""Entry point: `python -m bench.gateway --json`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gateway import contenders
from bench.gateway.contenders import KEY, MODEL, Contender, Site, Tools, started, upstream_hosts
from bench.gateway.programs import (
    LOAD_CORE,
    Burst,
    ProgramError,
    compile_program,
    cpu_seconds,
    free_port,
    pinned,
    run_load,
    running,
    wait_for_port,
)

PLAIN = "plain"
BURST = "burst"
PACED = "paced"
BODIES = {
    PLAIN: '"max_tokens":16',
    BURST: '"max_tokens":32,"stream":true',
    PACED: '"max_tokens":32,"stream":true',
}
"""One chat of each kind. The mock engine streams 32 events, 10 ms apart if the message holds `paced`:
that passes every router, where a field of its own might not."""
CONCURRENCIES = (1, 32, 256)
JUDGED = (32, 256)
SESSIONS = 8192
MANY = 3072
WARM_AT_ONCE = 32
WARM_SECONDS_PER_UPSTREAM = 0.002
REGISTER_SECONDS = 60.0
REGISTER_SECONDS_PER_UPSTREAM = 0.2
"""sglang-router takes a tenth of a second for each upstream, on a core of its own."""
_PACED_FACTOR = 2
"""Paced streams last 0.3 s each: they are watched for longer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of load."""

    kind: str
    concurrency: int
    upstreams: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.concurrency} at once, {self.upstreams} upstream(s)"


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one contender."""

    burst: Burst
    cpu_us: float | None
    redis_cpu_us: float | None

    @property
    def whole_cpu_us(self) -> float | None:
        """With what its store does for it."""
        return None if self.cpu_us is None else self.cpu_us + (self.redis_cpu_us or 0.0)


Samples = dict[tuple[Case, str], list[Sample]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    options = _parse(arguments)
    tools = Tools(options.vllm_python, options.sglang_python, options.nginx, options.haproxy)
    samples: Samples = {}
    missing: dict[str, dict[str, str]] = {}
    ready: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as name:
        folder = Path(name)
        try:
            mock, load = compile_program("mock", folder), compile_program("load", folder)
            port = free_port()
            with running(pinned(LOAD_CORE, [str(mock), str(port)]), folder / "mock.log") as process:
                wait_for_port(port, process)
                for count in options.upstreams:
                    patience = options.register_seconds or _patience_seconds(count)
                    site = Site(folder, port, upstream_hosts(count), tools, patience)
                    with started(site, options.contenders) as running_now:
                        ready[str(count)] = {one.name: round(one.ready_seconds, 1) for one in running_now}
                        _compare(samples, running_now, load, options, count)
                    missing[str(count)] = site.missing
        except ProgramError as error:
            print(f"bench.gateway: {error}", file=sys.stderr)
            return 1
    report = {
        **ratios(samples),
        "missing": missing,
        "ready_seconds": ready,
        "cases": list(_tell(samples)),
    }
    print(json.dumps(report, indent=1) if options.json else _as_text(report))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gateway", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--kinds", nargs="+", default=list(BODIES), choices=list(BODIES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--upstreams", nargs="+", type=int, default=[1, MANY])
    parser.add_argument("--contenders", nargs="+", default=list(contenders.ALL), choices=list(contenders.ALL))
    parser.add_argument(
        "--register-seconds",
        type=float,
        default=0.0,
        help="how long a router may take to register its upstreams",
    )
    parser.add_argument("--vllm-python", default="", help="a Python that has vllm-router")
    parser.add_argument("--sglang-python", default="", help="a Python that has sglang-router")
    parser.add_argument("--nginx", default="", help="nginx's binary, if not in PATH")
    parser.add_argument("--haproxy", default="", help="HAProxy's binary, if not in PATH")
    return parser.parse_args(arguments)


def _patience_seconds(upstreams: int) -> float:
    return REGISTER_SECONDS + REGISTER_SECONDS_PER_UPSTREAM * upstreams


def _compare(
    samples: Samples, running_now: Sequence[Contender], load: Path, options: argparse.Namespace, count: int
) -> None:
    for contender in running_now:  # connections are opened and sessions placed before anything counts
        _measure(contender, load, Case(PLAIN, WARM_AT_ONCE, count), 1.0 + count * WARM_SECONDS_PER_UPSTREAM)
    cases = [Case(kind, at_once, count) for kind in options.kinds for at_once in options.concurrency]
    for case in cases:
        for _ in range(options.rounds):
            for contender in running_now:
                sample = _measure(contender, load, case, options.seconds)
                samples.setdefault((case, contender.name), []).append(sample)
        for contender in running_now:
            _say_progress(case, contender, samples[case, contender.name])


def _measure(contender: Contender, load: Path, case: Case, seconds: float) -> Sample:
    body = (
        f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"A {case.kind} answer, please."}}],'
        f"{BODIES[case.kind]}}}"
    )
    lasting = seconds * (_PACED_FACTOR if case.kind == PACED else 1)
    before = _cpu(contender.pid), _cpu(contender.redis_pid)
    burst = run_load(load, contender.port, case.concurrency, lasting, [str(SESSIONS), body, KEY])
    after = _cpu(contender.pid), _cpu(contender.redis_pid)
    own, stores = (
        None if end is None or begin is None else (end - begin) * 1e6 / max(1, burst.all_requests)
        for begin, end in zip(before, after, strict=True)
    )
    return Sample(burst, own, stores)


def _cpu(pid: int | None) -> float | None:
    return None if pid is None else cpu_seconds(pid)


def _say_progress(case: Case, contender: Contender, rounds: Sequence[Sample]) -> None:
    rate = statistics.median(one.burst.requests_per_second for one in rounds)
    cpu = _median([one.cpu_us for one in rounds])
    first = statistics.median(one.burst.first_p50_us for one in rounds)
    failed = sum(one.burst.failed for one in rounds)
    print(
        f"{case.name:38} {contender.name:14} {rate:9.0f}/s  cpu {cpu or 0:7.1f} us  first {first:8.0f} us"
        f"  failed {failed}",
        file=sys.stderr,
        flush=True,
    )


# ------------------------------------------------------------------------------------------------
# The report
# ------------------------------------------------------------------------------------------------
def ratios(samples: Mapping[tuple[Case, str], Sequence[Sample]]) -> dict[str, float | None]:
    """The ratios that matter, each the worst over the judged concurrencies; `None` where unmeasured."""
    ours = contenders.OURS
    paced_alone = Case(PACED, 1, 1)
    first = {name: _first_p50(samples.get((paced_alone, name), ())) for name in contenders.ALL}
    routers = [first[name] for name in contenders.ROUTERS if first[name] is not None]
    proxies = [
        value for name, value in first.items() if name not in {ours, contenders.DIRECT} and value is not None
    ]
    return {
        "plain_ratio_vs_vllm_router": _worst(samples, PLAIN, 1, contenders.VLLM),
        "plain_cpu_ratio_vs_vllm_router": _least_saving(samples, contenders.VLLM),
        "stream_ratio_vs_vllm_router": _worst(samples, BURST, 1, contenders.VLLM),
        "plain_ratio_at_3072_upstreams": _worst(samples, PLAIN, MANY, contenders.VLLM),
        "plain_ratio_vs_nginx": _worst(samples, PLAIN, 1, contenders.NGINX),
        "first_byte_p50_ratio_vs_best_router": _share(first[ours], routers),
        "first_byte_p50_ratio_vs_best_proxy": _share(first[ours], proxies),
    }


def _worst(
    samples: Mapping[tuple[Case, str], Sequence[Sample]], kind: str, upstreams: int, peer: str
) -> float | None:
    """Ours over the peer's rate: the median of rounds side by side, the worst of the concurrencies."""
    found: list[float] = []
    for at_once in JUDGED:
        case = Case(kind, at_once, upstreams)
        pairs = list(
            zip(samples.get((case, contenders.OURS), ()), samples.get((case, peer), ()), strict=False)
        )
        if pairs:
            found.append(
                statistics.median(
                    mine.burst.requests_per_second / max(1e-9, theirs.burst.requests_per_second)
                    for mine, theirs in pairs
                )
            )
    return round(min(found), 2) if found else None


def _least_saving(samples: Mapping[tuple[Case, str], Sequence[Sample]], peer: str) -> float | None:
    """A peer's CPU time for a plain request over ours with our store's, the worse of the concurrencies."""
    found: list[float] = []
    for at_once in JUDGED:
        case = Case(PLAIN, at_once, 1)
        theirs = _median([one.cpu_us for one in samples.get((case, peer), ())])
        ours = _median([one.whole_cpu_us for one in samples.get((case, contenders.OURS), ())])
        if theirs is not None and ours is not None:
            found.append(theirs / max(1e-9, ours))
    return round(min(found), 2) if found else None


def _first_p50(rounds: Sequence[Sample]) -> float | None:
    return _median([one.burst.first_p50_us for one in rounds])


def _share(mine: float | None, theirs: Sequence[float | None]) -> float | None:
    known = [value for value in theirs if value is not None]
    return round(mine / min(known), 3) if mine is not None and known else None


def _tell(samples: Mapping[tuple[Case, str], Sequence[Sample]]) -> Iterator[dict[str, Any]]:
    for (case, name), rounds in samples.items():
        direct = samples.get((case, contenders.DIRECT), ())
        rates = [one.burst.requests_per_second for one in rounds]
        yield {
            "kind": case.kind,
            "concurrency": case.concurrency,
            "upstreams": case.upstreams,
            "contender": name,
            "requests_per_second": round(statistics.median(rates)),
            "requests_per_second_spread": [round(min(rates)), round(max(rates))],
            "cpu_us": _rounded(_median([one.cpu_us for one in rounds])),
            "redis_cpu_us": _rounded(_median([one.redis_cpu_us for one in rounds])),
            "first_byte_p50_us": _median([one.burst.first_p50_us for one in rounds]),
            "first_byte_p99_us": _median([one.burst.first_p99_us for one in rounds]),
            "added_first_byte_p50_us": _added(rounds, direct, "first_p50_us"),
            "added_first_byte_p99_us": _added(rounds, direct, "first_p99_us"),
            "failed": sum(one.burst.failed for one in rounds),
        }


def _added(rounds: Sequence[Sample], direct: Sequence[Sample], what: str) -> float | None:
    """How much later than without anything between, by the medians."""
    through = _median([getattr(one.burst, what) for one in rounds])
    straight = _median([getattr(one.burst, what) for one in direct])
    return None if through is None or straight is None else through - straight


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _as_text(report: Mapping[str, Any]) -> str:
    lines = [
        f"{name}: {value}"
        for name, value in report.items()
        if name not in {"cases", "missing", "ready_seconds"}
    ]
    for upstreams, reasons in report["missing"].items():
        lines += [f"{name} at {upstreams} upstream(s): {why}" for name, why in reasons.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
