"""What stages tell one another, and what they make of what strangers say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.stages import held_port, wait_until
from workers.engines.torch_engine.sampling import Choice
from workers.engines.torch_engine.scheduler import Chunk, Sequence
from workers.engines.torch_engine.settings import StageSettings
from workers.engines.torch_engine.stage_company import Company, open_company
from workers.engines.torch_engine.stage_facts import StageFacts, agree
from workers.engines.torch_engine.stage_link import (
    VERSION,
    Challenge,
    Link,
    Place,
    Proof,
    StageLostError,
    Welcome,
    connect,
    greet,
)
from workers.engines.torch_engine.stage_wire import StageWireError, decode_order, encode_order
from workers.engines.torch_engine.staged_model import Split, split_step
from workers.protocol.digests import KV_BLOCK_TOKENS

BLOCKS = 50
KEY = b"xg-of-this-start"
HEARD_AT_ONCE = 8
"""Strangers that a first stage has patience for at the same time."""


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    start, count = draw(st.integers(0, 90)), draw(st.integers(1, 40))
    rest = draw(st.integers(0, 20))
    needed = -(-(start + count) // KV_BLOCK_TOKENS)
    spare = draw(st.integers(0, 2))
    blocks = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=needed + spare, max_size=needed + spare))
    return Chunk(Sequence("r", [7] * (start + count + rest), blocks=blocks), start, count)


ORDERS = st.lists(st.lists(chunks(), min_size=1, max_size=4), min_size=1, max_size=4)
RATIO = st.floats(0, 1, exclude_max=True)


def written(groups: list[list[Chunk]], choices: list[Choice]) -> np.ndarray:
    return np.frombuffer(encode_order(groups, choices), np.uint8)


def an_order() -> tuple[list[list[Chunk]], list[Choice]]:
    sequence = Sequence("r", [1] * 20, blocks=[3, 9])
    return [[Chunk(sequence, 0, 20)]], [Choice(1.0, 0.9, 0.25)]


@given(groups=ORDERS, draws=st.lists(st.tuples(st.floats(0, 2), RATIO, RATIO), min_size=16, max_size=16))
def test_an_order_says_all_that_another_stage_needs(
    groups: list[list[Chunk]], draws: list[tuple[float, float, float]]
) -> None:
    sampled = sum(chunk.samples for group in groups for chunk in group)
    choices = [Choice(*draw) for draw in draws[:sampled]]
    message = written(groups, choices)
    order = decode_order(message, total_blocks=BLOCKS)
    assert len(message) % 64 == 0
    assert list(order.choices) == choices
    assert [len(group) for group in order.groups] == [len(group) for group in groups]
    for told, known in zip(order.groups, groups, strict=True):
        for chunk, own in zip(told, known, strict=True):
            assert (chunk.start, chunk.count, chunk.samples) == (own.start, own.count, own.samples)
            needed = -(-own.end // KV_BLOCK_TOKENS)
            assert chunk.sequence.blocks == own.sequence.blocks[:needed]


@settings(max_examples=300)
@given(at=st.integers(0, 63), value=st.integers(0, 255))
def test_no_changed_byte_makes_a_stage_touch_blocks_that_there_are_not(at: int, value: int) -> None:
    message = written(*an_order()).copy()
    message[at] = value
    try:
        order = decode_order(message, total_blocks=BLOCKS)
    except StageWireError:
        return
    held = [chunk.sequence.blocks for group in order.groups for chunk in group]
    assert all(0 <= block < BLOCKS for blocks in held for block in blocks)


def test_an_order_that_was_cut_off_is_refused() -> None:
    message = written(*an_order())
    for length in range(0, 72, 4):
        with pytest.raises(StageWireError):
            decode_order(message[:length], total_blocks=BLOCKS)


def facts(number: int, **changes: object) -> StageFacts:
    plain = StageFacts(number, "m", "float32", "float32", "cpu", 100 - number, 64)
    return msgspec.structs.replace(plain, **changes)


def test_all_stages_hold_as_many_blocks_as_the_one_with_least_room() -> None:
    agreement = agree((facts(0), facts(1), facts(2)))
    assert (agreement.blocks, agreement.block_bytes, agreement.refusal) == (98, 192, "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "stage 1 has model other, and stage 0 m"),
        ({"compute_dtype": "bfloat16"}, "stage 1 computes in bfloat16, and stage 0 float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "stage 1 keeps KV as float8_e4m3fn, and stage 0 float32"),
        ({"device_kind": "cuda"}, "stage 1 runs on cuda, and stage 0 cpu"),
    ],
)
def test_stages_that_would_compute_otherwise_are_refused_in_words(change: dict[str, str], words: str) -> None:
    assert agree((facts(0), facts(1, **change))).refusal == words


def stage_settings(
    number: int, port: int, *, count: int = 2, handshake_seconds: float = 20.0
) -> StageSettings:
    return StageSettings(
        number,
        count,
        "127.0.0.1",
        ("127.0.0.1", port),
        KEY,
        join_seconds=60.0,
        silence_seconds=30.0,
        handshake_seconds=handshake_seconds,
    )


@pytest.fixture
def port() -> Iterator[int]:
    """Where a first stage may listen."""
    with held_port() as number:
        yield number


@contextmanager
def company_of(count: int, port: int) -> Iterator[list[Company]]:
    companies = [open_company(stage_settings(number, port, count=count)) for number in range(count)]
    try:
        companies[0].wait_for_all(seconds=30.0)
        yield companies
    finally:
        for company in companies:
            company.leave("the test is over", is_failure=False)


def test_what_one_stage_tells_all_read_also_those_that_come_later(port: int) -> None:
    head = open_company(stage_settings(0, port, count=3))
    head.put("early", b"1")
    first = open_company(stage_settings(1, port, count=3))
    first.put("from one", b"2")
    second = open_company(stage_settings(2, port, count=3))
    for company in (head, first, second):
        assert company.get("early", seconds=30.0) == b"1"
        assert company.get("from one", seconds=30.0) == b"2"
    head.leave("done", is_failure=False)
    assert first.wait_for_end(seconds=30.0) == second.wait_for_end(seconds=30.0)


def test_when_one_stage_ends_all_others_learn_why(port: int) -> None:
    with company_of(3, port) as companies:
        companies[2].leave("the disk is full", is_failure=True)
        endings = [company.wait_for_end(seconds=30.0) for company in companies]
    assert {ending.reason for ending in endings if ending} == {"stage 2: the disk is full"}
    assert all(ending is not None and ending.is_failure for ending in endings)


def test_who_waits_for_others_is_told_that_they_will_not_come(port: int) -> None:
    with company_of(2, port) as companies:
        heard: list[str] = []
        companies[0].watch(lambda ending: heard.append(ending.reason))
        refused: list[str] = []

        def wait_in_vain() -> None:
            try:
                companies[0].get("x", seconds=60.0)
            except StageLostError as error:
                refused.append(str(error))

        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        companies[1].leave("told to end", is_failure=False)
        waiting.join(30.0)
        assert refused == ["stage 1: told to end"]
        # For the first stage any other's end is a failure: the layers are gone.
        wait_until(lambda: heard == ["stage 1: told to end"])
        ending = companies[0].ending
    assert ending is not None
    assert ending.is_failure


def test_a_stage_that_does_not_come_is_named(port: int) -> None:
    head = open_company(stage_settings(0, port, count=3))
    with pytest.raises(StageLostError, match=r"stage 1, 2 did not come within 0.1 s"):
        head.wait_for_all(seconds=0.1)
    head.leave("done", is_failure=False)


@pytest.mark.parametrize(
    ("key", "place", "words"),
    [
        (b"xg-other", Place(1, 2), "no proof that it belongs to this start"),
        (KEY, Place(1, 3), "it is stage 1 of 3, and this is stage 0 of 2"),
        (KEY, Place(0, 2), "it is stage 0 of 2, and this is stage 0 of 2"),
    ],
)
def test_who_does_not_belong_is_turned_away_in_words_and_harms_nobody(
    port: int, key: bytes, place: Place, words: str
) -> None:
    head = open_company(stage_settings(0, port))
    with pytest.raises(StageLostError, match=words):
        connect(("127.0.0.1", port), "127.0.0.1", key, place, seconds=30.0)
    late = open_company(stage_settings(1, port))
    head.wait_for_all(seconds=30.0)
    assert head.ending is None
    late.leave("done", is_failure=False)


def test_a_stage_that_is_there_already_is_not_replaced(port: int) -> None:
    head = open_company(stage_settings(0, port, count=3))
    first = open_company(stage_settings(1, port, count=3))
    wait_until(lambda: head.has(1))
    with pytest.raises(StageLostError, match="stage 1 is here already"):
        open_company(stage_settings(1, port, count=3))
    assert (head.ending, first.ending) == (None, None)
    head.leave("done", is_failure=False)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\x00\x00\x00\x01\xc1",
        b"",
        (len(body := msgspec.msgpack.encode(Proof(1, 2, b"n", b"p")))).to_bytes(4, "big") + body,
    ],
    ids=["http", "endless", "rubbish", "nothing", "unproven"],
)
def test_strangers_keep_nobody_out(port: int, said: bytes) -> None:
    head = open_company(stage_settings(0, port))
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(said)
    late = open_company(stage_settings(1, port))
    head.wait_for_all(seconds=30.0)
    assert head.ending is None
    for stranger in strangers:
        stranger.close()
    late.leave("done", is_failure=False)


def drip(port: int, heard: threading.Semaphore, over: threading.Event) -> None:
    """Say a long word byte by byte; once cut off, come again."""
    while not over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 30.0) as connection:
            connection.recv(1)
            heard.release()
            connection.sendall((1 << 20).to_bytes(4, "big"))
            while not over.wait(0.05):
                connection.sendall(b"\x00")
        over.wait(0.05)


def test_strangers_that_say_a_byte_now_and_then_keep_nobody_out(port: int) -> None:
    """As many as are heard out at once, each far quicker with a byte than a limit for one would be."""
    head = open_company(stage_settings(0, port, handshake_seconds=1.0))
    heard, over = threading.Semaphore(0), threading.Event()
    strangers = [threading.Thread(target=drip, args=(port, heard, over)) for _ in range(HEARD_AT_ONCE)]
    for stranger in strangers:
        stranger.start()
    try:
        for _ in strangers:
            assert heard.acquire(timeout=60.0)
        late = open_company(stage_settings(1, port))
        head.wait_for_all(seconds=60.0)
    finally:
        over.set()
        for stranger in strangers:
            stranger.join()
    assert head.ending is None
    late.leave("done", is_failure=False)


def test_a_door_full_of_silent_strangers_still_closes_when_it_is_over(port: int) -> None:
    head = open_company(stage_settings(0, port, handshake_seconds=600.0))
    with ExitStack() as strangers:
        for _ in range(HEARD_AT_ONCE):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), 30.0))
            assert stranger.recv(1)  # so it is one of those that are heard
        strangers.enter_context(socket.create_connection(("127.0.0.1", port), 30.0))
        head.leave("done", is_failure=False)

        def is_closed() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port), 2.0).close()
            except OSError as error:
                return isinstance(error, ConnectionError)  # else a backlog that is full
            return False

        wait_until(is_closed)


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "closed"])
def test_a_stage_comes_again_to_a_first_one_that_had_no_time_for_it(is_silent: bool) -> None:
    with ExitStack() as undone:
        listener = undone.enter_context(socket.create_server(("127.0.0.1", 0)))
        came: list[Place] = []

        def be_busy_then_greet() -> None:
            first, _ = listener.accept()
            if is_silent:
                first.settimeout(60.0)
                first.recv(1)  # nothing: it gives up
            first.close()
            while not came:
                link = Link(undone.enter_context(listener.accept()[0]), handshake_seconds=30.0)
                with suppress(OSError):
                    came.append(greet(link, KEY, 2, is_here=lambda _: False))

        first_stage = threading.Thread(target=be_busy_then_greet, daemon=True)
        first_stage.start()
        address = ("127.0.0.1", listener.getsockname()[1])
        connect(address, "127.0.0.1", KEY, Place(1, 2), seconds=60.0, answer_seconds=0.5).close()
        first_stage.join(60.0)
        assert came == [Place(1, 2)]


def test_the_head_proves_itself_too() -> None:
    """Whoever listens at the rendezvous does not get a stage to work for it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            for word in (Challenge(VERSION, bytes(32)), Welcome(bytes(32))):
                body = msgspec.msgpack.encode(word)
                connection.sendall(len(body).to_bytes(4, "big") + body)
                connection.recv(4096)

    pretender = threading.Thread(target=pretend)
    pretender.start()
    with pytest.raises(StageLostError, match="does not know the key"):
        connect(("127.0.0.1", port), "127.0.0.1", KEY, Place(1, 2), seconds=30.0)
    pretender.join()
    listener.close()


def test_nothing_of_what_stages_say_is_unpickled() -> None:
    folder = Path(__file__).parents[2] / "workers" / "engines" / "torch_engine"
    sources = [path.read_text("utf-8") for path in folder.glob("stage*.py")]
    assert sources
    assert not [text for text in sources if "pickle" in text or "_object" in text]


@given(
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    most=st.integers(1, 6),
    least=st.integers(1, 60),
)
def test_a_step_in_parts_has_all_its_rows_in_order(counts: list[int], most: int, least: int) -> None:
    whole = [Chunk(Sequence(str(n), [1] * (count + 3 + n % 2)), 3, count) for n, count in enumerate(counts)]
    parts = split_step(whole, Split(most, least))
    pieces = [piece for part in parts for piece in part]
    rows = [(c.sequence.request_id, at) for c in pieces for at in range(c.start, c.end)]
    assert rows == [(c.sequence.request_id, at) for c in whole for at in range(c.start, c.end)]
    assert len(parts) <= most
    assert len(parts) == 1 or sum(counts) >= len(parts) * least
    assert sum(piece.samples for piece in pieces) == sum(chunk.samples for chunk in whole)
