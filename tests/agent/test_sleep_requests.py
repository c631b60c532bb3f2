"""No engine is put to sleep while somebody waits for its health: some compute a token for that."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.fakes.node import wait_for
from tests.fakes.tiny_adapter import TinyAdapter
from workers.agent import processes, scraper
from workers.agent.facts import RequestState
from workers.agent.sleep_requests import EngineCall, Key, SleepRequests
from workers.engines.base import EngineRequest
from workers.protocol.engines.sleeping import FALLING_ASLEEP

KEY, OTHER = ("r-1", 1), ("r-2", 1)
WAIT_SECONDS = 60.0


class HeldEngine(http.server.BaseHTTPRequestHandler):
    """Its health is answered when the test says so."""

    asked = threading.Event()
    may_answer = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/health":
            self.asked.set()
            self.may_answer.wait()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"running 0\n")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def held_port() -> Iterator[int]:
    HeldEngine.asked.clear()
    HeldEngine.may_answer.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HeldEngine)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        HeldEngine.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_attempt_is_quiet_once_its_last_look_at_health_is_over(
    held_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraper, "_READ_SECONDS", 10 * WAIT_SECONDS)  # the test says when it is over
    label = processes.LaunchLabel("node", *KEY)
    leader = processes.ProcessId(1, 1)
    target = scraper.Target(KEY, "127.0.0.1", held_port, TinyAdapter(), leader, label, "key", is_own=False)
    looks = scraper.Scraper()
    assert looks.is_quiet(KEY), "nobody looks at it"
    looks.start()
    try:
        looks.watch([target])
        assert HeldEngine.asked.wait(WAIT_SECONDS)
        assert not looks.is_quiet(KEY)
        looks.watch([replace(target, asks_health=False)])
        assert not looks.is_quiet(KEY), "an answer is still awaited"
        HeldEngine.may_answer.set()
        wait_for(lambda: looks.is_quiet(KEY), "the look is over", seconds=WAIT_SECONDS)
    finally:
        HeldEngine.may_answer.set()
        looks.stop()


def test_a_request_waits_until_its_engine_is_quiet_and_is_sent_once() -> None:
    requests = SleepRequests()

    def outcome(key: Key) -> RequestState:
        request = requests.of(key, FALLING_ASLEEP)
        assert request is not None
        return request.outcome

    def has_ended(key: Key) -> bool:
        return outcome(key) is RequestState.FAILED

    with socket.socket() as deaf:  # has the port, and does not listen: what is sent fails at once
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        call = EngineCall("127.0.0.1", port, "key", EngineRequest("/sleep", "POST"), WAIT_SECONDS)
        requests.begin(KEY, FALLING_ASLEEP, call)
        requests.begin(OTHER, FALLING_ASLEEP, call)
        requests.send_due(lambda key: key == OTHER)
        wait_for(lambda: has_ended(OTHER), "the other's is sent", seconds=WAIT_SECONDS)
        assert outcome(KEY) is RequestState.RUNNING, "it waits for its own"
        requests.send_due(lambda _key: True)
        wait_for(lambda: has_ended(KEY), "it is sent", seconds=WAIT_SECONDS)
        sent = requests.of(KEY, FALLING_ASLEEP)
        requests.send_due(lambda _key: True)
        assert requests.of(KEY, FALLING_ASLEEP) is sent
