"""SGLang's memory goes and comes back once, whoever asks how often, and whoever has died meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.delicate_server import RELEASE, RESUME, DelicateServer
from workers.engines.inside.exaops_moves.memory import MemoryTurns

pytestmark = pytest.mark.asyncio
KEY = "the-key"


async def ask(app: MemoryTurns, path: str, body: bytes = b"{}", *, key: str = KEY) -> int:
    """One request; returns the status of its answer."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"Authorization".lower(), f"Bearer {key}".encode())],
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([RELEASE], [RELEASE]),
        ([RELEASE, RELEASE], [RELEASE]),
        ([RESUME], []),
        ([RELEASE, RESUME, RESUME], [RELEASE, RESUME]),
        ([RESUME, RELEASE, RELEASE, RESUME, RELEASE], [RELEASE, RESUME, RELEASE]),
    ],
)
async def test_what_is_so_already_is_answered_and_not_done_again(asked: list[str], told: list[str]) -> None:
    server = DelicateServer()
    app = MemoryTurns(server, KEY)
    assert [await ask(app, path) for path in asked] == [200] * len(asked)
    assert server.told == told


@pytest.mark.parametrize("then", [RELEASE, RESUME])
async def test_one_that_is_under_way_is_waited_for_though_its_asker_has_gone(then: str) -> None:
    server = DelicateServer(may_end=asyncio.Event())
    assert server.may_end is not None
    app = MemoryTurns(server, KEY)
    first = asyncio.create_task(ask(app, RELEASE))
    while not server.told:  # noqa: ASYNC110 - the server is no event
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(ask(app, then))
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.told == [RELEASE]
    server.may_end.set()
    assert await second == 200
    assert server.told == ([RELEASE] if then == RELEASE else [RELEASE, RESUME])
    assert server.is_away == (then == RELEASE)


async def test_what_was_refused_has_changed_nothing_and_may_be_asked_again() -> None:
    server = DelicateServer(status=400)
    app = MemoryTurns(server, KEY)
    assert await ask(app, RELEASE) == 400
    assert await ask(app, RESUME) == 200
    server.status = 200
    assert await ask(app, RELEASE) == 200
    assert server.told == [RELEASE, RELEASE]
    assert server.is_away


async def test_strangers_and_parts_of_memory_are_the_engines_own_business() -> None:
    server = DelicateServer()
    app = MemoryTurns(server, KEY)
    assert await ask(app, RELEASE, b'{"tags": ["kv_cache"]}', key=KEY) == 200
    server.is_away = False
    server.bodies.clear()
    await ask(app, RELEASE, key="another")
    await ask(app, "/v1/completions", b"{no json")
    assert server.told == [RELEASE, RELEASE]
    assert server.bodies == [b"{}", b"{no json"]
