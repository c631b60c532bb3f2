"""The gateway's benchmark: it runs, and says of itself what its figures say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gateway import contenders
from bench.gateway.__main__ import BURST, PACED, PLAIN, Case, Sample, ratios
from bench.gateway.contenders import HAPROXY, NGINX, OURS, SGLANG, VLLM, upstream_hosts
from bench.gateway.programs import Burst

ROOT = Path(__file__).resolve().parents[2]


def rounds(*rates: float, first_us: float = 100.0) -> list[Sample]:
    return [Sample(Burst(1, 0, rate, first_us, first_us, 1.0, 1.0, 1), 1.0, None) for rate in rates]


def test_ratios_are_those_of_rounds_side_by_side_at_the_worse_concurrency() -> None:
    told = ratios(
        {
            (Case(PLAIN, 32, 1), OURS): rounds(30.0, 10.0, 33.0),  # the machine was busy in the second round
            (Case(PLAIN, 32, 1), VLLM): rounds(10.0, 3.0, 11.0),
            (Case(PLAIN, 256, 1), OURS): rounds(20.0, 20.0, 20.0),
            (Case(PLAIN, 256, 1), VLLM): rounds(8.0, 8.0, 8.0),
            (Case(PLAIN, 1, 1), OURS): rounds(1.0),  # one at a time is not judged
            (Case(PLAIN, 1, 1), VLLM): rounds(9.0),
            (Case(PLAIN, 32, 3072), OURS): rounds(40.0),
            (Case(PLAIN, 32, 3072), VLLM): rounds(2.0),
            (Case(BURST, 32, 1), OURS): rounds(7.0),
            (Case(PACED, 1, 1), OURS): rounds(1.0, first_us=300.0),
            (Case(PACED, 1, 1), VLLM): rounds(1.0, first_us=400.0),
            (Case(PACED, 1, 1), SGLANG): rounds(1.0, first_us=44_000.0),
            (Case(PACED, 1, 1), HAPROXY): rounds(1.0, first_us=150.0),
        }
    )
    assert told["plain_ratio_vs_vllm_router"] == 2.5
    assert told["plain_ratio_at_3072_upstreams"] == 20.0
    assert told["first_byte_p50_ratio_vs_best_router"] == 0.75
    assert told["first_byte_p50_ratio_vs_best_proxy"] == 2.0
    assert told["stream_ratio_vs_vllm_router"] is None  # unmeasured is not guessed
    assert told["plain_ratio_vs_nginx"] is None


def test_cpu_time_counts_with_that_of_the_store() -> None:
    burst = Burst(1, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 1)
    told = ratios(
        {
            (Case(PLAIN, 32, 1), OURS): [Sample(burst, 20.0, 5.0), Sample(burst, 20.0, 5.0)],
            (Case(PLAIN, 32, 1), VLLM): [Sample(burst, 50.0, None)],
            (Case(PLAIN, 256, 1), OURS): [Sample(burst, 30.0, None)],
            (Case(PLAIN, 256, 1), VLLM): [Sample(burst, 54.0, None)],
        }
    )
    assert told["plain_cpu_ratio_vs_vllm_router"] == 1.8


def test_each_upstream_has_an_address_of_its_own_on_this_machine() -> None:
    hosts = upstream_hosts(3072)
    assert len(set(hosts)) == 3072
    assert all(host.startswith("127.") and 0 < int(host.rpartition(".")[2]) < 255 for host in hosts)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="its load and its mock engines are compiled")
def test_benchmark_measures_our_gateway_and_names_what_is_missing() -> None:
    command = [
        *(sys.executable, "-m", "bench.gateway", "--json", "--rounds", "1", "--seconds", "0.5"),
        *("--kinds", PLAIN, BURST, "--concurrency", "2", "--upstreams", "2"),
        *("--contenders", contenders.DIRECT, OURS, NGINX, "--nginx", "/nowhere/nginx"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    ours = [case for case in report["cases"] if case["contender"] == OURS]
    assert {case["kind"] for case in ours} == {PLAIN, BURST}
    assert all(
        case["requests_per_second"] > 0 and case["failed"] == 0 and case["cpu_us"] > 0 for case in ours
    )
    assert NGINX in report["missing"]["2"]
    assert report["ready_seconds"]["2"][OURS] > 0
    assert report["plain_ratio_vs_nginx"] is None
