"""A whole fleet validates its model on the real engine: every check is seen to pass there."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.fleet_run import FleetRun, leftovers, start_fleet, wait_until_up

pytestmark = [pytest.mark.validations, pytest.mark.timeout(1200)]

CODE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetRun]:
    var = tmp_path_factory.mktemp("validations") / "var"
    run = start_fleet(CODE, var)
    try:
        wait_until_up(run)
        yield run
        assert run.stop() == 0
    finally:
        for process in leftovers(var):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.identity.pid, signal.SIGKILL)


def test_model_is_validated_on_the_real_engine_and_nothing_of_it_is_left(fleet: FleetRun) -> None:
    summary = fleet.summary()
    headers = {"Authorization": f"Bearer {summary['api_token']}"}
    with httpx.Client(base_url=summary["web_url"] + "/api/v1", headers=headers, timeout=60) as client:
        [model] = client.get("/models").json()["results"]
        wish = {"model": model["id"], "engines": ["torch"], "idle_seconds": 2, "most_at_once": 4}
        asked = client.post("/validations", json=wish | {"reason": "try"})
        assert asked.status_code == httpx.codes.CREATED, asked.text
        address = f"/validations/{asked.json()['id']}"
        fleet.wait_until(lambda: client.get(address).json()["ended_at"], "the validation ends", seconds=900)
        report = client.get(address).json()
        told = {check["name"]: (check["status"], check["why"]) for check in report["checks"]}
        # Durations say nothing on a busy machine; all else does.
        told.pop("idle")
        assert {name: one for name, one in told.items() if one[0] != "passed"} == {}
        names = [one["name"] for one in client.get("/deployments").json()["results"]]
        assert not [name for name in names if name.startswith("validation-")], "the trial is gone"
        listed = httpx.get(f"{summary['gateway_url']}/v1/models", headers=headers, timeout=60).json()
        assert [one["id"] for one in listed["data"]] == ["demo"]
