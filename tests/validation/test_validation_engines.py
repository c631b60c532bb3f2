"""A whole fleet validates its model on real engines: every check is seen to pass there."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.fleet_run import FleetRun, leftovers, start_fleet, wait_until_up
from tests.fakes.foreign_engines import find_vllm_python

pytestmark = [pytest.mark.validations, pytest.mark.timeout(5400)]

CODE = Path(__file__).resolve().parents[2]
END_SECONDS = 4800
ON_A_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 4}


@contextlib.contextmanager
def fleet(**environment: str) -> Iterator[FleetRun]:
    # Not below pytest's own folder: vLLM's sockets lie in it, and members on one machine meet by whole paths.
    with tempfile.TemporaryDirectory(prefix="v") as folder:
        run = start_fleet(CODE, Path(folder), environment=environment)
        try:
            wait_until_up(run)
            yield run
            assert run.stop() == 0
        finally:
            for process in leftovers(run.var):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.identity.pid, signal.SIGKILL)
            run.output.unlink()


def validate(run: FleetRun, engines: list[str], **wish: Any) -> dict[tuple[str, str], tuple[str, str]]:
    """Outcome and why of each check, by name and engine, once the validation has ended."""
    summary = run.summary()
    headers = {"Authorization": f"Bearer {summary['api_token']}"}
    with httpx.Client(base_url=summary["web_url"] + "/api/v1", headers=headers, timeout=60) as client:
        [model] = client.get("/models").json()["results"]
        asked = client.post(
            "/validations", json={"model": model["id"], "engines": engines, "reason": "try", **wish}
        )
        assert asked.status_code == httpx.codes.CREATED, asked.text
        address = f"/validations/{asked.json()['id']}"
        run.wait_until(
            lambda: client.get(address).json()["ended_at"], "the validation ends", seconds=END_SECONDS
        )
        report = client.get(address).json()
        names = [one["name"] for one in client.get("/deployments").json()["results"]]
        assert not [name for name in names if name.startswith("validation-")], "the trial is gone"
    listed = httpx.get(f"{summary['gateway_url']}/v1/models", headers=headers, timeout=60).json()
    assert [one["id"] for one in listed["data"]] == ["demo"]
    return {(c["name"], c["engine"]): (c["status"], c["why"]) for c in report["checks"]}


def test_model_is_validated_on_the_built_in_engine_and_nothing_of_it_is_left() -> None:
    with fleet() as run:
        told = validate(run, ["torch"], idle_seconds=2, most_at_once=4, most_launches=2)
    # Durations say nothing on a busy machine; all else does.
    told.pop(("idle", "torch"))
    status, why = told.pop(("sleep", "torch"))
    assert (status, "does not sleep" in why) == ("skipped", True)
    assert {key: one for key, one in told.items() if one[0] != "passed"} == {}


def test_vllm_and_the_built_in_engine_agree_on_the_model() -> None:
    python = find_vllm_python()
    with fleet(EXAOPS_AGENT_VLLM_PYTHON=str(python), EXAOPS_AGENT_CPU_THREADS="1") as run:
        told = validate(
            run,
            ["torch", "vllm"],
            engine_options={"vllm": ON_A_CPU},
            idle_seconds=2,
            most_at_once=4,
            most_launches=2,
        )
    for engine in ("torch", "vllm"):
        told.pop(("idle", engine))
        assert told.pop(("sleep", engine))[0] == "skipped", "neither sleeps on a processor"
    assert {key: one for key, one in told.items() if one[0] != "passed"} == {}


def test_stages_of_the_built_in_engine_on_two_nodes_are_validated() -> None:
    with fleet() as run:
        told = validate(
            run,
            ["torch"],
            nodes_per_replica=2,
            engine_options={"torch": {"pipeline_stages": 2}},
            idle_seconds=2,
            most_at_once=4,
            most_launches=1,
        )
    told.pop(("idle", "torch"))
    status, why = told.pop(("sleep", "torch"))
    assert (status, "several nodes" in why) == ("skipped", True)
    assert {key: one for key, one in told.items() if one[0] != "passed"} == {}


def test_ranks_of_vllm_on_two_nodes_are_validated() -> None:
    python = find_vllm_python()
    with fleet(EXAOPS_AGENT_VLLM_PYTHON=str(python), EXAOPS_AGENT_CPU_THREADS="1") as run:
        told = validate(
            run,
            ["vllm"],
            nodes_per_replica=2,
            engine_options={"vllm": ON_A_CPU | {"tensor_parallel_size": 2}},
            idle_seconds=2,
            most_at_once=2,
            most_launches=0,
        )
    told.pop(("idle", "vllm"))
    for name in ("sleep", "tuning"):
        assert told.pop((name, "vllm"))[0] == "skipped"
    assert {key: one for key, one in told.items() if one[0] != "passed"} == {}
