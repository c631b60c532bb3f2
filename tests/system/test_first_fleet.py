"""The main job, end to end: real processes, real weights, real requests, a real browser."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.chat_client import ChatError
from bench.fleet_run import FleetRun, leftovers, start_fleet, wait_until_up
from exaserve_ops.lib import clock

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

CODE = Path(__file__).resolve().parents[2]
HELLO = [{"role": "user", "content": "Tell me about " + ", ".join(["rivers and hills"] * 12)}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetRun]:
    var = tmp_path_factory.mktemp("first") / "var"
    run = start_fleet(CODE, var, "--load")
    try:
        wait_until_up(run)
        yield run
        assert run.stop() == 0
        assert leftovers(var) == (), "processes are left after Ctrl-C"
    finally:
        for process in leftovers(var):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.identity.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def browser_page(fleet: FleetRun) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = next((p for p in ("/usr/bin/chromium", "/usr/bin/google-chrome") if Path(p).exists()), None)
    if chromium is None:
        pytest.skip("Chromium is not installed")
    summary = fleet.summary()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(base_url=summary["web_url"])
        page.goto("/login")
        page.fill("input[name=username]", summary["admin_user"])
        page.fill("input[name=password]", summary["admin_password"])
        page.press("input[name=password]", "Enter")
        page.wait_for_url("**/")
        yield page
        browser.close()


def api(fleet: FleetRun) -> httpx.Client:
    summary = fleet.summary()
    headers = {"Authorization": f"Bearer {summary['api_token']}"}
    return httpx.Client(base_url=summary["web_url"] + "/api/v1", headers=headers, timeout=20)


def deployment(fleet: FleetRun) -> dict[str, Any]:
    found: dict[str, Any] = fleet.get("/api/v1/deployments")["results"][0]
    return found


def live(fleet: FleetRun) -> list[dict[str, Any]]:
    return [one for one in fleet.replicas() if one["status"] != "stopped"]


def settles_at(fleet: FleetRun, count: int) -> None:
    fleet.wait_until(
        lambda: [one["status"] for one in live(fleet)] == ["ready"] * count,
        f"{count} ready replicas and no other",
        seconds=180,
    )


def test_second_turn_lands_on_the_same_replica_and_reuses_its_blocks(fleet: FleetRun) -> None:
    body = {"model": "demo", "messages": HELLO, "max_tokens": 4}
    headers = {"Authorization": f"Bearer {fleet.summary()['api_token']}", "x-session-id": uuid.uuid4().hex}
    url = fleet.summary()["gateway_url"] + "/v1/chat/completions"
    first, second = (httpx.post(url, json=body, headers=headers, timeout=60) for _ in range(2))
    assert first.headers["x-exaops-replica"] == second.headers["x-exaops-replica"]
    assert second.headers["x-exaops-route"] == "sticky"
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= second.json()["usage"]["prompt_tokens"] - 16


def test_conversation_moves_between_turns_and_finds_its_prefix_at_the_target(fleet: FleetRun) -> None:
    session_id = uuid.uuid4().hex
    headers = {"Authorization": f"Bearer {fleet.summary()['api_token']}", "x-session-id": session_id}
    url = fleet.summary()["gateway_url"] + "/v1/chat/completions"
    messages = list(HELLO)

    def turn() -> httpx.Response:
        body = {"model": "demo", "messages": messages, "max_tokens": 8}
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"] | {"role": "assistant"})
        messages.append({"role": "user", "content": "And then?"})
        return answer

    source = [turn().headers["x-exaops-replica"] for _ in range(2)][1]
    with api(fleet) as client:
        listing = f"/sessions?session_id={session_id}"

        def recorded() -> Any:
            rows = client.get(listing).json()["results"]
            return rows[0]["id"] if rows and rows[0]["turns"] == 2 else None

        fleet.wait_until(recorded, "both turns are recorded")
        order = client.post(f"/sessions/{recorded()}/move", json={"reason": "to see it move"})
        assert order.status_code == 202, order.text
        address = f"/relocations/{order.json()['id']}"
        fleet.wait_until(lambda: client.get(address).json()["ended_at"], "the move has ended")
        moved = client.get(address).json()
    assert (moved["status"], moved["way"]) == ("done", "transfer"), moved["reason"]
    third = turn()
    assert third.headers["x-exaops-replica"] == moved["target"] != source
    assert third.headers["x-exaops-route"] == "sticky"
    cached = third.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= moved["target_tokens"] - 48


def test_heatmaps_move_within_two_seconds_of_the_change(browser_page: Any) -> None:
    """The age of what is on the screen, as the browser itself sees it, and cells that change."""
    page = browser_page
    frames: list[bytes] = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda data: frames.append(data)))  # noqa: PLW0108 - the driver takes no built-in
    page.goto("/")
    deadline = time.monotonic() + 40
    ages: list[float] = []
    pictures: set[bytes] = set()
    while time.monotonic() < deadline and (len(ages) < 5 or len(pictures) < 3):
        page.wait_for_timeout(250)
        for frame in [f for f in frames if isinstance(f, bytes) and f[:2] == b"XF"]:
            built_at = struct.unpack_from("<d", frame, 12)[0]
            ages.append(clock.unix_seconds() - built_at)
            pictures.add(frame[24:])
        frames.clear()
    assert len(pictures) >= 3, "the cells never change under load"
    assert sorted(ages)[len(ages) // 2] < 2.0


def test_a_killed_engine_is_relaunched_with_its_signal_and_no_request_hangs(fleet: FleetRun) -> None:
    outcomes: list[str] = []
    stop = threading.Event()

    def keep_asking(number: int) -> None:
        while not stop.is_set():
            try:
                fleet.chat().ask(HELLO, session_id=f"kill-{number}", max_tokens=8)
                outcomes.append("ok")
            except ChatError as error:
                outcomes.append(str(error))

    askers = [threading.Thread(target=keep_asking, args=(n,)) for n in range(4)]
    for asker in askers:
        asker.start()
    victim = next(one for one in live(fleet) if one["status"] == "ready")
    os.kill(victim["pid"], signal.SIGKILL)

    def is_back() -> bool:
        now = next(one for one in live(fleet) if one["id"] == victim["id"])
        return bool(now["status"] == "ready" and now["attempt"] == victim["attempt"] + 1)

    fleet.wait_until(is_back, "the replica to be relaunched", seconds=60)
    stop.set()
    for asker in askers:
        asker.join(timeout=60)
        assert not asker.is_alive(), "a request hangs"
    broken = [outcome for outcome in outcomes if outcome != "ok"]
    assert len(broken) <= len(askers), broken  # at most the stream that each had open
    events = fleet.get(f"/api/v1/events?subject_id={victim['id']}")["results"]
    assert any(e["event"] == "exited" and "signal 9" in e["reason"] for e in events)


def test_scaling_by_page_by_rest_and_by_admin_converges(fleet: FleetRun, browser_page: Any) -> None:
    page = browser_page
    demo = deployment(fleet)
    page.goto(f"/deployments/{demo['id']}")
    page.fill("#scale-to", "8")
    page.click("text=Plan scaling")
    page.wait_for_load_state()
    assert "create" in page.inner_text("main").lower()
    page.click("button:has-text('Scale to 8')")
    settles_at(fleet, 8)
    with api(fleet) as client:
        client.patch(f"/deployments/{demo['id']}", json={"replicas": 1}).raise_for_status()
    settles_at(fleet, 1)
    page.goto(f"/admin/serving/deployment/{demo['id']}/change/")
    page.fill("input[name=replicas]", "4")
    page.click("input[name=_save]")
    settles_at(fleet, 4)
    events = fleet.get(f"/api/v1/events?subject_id={demo['id']}")["results"]
    # Controllers tell of the same deployment, such as that they level its sessions.
    by_people = [e["actor"] for e in events if not e["actor"].startswith("controller:")]
    assert len(by_people) >= 3
    assert all(re.match(r"user:\w+", actor) for actor in by_people[:3])
