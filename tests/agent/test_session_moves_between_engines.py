"""An agent has a real engine send a conversation to another one, and answers for it."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.node import Node, make_home, make_spec, wait_for
from tests.fakes.valkey import running_valkey
from workers.agent import processes
from workers.engines.demo_model import make_demo_model
from workers.protocol import digests, v1
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ModelRef

SCRIPT = Path(__file__).parents[1] / "fakes" / "rogue_agent.py"
PATIENCE_SECONDS = 60.0
"""For what takes three seconds on an idle machine."""
STORY = "Once upon a time there was a lighthouse keeper who counted ships. " * 8


class Pair:
    """A node with two replicas of one model."""

    def __init__(self, node: Node, folder: Path, **more: str) -> None:
        self.node = node
        make_demo_model(folder / "model")
        model = ModelRef(name="demo", digest="sha256:demo", source=f"file://{folder / 'model'}")
        options = {"num_blocks": 128, "threads": 1, "dtype": "float32", **more}
        node.wish(
            *(
                make_spec(name, model=model, engine="torch", engine_options=options, start_seconds=120.0)
                for name in ("here", "there")
            )
        )
        self.addresses = {name: self._ready(name) for name in ("here", "there")}

    def _ready(self, replica_id: str) -> str:
        seen = self.node.wait_state(replica_id, ObservedState.READY, attempt=1, seconds=PATIENCE_SECONDS)
        return seen.address

    def key(self, replica_id: str) -> str:
        return digests.engine_api_key(self.node.identity.key, replica_id, 1)

    def turn(self, replica_id: str, text: str, session: str = "talk") -> tuple[str, int]:
        """What the engine says, and how many tokens of the prompt it had."""
        body = {"model": "demo", "prompt": text, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"http://{self.addresses[replica_id]}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {self.key(replica_id)}", "x-session-id": session},
            timeout=PATIENCE_SECONDS,
        )
        assert answer.status_code == 200, answer.text
        told = answer.json()
        return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

    def order(self, **changes: Any) -> v1.MoveSession:
        transfer_id = uuid.uuid4().bytes
        fields: dict[str, Any] = {
            "command_id": f"move-{transfer_id.hex()}",
            "lease_epoch": 1,
            "deadline_seconds": PATIENCE_SECONDS,
            "replica_id": "here",
            "attempt": 1,
            "session_id": "talk",
            "transfer_id": transfer_id.hex(),
            "transfer_key": digests.transfer_key(self.key("there"), transfer_id).hex(),
            "target": f"http://{self.addresses['there']}",
        }
        return v1.MoveSession(**(fields | changes))

    def moved(self, order: v1.MoveSession) -> v1.SessionSent:
        """Send the order and wait for its answer."""
        self.node.send(order)
        return wait_for(lambda: self._answer(order), "the move is answered", seconds=PATIENCE_SECONDS)

    def _answer(self, order: v1.MoveSession) -> v1.SessionSent | None:
        answers = self.node.all(v1.SessionSent)
        return next((a for a in answers if a.command_id == order.command_id), None)

    def refusal(self, command: v1.Command) -> str:
        self.node.send(command)

        def found() -> v1.CommandResult | None:
            results = self.node.all(v1.CommandResult)
            return next((r for r in results if r.command_id == command.command_id), None)

        result = wait_for(found, "the command is refused", seconds=PATIENCE_SECONDS)
        assert result.outcome == "refused"
        return result.reason


class StoppingWire(socketserver.ThreadingTCPServer):
    """A relay before an engine that holds a transfer in its middle until the relay is closed."""

    daemon_threads = True
    passes_bytes = 16_384
    """More than an offer has, and less than the blocks that follow it."""

    def __init__(self, engine: str) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        host, _, port = engine.rpartition(":")
        self.engine = (host, int(port))
        self.holds = threading.Event()
        self.closing = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @classmethod
    @contextmanager
    def before(cls, engine: str) -> Iterator[StoppingWire]:
        with cls(engine) as wire:
            serving = threading.Thread(target=wire.serve_forever, args=(0.05,))
            serving.start()
            try:
                yield wire
            finally:
                wire.closing.set()
                wire.shutdown()
                serving.join()


class _Relay(socketserver.BaseRequestHandler):
    server: StoppingWire

    def handle(self) -> None:
        with socket.create_connection(self.server.engine) as engine:
            back = threading.Thread(target=_pass_on, args=(engine, self.request), daemon=True)
            back.start()
            passed = 0
            while data := self.request.recv(4096):
                if passed + len(data) > self.server.passes_bytes:
                    self.server.holds.set()
                    self.server.closing.wait()
                    return  # and both ends see the connection break
                engine.sendall(data)
                passed += len(data)
            engine.shutdown(socket.SHUT_WR)
            back.join(PATIENCE_SECONDS)


def _pass_on(source: socket.socket, to: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(4096):
            to.sendall(data)


@contextmanager
def running_pair(folder: Path, **more: str) -> Iterator[Pair]:
    with running_valkey(folder) as valkey:
        node = Node(make_home(folder / "home", valkey.url), valkey)
        node.script = SCRIPT
        node.start()
        try:
            yield Pair(node, folder, **more)
        finally:
            node.close()
            assert not processes.labelled(node.node_id)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with running_pair(tmp_path) as made:
        yield made


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Pair]:
    """Two replicas that have no memory in common: what one sends takes as long as it is told to."""
    with running_pair(tmp_path, kv_pool="private") as made:
        yield made


def test_third_turn_at_the_target_is_cached_and_says_what_it_would_have_said(pair: Pair) -> None:
    text = STORY
    for _ in range(2):
        said, _ = pair.turn("here", text)
        text += said + " And then? "
    order = pair.order()
    sent = pair.moved(order)
    assert (sent.code, sent.turn_began) == ("", False)
    assert sent.sent_blocks == sent.blocks > 5
    assert sent.target_tokens == sent.blocks * digests.KV_BLOCK_TOKENS
    assert sent.sent_bytes > 0
    assert sent.carrier == "shared_memory"
    pair.node.send(order)  # delivered twice: not sent again, and the target would refuse it
    stayed, _ = pair.turn("here", text, session="twin")
    said, cached = pair.turn("there", text)
    assert said == stayed
    assert cached >= sent.target_tokens - 3 * digests.KV_BLOCK_TOKENS
    assert len([a for a in pair.node.all(v1.SessionSent) if a.command_id == order.command_id]) == 1
    pair.node.send(
        v1.LetSessionGo(
            command_id="go",
            lease_epoch=1,
            deadline_seconds=60,
            replica_id="here",
            attempt=1,
            session_id="talk",
        )
    )
    wait_for(
        lambda: pair.moved(pair.order()).code == "session_unknown", "it is let go", seconds=PATIENCE_SECONDS
    )


def test_what_cannot_be_sent_is_said_and_the_session_stays_whole(pair: Pair) -> None:
    said, _ = pair.turn("here", STORY)
    assert pair.moved(pair.order(session_id="nobody")).code == "session_unknown"
    assert pair.moved(pair.order(transfer_key="0" * 64)).code == "invalid_transfer"
    assert "does not run here" in pair.refusal(pair.order(attempt=2))
    assert "is over" in pair.refusal(pair.order(lease_epoch=0))
    assert pair.moved(pair.order(target="http://127.0.0.1:1")).code == "target_unreachable"
    _, cached = pair.turn("here", STORY + said)
    assert cached > 100


@pytest.mark.parametrize("victim", ["here", "there"])
def test_engine_that_dies_while_sending_is_answered_for(apart: Pair, victim: str) -> None:
    apart.turn("here", STORY)
    order = apart.order(bytes_per_second=20_000.0)  # many seconds for all of it
    seen = apart.node.replica(victim)
    assert seen is not None
    assert seen.pid is not None
    apart.node.send(order)
    os.kill(seen.pid, signal.SIGKILL)

    def found() -> str:
        refused = [r.outcome for r in apart.node.all(v1.CommandResult) if r.command_id == order.command_id]
        sent = apart._answer(order)
        return sent.code if sent is not None else refused[0] if refused else ""

    end = wait_for(found, "the move is answered", seconds=PATIENCE_SECONDS)
    if victim == "here":
        # Where the kill came before the order, the agent has seen that nobody listens.
        assert end in {"engine_unreachable", "refused"}
    else:
        assert end != "refused"
        _, cached = apart.turn("here", STORY)
        assert cached > 100


def test_agent_that_dies_while_sending_answers_nobody_and_the_session_is_whole(apart: Pair) -> None:
    said, _ = apart.turn("here", STORY)
    with StoppingWire.before(apart.addresses["there"]) as wire:
        order = apart.order(target=f"http://{wire.address}")
        apart.node.send(order)
        assert wire.holds.wait(PATIENCE_SECONDS), "the source sends"
        apart.node.signal(signal.SIGKILL)
        apart.node.forget_reports()
        apart.node.start()
        for name in ("here", "there"):
            apart.node.wait_state(name, ObservedState.READY, attempt=1, seconds=PATIENCE_SECONDS)
    text = STORY + said
    _, cached = apart.turn("here", text)
    assert cached > 100
    # Its successor finds the engines, and moves what is asked of it once the first sending is over.
    wait_for(lambda: apart.moved(apart.order()).code == "", "another move", seconds=PATIENCE_SECONDS)
    assert all(
        answer.code for answer in apart.node.all(v1.SessionSent) if answer.command_id == order.command_id
    )
    stayed, _ = apart.turn("here", text + " And", session="twin")
    moved, cached = apart.turn("there", text + " And")
    assert moved == stayed
    assert cached > 100
