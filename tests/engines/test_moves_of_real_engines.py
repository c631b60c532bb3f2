"""What moves sessions in engines that are not ours: text is known, KV goes along, no stranger has a say."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.fakes.node import wait_for
from tests.fakes.scripted_engine import ANSWER, TOKEN_BYTES, Fabric, ScriptedEngine, serving
from workers.engines.inside.exaops_moves import wire
from workers.engines.inside.exaops_moves.inner import names_kv
from workers.engines.inside.exaops_moves.kept import (
    CHAT,
    TEXT,
    KeptTurns,
    NothingToMoveError,
    request_again,
)
from workers.protocol import digests

PATIENCE_SECONDS = 60.0
STORY = "there was a keeper who counted ships " * 10
FIRST = [{"role": "user", "content": STORY}]
SECOND = [*FIRST, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "and then"}]


@dataclass
class House:
    """Engines on one fabric, and clients that ask them with the right keys."""

    stack: ExitStack
    fabric: Fabric = field(default_factory=Fabric)
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, moves: str = "export_import", **bounds: float) -> ScriptedEngine:
        engine = self.engines[name] = ScriptedEngine(name, self.fabric, f"key-of-{name}")
        self.places[name] = self.stack.enter_context(serving(engine, moves, **bounds))
        return engine

    def ask(self, name: str, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.engines[name].key}", **more.pop("headers", {})}
        url = f"http://{self.places[name]}{path}"
        return httpx.request(method, url, headers=headers, timeout=PATIENCE_SECONDS, **more)

    def turn(
        self, name: str, body: dict[str, Any], path: str = CHAT, session: str = "talk"
    ) -> httpx.Response:
        said = self.ask(name, "POST", path, json={"model": "m", **body}, headers={"x-session-id": session})
        assert said.status_code == 200, said.text
        return said

    def move(
        self, source: str, target: str, session: str = "talk", **more: Any
    ) -> tuple[int, dict[str, Any]]:
        transfer_id = uuid.uuid4().bytes
        order = {
            "session_id": session,
            "transfer_id": transfer_id.hex(),
            "key": digests.transfer_key(f"key-of-{target}", transfer_id).hex(),
            "target": f"http://{self.places[target]}",
            "bytes_per_second": 0.0,
            **more,
        }
        answer = self.ask(source, "POST", "/kv/moves", json=order)
        return answer.status_code, answer.json()


@pytest.fixture
def house() -> Iterator[House]:
    with ExitStack() as stack:
        yield House(stack)


@pytest.fixture
def pair(house: House) -> House:
    house.start("here")
    house.start("there")
    return house


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def words_of(*texts: str) -> int:
    return len(" ".join(texts).split())


@pytest.mark.parametrize("stream", [True, False])
def test_kv_goes_along_with_the_answer_however_that_was_given(pair: House, stream: bool) -> None:
    pair.turn("here", {"messages": FIRST, "stream": stream})
    status, told = pair.move("here", "there")
    assert (status, told["carrier"], told["turn_began"]) == (200, "nixl", False)
    assert told["sent_bytes"] == told["target_tokens"] * TOKEN_BYTES == told["blocks"] * TOKEN_BYTES
    assert pair.fabric.held == {}, "what was exported has been fetched"
    later = pair.turn("there", {"messages": SECOND})
    assert cached(later) >= words_of(STORY, ANSWER)


@pytest.mark.parametrize("stream", [True, False])
def test_completions_move_as_chats_do(pair: House, stream: bool) -> None:
    pair.turn("here", {"prompt": STORY, "stream": stream}, TEXT)
    assert pair.move("here", "there")[1]["carrier"] == "nixl"
    later = pair.turn("there", {"prompt": f"{STORY} {ANSWER} and then"}, TEXT)
    assert cached(later) == words_of(STORY, ANSWER)


@pytest.mark.parametrize(("source", "target"), [
    ("warm_prefill", "warm_prefill"), ("export_import", "warm_prefill"), ("warm_prefill", "export_import"),
])  # fmt: skip
def test_target_computes_the_context_where_one_of_the_two_has_no_connector(
    house: House, source: str, target: str
) -> None:
    house.start("here", source)
    house.start("there", target)
    house.turn("here", {"messages": FIRST, "stream": True})
    status, told = house.move("here", "there")
    assert (status, told["carrier"], told["sent_bytes"]) == (200, "computed", 0)
    assert house.fabric.held == {}, "nothing is held for a target that fetches nothing"
    assert cached(house.turn("there", {"messages": SECOND})) >= words_of(STORY, ANSWER)


def test_target_computes_where_that_is_asked_for_or_nothing_was_exported(pair: House) -> None:
    pair.turn("here", {"messages": FIRST})
    assert pair.move("here", "there", way="warm_prefill")[1]["carrier"] == "computed"
    pair.engines["here"].exports_nothing = True
    assert pair.move("here", "there")[1]["carrier"] == "computed"


def test_nothing_but_the_prompt_is_asked_for_again(pair: House) -> None:
    said = {"max_tokens": 4000, "n": 1, "seed": 5, "chat_template_kwargs": {"thinking": False}}
    pair.turn("here", {"messages": FIRST, **said})
    pair.move("here", "there")
    for engine in pair.engines.values():
        again = engine.requests[-1]
        assert (again["max_tokens"], again["stream"]) == (1, False)
        assert again["chat_template_kwargs"] == {"thinking": False}
        assert "seed" not in again


def test_tools_that_were_called_go_along_as_the_client_will_repeat_them(pair: House) -> None:
    pair.engines["here"].calls_a_tool = True
    said = pair.turn("here", {"messages": FIRST}).json()["choices"][0]["message"]
    pair.move("here", "there")
    later = pair.turn("there", {"messages": [*FIRST, said, {"role": "tool", "content": "3"}]})
    assert cached(later) >= words_of(STORY, ANSWER) + 3


def test_session_that_moved_moves_on_before_its_next_turn(pair: House) -> None:
    pair.start("third")
    pair.turn("here", {"messages": FIRST, "stream": True})
    assert pair.move("here", "there")[0] == 200
    assert pair.move("there", "third")[1]["carrier"] == "nixl"
    assert cached(pair.turn("third", {"messages": SECOND})) >= words_of(STORY, ANSWER)


def test_session_that_comes_back_moves_on_with_what_was_said_elsewhere(house: House) -> None:
    """Nobody told the first one to forget it: what that one has kept is the older half."""
    for name in ("here", "there", "far"):
        house.start(name)
    house.turn("here", {"messages": FIRST})
    house.move("here", "there")
    house.turn("there", {"messages": SECOND})
    house.move("there", "here")
    assert house.move("here", "far")[0] == 200
    third = [*SECOND, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "go on"}]
    assert cached(house.turn("far", {"messages": third})) >= words_of(STORY, ANSWER, "and then", ANSWER)


def test_number_of_a_turn_says_whether_one_began_though_the_session_was_dropped_between() -> None:
    kept = KeptTurns(most_bytes=2000)
    kept.end(kept.begin("a", CHAT, b"{}"), was_served=True, is_whole=True)
    before = kept.newest("a")
    kept.end(kept.begin("b", CHAT, b"x" * 2000), was_served=True, is_whole=True)
    assert (kept.newest("a"), kept.last("a")) == (0, None)
    kept.end(kept.begin("a", CHAT, b"{}"), was_served=True, is_whole=True)
    assert kept.newest("a") not in {before, 0}


@pytest.mark.parametrize("stream", [True, False])
def test_completion_of_tokens_goes_along_with_those_that_it_gave(stream: bool) -> None:
    """As a stream that another replica goes on with."""
    kept = KeptTurns()
    turn = kept.begin("s", TEXT, b'{"prompt": [5, 6], "max_tokens": 9}')
    choices = [{"index": 0, "text": "a", "token_ids": [7]}, {"index": 0, "text": "b", "token_ids": [8, 9]}]
    if stream:
        told = b"".join(b"data: " + json.dumps({"choices": [one]}).encode() + b"\n\n" for one in choices)
        kept.add(turn, told + b"data: [DONE]\n\n")
    else:
        choice = {"index": 0, "text": "ab", "token_ids": [7, 8, 9]}
        kept.add(turn, json.dumps({"choices": [choice]}).encode())
    kept.end(turn, was_served=True, is_whole=True)
    assert request_again(turn)["prompt"] == [5, 6, 7, 8, 9]


def test_turn_that_runs_is_never_moved_and_one_that_begins_is_told(pair: House) -> None:
    here, there = pair.engines["here"], pair.engines["there"]
    pair.turn("here", {"messages": FIRST})
    with ThreadPoolExecutor(2) as pool:
        here.reading.clear()
        here.holds.clear()
        running = pool.submit(pair.turn, "here", {"messages": SECOND})
        wait_for(here.reading.is_set, "the turn runs", seconds=PATIENCE_SECONDS)
        status, told = pair.move("here", "there")
        assert (status, told["error"]["code"]) == (409, "turn_runs")
        here.holds.set()
        running.result()

        there.reading.clear()
        there.holds.clear()
        moving = pool.submit(pair.move, "here", "there")
        wait_for(there.reading.is_set, "the target takes it", seconds=PATIENCE_SECONDS)
        assert pair.move("here", "there")[1]["error"]["code"] == "already_moving"
        pair.turn("here", {"messages": SECOND})
        there.holds.set()
        status, told = moving.result()
    assert (status, told["turn_began"]) == (200, True)


def test_move_that_fails_leaves_the_session_whole_and_the_next_try_succeeds(pair: House) -> None:
    pair.turn("here", {"messages": FIRST, "stream": True})
    pair.engines["there"].fails = True
    status, told = pair.move("here", "there")
    assert (status, told["error"]["code"]) == (502, "engine_refused")
    assert len(pair.fabric.held) == 1, "it is the connector's lease that ends this"
    pair.engines["there"].fails = False
    assert pair.move("here", "there")[1]["carrier"] == "nixl"
    assert cached(pair.turn("here", {"messages": SECOND})) >= words_of(STORY, ANSWER)


def test_target_computes_what_did_not_come_and_says_so(pair: House) -> None:
    pair.turn("here", {"messages": FIRST, "stream": True})
    pair.engines["there"].fails_imports = True
    status, told = pair.move("here", "there")
    assert (status, told["carrier"], told["sent_bytes"]) == (200, "computed", 0)
    assert told["why"].startswith("its KV did not come: The engine answered 500")
    assert cached(pair.turn("there", {"messages": SECOND})) >= words_of(STORY, ANSWER)


def test_import_that_hangs_is_given_up_and_holds_up_no_other_move(house: House) -> None:
    house.start("here")
    house.start("there", import_seconds=0.2).hangs_in_imports = True
    sessions = ["one", "two", "three"]
    for session in sessions:
        house.turn("here", {"messages": FIRST}, session=session)
    with ThreadPoolExecutor(len(sessions)) as pool:
        moves = [pool.submit(house.move, "here", "there", session) for session in sessions]
        ended = [move.result() for move in moves]
    told = {(status, answer["carrier"], answer["sent_bytes"], answer["why"]) for status, answer in ended}
    assert told == {(200, "computed", 0, "its KV did not come: it was not here within 0.2 s.")}
    assert cached(house.turn("there", {"messages": SECOND})) >= words_of(STORY, ANSWER)


def test_target_that_is_not_there_or_moves_nothing_is_said_before_anything_is_exported(house: House) -> None:
    house.start("here")
    house.start("none", "none")
    house.turn("here", {"messages": FIRST})
    assert house.move("here", "none")[1]["error"]["code"] == "not_found"
    with socket.socket() as deaf:  # has the port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        house.places["gone"] = f"127.0.0.1:{deaf.getsockname()[1]}"
        status, told = house.move("here", "gone")
    assert (status, told["error"]["code"]) == (502, "target_unreachable")
    house.places["gone"] = "x:y"
    assert house.move("here", "gone")[1]["error"]["code"] == "bad_target"
    assert house.fabric.held == {}


PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


def test_what_cannot_be_asked_again_is_nothing_to_move(pair: House) -> None:
    assert pair.move("here", "there", session="nobody")[1]["error"]["code"] == "session_unknown"
    for path, body in [(CHAT, {"messages": PICTURE}), (TEXT, {"prompt": ["a", "b"]})]:
        turn = KeptTurns().begin("s", path, json.dumps(body).encode())
        with pytest.raises(NothingToMoveError):
            request_again(turn)


def test_answer_that_broke_off_is_not_taken_for_what_was_said() -> None:
    kept = KeptTurns()
    turn = kept.begin("s", CHAT, json.dumps({"messages": FIRST}).encode())
    kept.add(turn, b'data: {"choices": [{"index": 0, "delta": {"content": "ships"}}]}\n\n')
    kept.end(turn, was_served=True, is_whole=False)
    assert request_again(turn)["messages"] == FIRST
    failed = kept.begin("s", CHAT, b"{}")
    kept.end(failed, was_served=False, is_whole=True)
    assert kept.last("s") is turn, "a request that the engine refused changes nothing"


def test_what_is_kept_is_bounded_and_running_turns_are_not_forgotten() -> None:
    kept = KeptTurns(most_bytes=20_000)
    running = kept.begin("running", CHAT, b"x" * 2000)
    for number in range(100):
        turn = kept.begin(f"s{number}", CHAT, b"x" * 2000)
        kept.add(turn, b"y" * 1000)
        kept.end(turn, was_served=True, is_whole=True)
        assert kept.used_bytes <= 20_000
    assert kept.last("s0") is None
    assert kept.last("s99") is not None
    assert kept.open_turns("running") == 1
    kept.end(running, was_served=True, is_whole=True)
    for session in ["running", *(f"s{number}" for number in range(100))]:
        kept.drop(session)
    assert kept.used_bytes == 0


def test_answer_that_is_too_long_is_left_out() -> None:
    kept = KeptTurns()
    turn = kept.begin("s", CHAT, json.dumps({"messages": FIRST}).encode())
    for _ in range(5):
        kept.add(turn, b"x" * (1 << 20))
    kept.end(turn, was_served=True, is_whole=True)
    assert request_again(turn)["messages"] == FIRST
    assert kept.used_bytes < 1 << 20


def test_session_that_lives_elsewhere_is_forgotten(pair: House) -> None:
    pair.turn("here", {"messages": FIRST})
    assert pair.ask("here", "DELETE", "/kv/sessions/talk").json() == {"let_go": True}
    assert pair.ask("here", "DELETE", "/kv/sessions/talk").json() == {"let_go": False}
    assert pair.move("here", "there")[1]["error"]["code"] == "session_unknown"


# -- who may ---------------------------------------------------------------------------------------------
def test_agents_need_the_key_of_their_engine(pair: House) -> None:
    for method, path in [("POST", "/kv/moves"), ("DELETE", "/kv/sessions/talk")]:
        for key in ("", "Bearer x", "Bearer key-of-there"):
            told = pair.ask("here", method, path, headers={"authorization": key})
            assert told.status_code == 401, (method, key)
    assert pair.ask("here", "GET", "/kv/moves").status_code == 404
    assert pair.ask("here", "POST", "/kv/moves", content=b"[]").status_code == 400


@dataclass(frozen=True)
class Intruder:
    """Takes part in a transfer as its source would, or nearly."""

    house: House
    transfer_id: bytes
    key: bytes

    def say(self, method: str, message: dict[str, Any], change: Callable[[bytes], bytes] = bytes) -> int:
        body = change(wire.tagged(self.key, self.transfer_id, message))
        proof = {wire.PROOF: wire.proof(self.key, method, self.transfer_id), "authorization": ""}
        path = wire.TRANSFERS + self.transfer_id.hex()
        return self.house.ask("there", method, path, content=body, headers=proof).status_code


def test_target_takes_what_was_ordered_once_and_unchanged(pair: House) -> None:
    transfer_id = uuid.uuid4().bytes
    key = digests.transfer_key("key-of-there", transfer_id)
    turn = {"session_id": "s", "path": CHAT, "request": {"model": "m", "messages": FIRST}, "kv": None}
    assert Intruder(pair, transfer_id, b"another key").say("POST", {}) == 401
    ordered = Intruder(pair, transfer_id, key)
    assert ordered.say("PUT", turn) == 404, "it was not offered"
    assert ordered.say("POST", {}) == 200
    assert ordered.say("POST", {}) == 409, "it was offered before"
    assert ordered.say("PUT", turn, lambda body: body.replace(b"keeper", b"sleeper")) == 401
    assert ordered.say("PUT", turn) == 404, "and it is not expected any more"
    assert pair.engines["there"].requests == []


def test_target_asks_its_engine_for_prompts_alone(pair: House) -> None:
    transfer_id = uuid.uuid4().bytes
    ordered = Intruder(pair, transfer_id, digests.transfer_key("key-of-there", transfer_id))
    assert ordered.say("POST", {}) == 200
    request = {"model": "m", "messages": FIRST, "max_tokens": 10**6, "kv_transfer_params": {"x": 1}}
    assert ordered.say("PUT", {"session_id": "s", "path": CHAT, "request": request, "kv": None}) == 200
    (asked,) = pair.engines["there"].requests
    assert (asked["max_tokens"], "kv_transfer_params" in asked) == (1, False)
    elsewhere = uuid.uuid4().bytes
    other = Intruder(pair, elsewhere, digests.transfer_key("key-of-there", elsewhere))
    assert other.say("POST", {}) == 200
    assert other.say("PUT", {"session_id": "s", "path": "/sleep", "request": {}, "kv": None}) == 400


PULL = '{"do_remote_prefill": true, "remote_host": "10.0.0.9"}'


@pytest.mark.parametrize(
    "body",
    [
        f'{{"prompt": "a", "kv_transfer_params": {PULL}}}'.encode(),
        f'{{"prompt": "a", "kv_transfer_param\\u0073": {PULL}}}'.encode(),
        f'{{"prompt": "a", "vllm_xargs": {{"kv_transfer_params": {PULL}}}}}'.encode(),
        f'{{"prompt": "a", "kv_transfer_params": {PULL}}}'.encode("utf-16"),
        f'{{"prompt": "a", "kv_transfer_params": {PULL}'.encode(),
        f'{{"prompt": {"[" * 100_000}, "kv_transfer_params": {PULL}'.encode(),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses"])
def test_clients_cannot_have_an_engine_fetch_kv(pair: House, path: str, body: bytes) -> None:
    told = pair.ask("here", "POST", path, content=body, headers={"x-session-id": "s"})
    assert (told.status_code, told.json()["error"]["code"]) == (400, "not_allowed")
    assert pair.engines["here"].requests == []


def test_engine_that_moves_nothing_keeps_nothing_and_refuses_the_same(house: House) -> None:
    house.start("here", "none")
    house.turn("here", {"messages": FIRST})
    assert house.ask("here", "DELETE", "/kv/sessions/talk").status_code == 404
    told = house.ask("here", "POST", CHAT, json={"messages": FIRST, "kv_transfer_params": {}})
    assert told.status_code == 400
    strange = house.ask("here", "POST", CHAT, json={"messages": FIRST}, headers={"authorization": "Bearer x"})
    assert strange.status_code == 401


def test_text_may_be_about_anything() -> None:
    about = {"messages": [{"role": "user", "content": "what is kv_transfer_params, and \u0041 \x00?"}]}
    assert not names_kv(json.dumps(about).encode())
    assert not names_kv(b'{"prompt": "a \\u001b[0m"}')
    assert not names_kv(b"--boundary\r\nnot JSON at all")


def test_both_sides_derive_one_key() -> None:
    transfer_id = uuid.uuid4().bytes
    assert wire.transfer_key("xe-1", transfer_id) == digests.transfer_key("xe-1", transfer_id)
