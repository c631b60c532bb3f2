"""Simulated replicas answer real HTTP in the modelled time, each on an address of its own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.fakes.simulation import Conversation, spec
from workers.simulation.engine import EngineShape, Traffic
from workers.simulation.node import NodeShape
from workers.simulation.serve import EngineServer


class Serving:
    """Two nodes with one ready replica each, at the present moment, with no traffic but the test's."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        shape = NodeShape(
            first_port=self.port,
            engine=EngineShape(decode_seconds=0.001),
            traffic=Traffic(requests_per_second=0),
        )
        self.talk = Conversation(nodes=2, shape=shape, now=time.monotonic() - 20)
        for number in range(2):
            self.talk.wish(spec(f"replica-{number}"), number=number)
        self.talk.pass_time(20)
        self.server = EngineServer(self.talk.fleet, threading.Lock(), [self.port])

    def url(self, number: int) -> str:
        return f"http://{self.talk.identities[number].address}:{self.port}"

    def token(self, number: int) -> str:
        node = self.talk.fleet.node(self.talk.identities[number].name)
        return node.engine_token(node.replicas[f"replica-{number}"])

    def ask(self, number: int, *, token: str | None = None, stream: bool = False) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": "Tell me of the sea. " * 20}],
            "max_tokens": 5,
            "stream": stream,
            "stream_options": {"include_usage": True},
        }
        headers = {"Authorization": f"Bearer {token or self.token(number)}"}
        return httpx.post(self.url(number) + "/v1/chat/completions", json=body, headers=headers)


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving()
    serving.server.start()
    yield serving
    serving.server.stop()


def test_chat_is_answered_with_as_many_tokens_as_were_asked_for(serving: Serving) -> None:
    answer = serving.ask(0).json()
    assert answer["choices"][0]["message"]["content"] == "simulated words without any meaning "
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens"] > 50


def test_stream_ends_with_finish_usage_and_done(serving: Serving) -> None:
    lines = [line for line in serving.ask(0, stream=True).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(events) == 7
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_replica_demands_the_token_of_its_own_attempt(serving: Serving) -> None:
    assert serving.ask(0, token="xe-wrong").status_code == 401
    assert serving.ask(0, token=serving.token(1)).status_code == 401
    assert serving.ask(1).status_code == 200


def test_request_counts_in_the_replica_that_took_it_and_in_no_other(serving: Serving) -> None:
    serving.ask(0)
    serving.talk.pass_time(time.monotonic() + 1 - serving.talk.now)
    taken, other = serving.talk.replica("replica-0", 0), serving.talk.replica("replica-1", 1)
    assert taken.telemetry is not None
    assert other.telemetry is not None
    assert (taken.telemetry.requests_total, other.telemetry.requests_total) == (1, 0)


def test_same_beginning_is_found_in_the_cache(serving: Serving) -> None:
    serving.ask(0)
    cached = serving.ask(0).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0


def test_killed_engine_refuses_connections(serving: Serving) -> None:
    node = serving.talk.fleet.node(serving.talk.identities[0].name)
    node.crash_replicas(1, time.monotonic())
    with pytest.raises(httpx.TransportError):
        serving.ask(0)
