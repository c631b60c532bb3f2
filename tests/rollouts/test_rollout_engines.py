"""Rollouts over real engines under many-turn load: a good release goes through, a bad one comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.fleet_run import FleetRun, leftovers, start_fleet, wait_until_up

pytestmark = [pytest.mark.rollouts, pytest.mark.timeout(1200)]

CODE = Path(__file__).resolve().parents[2]
TALKERS = 3
POLICY = {
    "canary_soak_seconds": 5,
    "soak_seconds": 5,
    "min_requests": 3,
    "sessions_wait_seconds": 15,
    # On a busy machine durations say nothing of a release.
    "max_ttft_ratio": 1000,
    "max_itl_ratio": 1000,
}


class Load:
    """Conversations that go on until they are told to end."""

    def __init__(self, fleet: FleetRun) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._summary = fleet.summary()
        self._threads = [threading.Thread(target=self._talk, args=(n,)) for n in range(TALKERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=120)

    def _talk(self, number: int) -> None:
        token = self._summary["api_token"]
        headers = {"Authorization": f"Bearer {token}", "x-session-id": uuid.uuid4().hex}
        messages = [{"role": "user", "content": f"Tell me about river {number}"}]
        with httpx.Client(timeout=120) as client:
            while not self._stop.wait(0.3):
                body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0}
                try:
                    url = self._summary["gateway_url"] + "/v1/chat/completions"
                    answer = client.post(url, json=body, headers=headers)
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                    continue
                if answer.status_code != httpx.codes.OK:
                    self.failed.append(answer.text)
                    continue
                self.answered += 1
                said = answer.json()["choices"][0]["message"]["content"] or "-"
                messages = [*messages, {"role": "assistant", "content": said}]
                messages = [*messages, {"role": "user", "content": "And then?"}][-9:]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetRun]:
    var = tmp_path_factory.mktemp("rollouts") / "var"
    run = start_fleet(CODE, var)
    try:
        wait_until_up(run)
        yield run
        assert run.stop() == 0
    finally:
        for process in leftovers(var):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.identity.pid, signal.SIGKILL)


def roll(fleet: FleetRun, **changes: Any) -> dict[str, Any]:
    """Ask for a rollout over REST and wait for its end."""
    summary = fleet.summary()
    headers = {"Authorization": f"Bearer {summary['api_token']}"}
    with httpx.Client(base_url=summary["web_url"] + "/api/v1", headers=headers, timeout=60) as client:
        [deployment] = client.get("/deployments").json()["results"]
        options = deployment["engine_options"] | changes
        wish = {"deployment": deployment["id"], "engine_options": options, "policy": POLICY}
        plan = client.post("/rollouts/plan", json=wish).json()
        asked = client.post("/rollouts", json=wish | {"plan": plan["digest"], "reason": "try"})
        assert asked.status_code == httpx.codes.CREATED, asked.text
        address = f"/rollouts/{asked.json()['id']}"

        def ended() -> bool:
            return bool(client.get(address).json()["ended_at"])

        fleet.wait_until(ended, "the rollout ends", seconds=500)
        found: dict[str, Any] = client.get(address).json()
        return found


def releases(fleet: FleetRun) -> set[int]:
    return {one["release_number"] for one in fleet.replicas() if one["wanted"] == "run"}


def test_good_release_goes_through_and_a_bad_one_comes_back_with_no_request_failed(fleet: FleetRun) -> None:
    with Load(fleet) as load:
        assert roll(fleet, max_num_seqs=16)["status"] == "done"
        assert releases(fleet) == {2}
        bad = roll(fleet, no_such_option=1)
        assert bad["status"] == "rolled_back"
        assert "given up" in bad["waves"][0]["why"]
        assert [wave["status"] for wave in bad["waves"][1:]] == ["waiting"] * (len(bad["waves"]) - 1)
        assert releases(fleet) == {2}
    assert load.failed == []
    assert load.answered > TALKERS
