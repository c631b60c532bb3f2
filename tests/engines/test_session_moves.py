"""A conversation moves between two real engines, and its next turn cannot tell."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.conftest import MODEL_NAME, EngineProcess, engine_starter
from workers.engines.openai_server.session_sending import PROOF_HEADER, body_tag, proof
from workers.protocol.digests import transfer_key


@pytest.fixture(scope="module")
def engines(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    with engine_starter(tmp_path_factory.mktemp("moves")) as start:
        running = [start("torch", demo_model, num_blocks=256, threads=1) for _ in range(2)]
        for engine in running:
            engine.wait_ready()
        yield running


def turn(engine: EngineProcess, session: str, text: str, *, tokens: int = 24) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with engine.client() as client:
        answer = client.post("/v1/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def written(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def order(target: EngineProcess, session: str, **changes: object) -> dict[str, object]:
    transfer_id = secrets.token_bytes(16)
    wish = {
        "session_id": session,
        "transfer_id": transfer_id.hex(),
        "key": transfer_key(target.api_key, transfer_id).hex(),
        "target": f"http://{target.address}",
    }
    return wish | changes


def move(source: EngineProcess, wish: dict[str, object]) -> httpx.Response:
    with source.client() as client:
        return client.post("/kv/moves", json=wish)


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


STORY = "Once upon a time there was a lighthouse keeper who counted ships. " * 12


def test_next_turn_after_a_move_is_cached_and_equal_to_that_of_a_twin_that_stayed(
    engines: list[EngineProcess],
) -> None:
    source, target = engines
    first = turn(source, "mover", STORY)
    twin = turn(target, "other", "nothing in common with it")
    assert cached(twin) == 0
    answer = move(source, order(target, "mover"))
    assert answer.status_code == 200, answer.text
    moved = answer.json()
    assert moved["sent_blocks"] == moved["blocks"] > 5
    assert moved["target_tokens"] == moved["blocks"] * 16
    assert moved["sent_bytes"] > 0
    assert not moved["turn_began"]
    following = STORY + written(first) + " And then"
    there, here = turn(target, "mover", following), turn(source, "mover-stays", following)
    assert written(there) == written(here)
    assert cached(there) == cached(here), "as much as where it was"
    assert cached(there) > moved["target_tokens"] - 48, "all but what its text is other tokens for now"


def test_what_the_target_has_already_is_not_sent_again(engines: list[EngineProcess]) -> None:
    source, target = engines
    turn(source, "again", STORY + "twice")
    assert move(source, order(target, "again")).status_code == 200
    again = move(source, order(target, "again")).json()
    assert (again["sent_blocks"], again["blocks"] > 5) == (0, True)


def test_session_that_lives_elsewhere_goes_first_and_one_that_is_unknown_is_said(
    engines: list[EngineProcess],
) -> None:
    source, target = engines
    turn(source, "leaver", STORY + "leaves")
    assert move(source, order(target, "leaver")).status_code == 200
    with source.client() as client:
        assert client.delete("/kv/sessions/leaver").json() == {"let_go": True}
        assert client.delete("/kv/sessions/leaver").json() == {"let_go": False}
    unknown = move(source, order(target, "leaver"))
    assert (unknown.status_code, code_of(unknown)) == (404, "session_unknown")


def test_session_with_a_running_turn_is_not_moved_and_its_answer_goes_on(
    engines: list[EngineProcess],
) -> None:
    source, target = engines
    turn(source, "talker", STORY)
    body = {
        "model": MODEL_NAME, "prompt": STORY + "talk", "max_tokens": 400, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    with (
        source.client() as client,
        client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": "talker"}) as stream,
    ):
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        refused = move(source, order(target, "talker"))
        assert (refused.status_code, code_of(refused)) == (409, "turn_runs")
        assert any(line == "data: [DONE]" for line in lines)


def test_wrong_key_unknown_transfer_and_replay_are_refused(engines: list[EngineProcess]) -> None:
    source, target = engines
    turn(source, "thief", STORY + "thief")
    forged = move(source, order(target, "thief", key="0" * 64))
    assert (forged.status_code, code_of(forged)) == (502, "invalid_transfer")
    wish = order(target, "thief")
    assert move(source, wish).status_code == 200
    replayed = move(source, wish)
    assert (replayed.status_code, code_of(replayed)) == (502, "transfer_used")
    with target.client(with_key=False) as client:
        for method, path in (("POST", "0" * 32), ("PUT", "0" * 32), ("POST", "zz"), ("PUT", "../moves")):
            assert client.request(method, f"/kv/transfers/{path}", content=b"x" * 100).status_code in {
                401,
                404,
            }
        assert client.post("/kv/moves", json=order(target, "x")).status_code == 401
        assert client.delete("/kv/sessions/thief").status_code == 401


def test_offer_that_was_tampered_with_or_is_of_another_model_is_refused(engines: list[EngineProcess]) -> None:
    target = engines[1]
    transfer_id = os.urandom(16)
    key = transfer_key(target.api_key, transfer_id)
    headers = {PROOF_HEADER: proof(key, "POST", transfer_id)}
    offer = {"session_id": "s", "shape": "0" * 32, "block_bytes": 1, "digests": []}
    body = json.dumps(offer).encode()
    with target.client(with_key=False) as client:
        path = f"/kv/transfers/{transfer_id.hex()}"
        tampered = client.post(path, content=body + b"\0" * 32, headers=headers)
        assert tampered.status_code == 401
        other = client.post(path, content=body + body_tag(key, transfer_id, body), headers=headers)
        assert (other.status_code, code_of(other)) == (409, "other_shape")
        headers = {PROOF_HEADER: proof(key, "PUT", transfer_id)}
        assert client.put(path, content=b"", headers=headers).status_code == 404


@pytest.mark.parametrize("target", ["ftp://127.0.0.1:1", "http://127.0.0.1", "http://:x", "127.0.0.1:1"])
def test_target_that_is_no_address_is_refused(engines: list[EngineProcess], target: str) -> None:
    source = engines[0]
    turn(source, "lost", STORY)
    answer = move(source, order(engines[1], "lost") | {"target": target})
    assert (answer.status_code, code_of(answer)) == (502, "bad_target")


def test_target_that_dies_leaves_the_session_whole_at_its_source(
    engines: list[EngineProcess], demo_model: Path, tmp_path: Path
) -> None:
    source = engines[0]
    first = turn(source, "survivor", STORY + "survives")
    with engine_starter(tmp_path) as start:
        dying = start("torch", demo_model, num_blocks=256, threads=1)
        dying.wait_ready()
        wish = order(dying, "survivor", bytes_per_second=50_000.0)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(move, source, wish)
            with dying.client(with_key=False):
                dying.process.kill()
            result = answer.result(60)
    assert (result.status_code, code_of(result)) == (502, "target_unreachable")
    again = turn(source, "survivor", STORY + "survives" + written(first))
    assert cached(again) > 100


def test_target_without_room_says_so_and_takes_nothing_from_others(
    engines: list[EngineProcess], demo_model: Path, tmp_path: Path
) -> None:
    source = engines[0]
    turn(source, "large", STORY * 2)
    with engine_starter(tmp_path) as start:
        small = start("torch", demo_model, num_blocks=12, threads=1)
        small.wait_ready()
        answer = move(source, order(small, "large"))
        assert (answer.status_code, code_of(answer)) == (502, "no_room")
        assert cached(turn(small, "own", "A short prompt of its own, which still fits there.")) == 0
