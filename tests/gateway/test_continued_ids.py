"""Clients that ask for token ids themselves get those of one stream, wherever it broke."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.token_engine import CHAT_PATH, FIRST_ID, PIECES, PROMPT, TokenEngine
from tests.gateway.continued_streams import (
    CHAT,
    CONTINUE,
    TEXT,
    TEXT_PATH,
    breaking,
    error_of,
    events_of,
    forget_failures,
    nothing_is_left,
    prompt_ids_of,
    token_ids_of,
    two,
)
from tests.gateway.harness import World, eventually

pytestmark = pytest.mark.asyncio

IDS = {"return_token_ids": True}
ALL = [*range(FIRST_ID, FIRST_ID + len(PIECES))]


@pytest.mark.parametrize("knows_what_was_before", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (CHAT_PATH, {**CHAT, **IDS}, 9),
        (CHAT_PATH, {**CHAT, **IDS, "stop": "END", "stream_options": None}, 8),
        (CHAT_PATH, {**CHAT, **IDS, "max_tokens": 5}, 5),
        (TEXT_PATH, {**TEXT, **IDS}, 9),
        (TEXT_PATH, {**TEXT, **IDS, "stop": ["END"]}, 8),
    ],
)
async def test_break_at_any_byte_loses_and_repeats_no_id(
    world: World, path: str, body: dict[str, Any], count: int, *, knows_what_was_before: bool
) -> None:
    """Pieces with ids and no text among them, and the prompt's, which come once."""
    cuts: list[int] = []
    engines = [TokenEngine(name, knows_what_was_before, cuts=cuts) for name in ("a", "b")]
    gateway = await two(world, *engines)
    whole = _without_names(events_of(await gateway.ask(body, path=path, headers=CONTINUE)))
    assert token_ids_of(whole) == ALL[:count]
    assert prompt_ids_of(whole) == [PROMPT]
    sent = {**body, "include_stop_str_in_output": True}
    size = engines[0].size(path, sent)
    for cut in (*range(0, size, 11), size):  # no event is so small that one could be missed
        cuts[:] = [cut]
        forget_failures(gateway)
        seen = events_of(await gateway.ask(body, path=path, headers=CONTINUE))
        assert len({one["id"] for one in seen if isinstance(one, dict)}) == 1
        assert _without_names(seen) == whole, cut
    await eventually(lambda: nothing_is_left(gateway))


def _without_names(events: list[Any]) -> list[Any]:
    """Drop what differs between two answers of the same text, and what was in cache."""
    for one in events:
        if isinstance(one, dict):
            del one["id"]
            if one.get("usage"):
                one["usage"].pop("prompt_tokens_details", None)
    return events


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
async def test_unbroken_stream_with_ids_is_the_one_that_others_get(
    world: World, path: str, body: dict[str, Any]
) -> None:
    await world.engine(TokenEngine("a"))
    gateway = await world.gateway()
    plain = await gateway.ask({**body, **IDS}, path=path)
    kept = await gateway.ask({**body, **IDS}, path=path, headers=CONTINUE)
    assert kept.headers["x-exaops-continuation"] == "ready"
    assert events_of(kept) == events_of(plain)


@pytest.mark.parametrize("value", [False, None])
async def test_ids_that_were_declined_stay_with_the_gateway(world: World, value: object) -> None:
    gateway = await two(world, *breaking(600))
    reply = await gateway.ask({**CHAT, "return_token_ids": value}, headers=CONTINUE)
    assert reply.headers["x-exaops-continuation"] == "ready"
    assert b"token_ids" not in reply.body
    assert gateway.shared.counters.continuations == {"begun": 1, "resumed": 1}


async def test_nulls_beside_the_prompts_ids_are_not_taken_for_them(world: World) -> None:
    """vLLM's completions name the prompt's ids in each piece, and have them in the first."""

    class Wordy(TokenEngine):
        def events(self, path: str, body: dict[str, Any]) -> Any:
            for one in super().events(path, body):
                with_null = b'"finish_reason": null, "prompt_token_ids": null, "token_ids"'
                yield one.replace(b'"finish_reason": null, "token_ids"', with_null)

    gateway = await two(world, *(Wordy(name, cut_each_after_tokens=4) for name in "abc"))
    events = events_of(await gateway.ask({**TEXT, **IDS}, path=TEXT_PATH, headers=CONTINUE))
    assert token_ids_of(events) == ALL
    assert prompt_ids_of(events) == [PROMPT]


async def test_stream_too_long_to_keep_still_gives_its_ids_and_says_why_it_ends(world: World) -> None:
    gateway = await two(world, *breaking(1100), continuation_tokens=4)
    reply = await gateway.ask({**CHAT, **IDS}, headers=CONTINUE)
    assert "not continued: too long" in error_of(reply)["message"]
    seen = token_ids_of(events_of(reply)[:-1])
    assert len(seen) > 2
    assert seen == ALL[: len(seen)]
