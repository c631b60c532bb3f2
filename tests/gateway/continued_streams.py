"""Requests, engines and readings that the tests of continued streams share."""

from __future__ import annotations

import json
from typing import Any

from exaserve_ops.routing.domain import markdown
from tests.fakes.token_engine import TokenEngine
from tests.fakes.upstream import (
    Answer,
)
from tests.gateway.harness import Gateway, Reply, World

CONTINUE = {"x-continue-stream": "true"}
CHAT: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "messages": [{"role": "user", "content": "Say it."}],
    "stream_options": {"include_usage": True},
    "temperature": 0,
}
TEXT: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "prompt": "Say it.",
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
}
TEXT_PATH = "/v1/completions"


def events_of(reply: Reply) -> list[Any]:
    """What the client got: JSON of each event, and text for what is none."""
    assert reply.complete
    assert reply.body.endswith(b"\n\n")
    data = [part.removeprefix(b"data: ") for part in reply.body.split(b"\n\n")[:-1]]
    return [json.loads(part) if part.startswith(b"{") else part for part in data]


def text_of(events: list[Any]) -> str:
    """All text of a stream."""
    choices = [event["choices"][0] for event in events if isinstance(event, dict) and event.get("choices")]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


def breaking(*cuts: int, **kwargs: Any) -> list[TokenEngine]:
    """Two engines; whoever is asked breaks off after so many bytes, until there are no more such numbers."""
    shared = list(cuts)
    return [TokenEngine(name, cuts=shared, **kwargs) for name in "ab"]


async def two(world: World, *engines: Answer, **settings: Any) -> Gateway:
    """A gateway before engines on nodes of their own."""
    for number, engine in enumerate(engines):
        await world.engine(engine, node_id=f"n{number}")
    return await world.gateway(**settings)


def forget_failures(gateway: Gateway) -> None:
    """Have every replica be as good as new."""
    for slot in gateway.shared.fleet.slots():
        slot.mark = markdown.CLEAR


def nothing_is_left(gateway: Gateway) -> bool:
    """Whether no request, place or kept token is left."""
    shared = gateway.shared
    return (
        not shared.open_requests
        and not shared.continuations.budget.kept
        and not any(slot.in_flight for slot in shared.fleet.slots())
    )


def error_of(reply: Reply) -> dict[str, str]:
    """The one error event, which is the last event."""
    events = events_of(reply)
    assert [("error" in one) for one in events if isinstance(one, dict)].count(True) == 1
    error: dict[str, str] = events[-1]["error"]
    return error


def token_ids_of(events: list[Any]) -> list[int]:
    """Ids of all of a stream's tokens, in the order in which they came."""
    choices = [one for event in events if isinstance(event, dict) for one in event.get("choices", ())]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


def prompt_ids_of(events: list[Any]) -> list[list[int]]:
    """The prompt's ids, each time that they came: beside a chat's choices, in a completion's choice."""
    places = [event for event in events if isinstance(event, dict)]
    places += [choice for event in places for choice in event.get("choices", ())]
    return [place["prompt_token_ids"] for place in places if "prompt_token_ids" in place]
