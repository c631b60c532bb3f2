"""A conversation moves between two real engines, and its next turn cannot tell."""

from __future__ import annotations

import json
import os
import secrets
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engines.conftest import MODEL_NAME, EngineProcess, engine_starter
from workers.engines.openai_server.session_sending import PROOF_HEADER, body_tag, proof
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.kv_pool import layout_of
from workers.engines.torch_engine.loading import kv_shape
from workers.engines.torch_engine.settings import EngineSettings
from workers.kv.pool import NodePools, pools_folder
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
    assert moved["carrier"] == "tcp", "each has memory of its own"
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
        assert "here it is demo as float32, " in other.json()["error"]["message"]
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


@pytest.fixture(scope="module")
def pooled(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two replicas of one node, which draw on one memory."""
    folder = pools_folder(f"test-{uuid.uuid4().hex}", tmp_path_factory.mktemp("pools"))
    try:
        with engine_starter(tmp_path_factory.mktemp("pooled"), kv_pool_dir=folder) as start:
            running = [start("torch", demo_model, num_blocks=256, threads=1) for _ in range(2)]
            for engine in running:
                engine.wait_ready()
            yield running
    finally:
        NodePools(folder).remove_all()


def test_replicas_of_one_node_copy_within_its_memory_and_the_next_turn_cannot_tell(
    pooled: list[EngineProcess],
) -> None:
    source, target = pooled
    first = turn(source, "neighbour", STORY)
    # At a limit that a line would take minutes for: nothing goes over one.
    answer = move(source, order(target, "neighbour", bytes_per_second=1.0))
    assert answer.status_code == 200, answer.text
    moved = answer.json()
    assert (moved["carrier"], moved["sent_blocks"]) == ("shared_memory", moved["blocks"])
    following = STORY + written(first) + " And then"
    there, here = turn(target, "neighbour", following), turn(source, "neighbour-stays", following)
    assert written(there) == written(here)
    assert cached(there) == cached(here) > moved["target_tokens"] - 48
    again = move(source, order(target, "neighbour-stays")).json()
    assert (again["carrier"], again["sent_blocks"] < 4) == ("shared_memory", True), "it has the beginning"


def test_replica_with_memory_of_its_own_gets_blocks_over_the_line(
    pooled: list[EngineProcess], engines: list[EngineProcess]
) -> None:
    turn(pooled[0], "outward", STORY + "outward")
    answer = move(pooled[0], order(engines[0], "outward"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["carrier"] == "tcp"


def test_same_model_in_another_type_is_refused_with_the_reason_and_nothing_is_lost(
    pooled: list[EngineProcess], demo_model: Path, tmp_path: Path
) -> None:
    first = turn(pooled[0], "narrow", STORY + "narrow")
    with engine_starter(tmp_path) as start:
        narrow = start("torch", demo_model, num_blocks=256, threads=1, kv_dtype="fp8_e4m3")
        narrow.wait_ready()
        answer = move(pooled[0], order(narrow, "narrow"))
    assert (answer.status_code, code_of(answer)) == (502, "other_shape")
    message = answer.json()["error"]["message"]
    assert "here it is demo as float8_e4m3fn" in message
    assert "At the source it is demo as float32" in message
    assert cached(turn(pooled[0], "narrow", STORY + "narrow" + written(first))) > 100


class Lender:
    """Whoever holds a transfer's key, and says what it likes of the pool."""

    def __init__(self, target: EngineProcess, digests: list[str], shape: str, block_bytes: int) -> None:
        self.target = target
        self.transfer_id = secrets.token_bytes(16)
        self.key = transfer_key(target.api_key, self.transfer_id)
        offer = {"session_id": "s", "shape": shape, "block_bytes": block_bytes, "digests": digests}
        assert self.post("", offer).status_code == 200

    def post(self, suffix: str, body: dict[str, object], *, tag: bytes | None = None) -> httpx.Response:
        data = json.dumps(body).encode()
        data += body_tag(self.key, self.transfer_id, data) if tag is None else tag
        headers = {PROOF_HEADER: proof(self.key, "POST", self.transfer_id)}
        with self.target.client(with_key=False) as client:
            return client.post(
                f"/kv/transfers/{self.transfer_id.hex()}{suffix}", content=data, headers=headers
            )

    def lend(self, **changes: object) -> httpx.Response:
        return self.post("/lent", {"first": 0, "places": [0], "tags": ["00" * 16]} | changes)


def shape_of(config: Path) -> tuple[str, int]:
    """What a replica of the demo model in these tests calls its blocks."""
    settings = EngineSettings(model_dir=config, model_name=MODEL_NAME, dtype="float32")
    layout = layout_of(read_model_config(config), torch.float32)
    return kv_shape(settings, layout).hex(), layout.block_bytes


def test_lender_that_lies_gets_nothing_in_and_nothing_out(
    pooled: list[EngineProcess], demo_model: Path
) -> None:
    digests = [secrets.token_hex(16) for _ in range(3)]
    shape, block_bytes = shape_of(demo_model)
    lender = Lender(pooled[1], digests, shape, block_bytes)
    assert lender.lend().json() == {"blocks": 0}, "the tag is not that of what lies there"
    assert lender.lend(places=[1 << 40]).json() == {"blocks": 0}
    forged = lender.post("/lent", {"first": 0, "places": [0], "tags": ["00" * 16]}, tag=b"\0" * 32)
    assert (forged.status_code, code_of(forged)) == (401, "invalid_transfer")
    for changes in (
        {"tags": []},
        {"tags": ["zz"]},
        {"first": -1},
        {"places": [0] * 300, "tags": ["00"] * 300},
    ):
        assert lender.lend(**changes).status_code == 400
    # The first wrong order ended the transfer: nothing goes on with it.
    assert code_of(lender.lend()) == "not_expected"
    ahead = Lender(pooled[1], digests, shape, block_bytes)
    assert ahead.lend(first=1).status_code == 400
    assert pooled[1].health() is not None
