"""Conversations on a fleet that rolls, and what engines that nobody moves say to the same questions."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.relocation.engines import MODEL, Seat
from bench.relocation.house import running
from bench.relocation.wire import OK, ask

TALKERS = 4
ANSWER_TOKENS = 8
PAUSE_SECONDS = 0.25
BLOCKS = 512
MOST_CHARACTERS = 3400
"""Of one conversation. The demo model takes 4,096 tokens, and a token is a character at least."""
_WORDS = ("river", "window", "garden", "letter", "music", "winter", "bread", "engine", "quiet", "morning")


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn: what was asked, and who answered what."""

    session: str
    turn: int
    messages: tuple[tuple[str, str], ...]
    """(role, text) of all that was said before the answer."""
    tokens: tuple[int, ...]
    replica_id: str


@dataclass
class Load:
    """Talkers that go on until they are told to end; half of them read streams."""

    gateway_url: str
    token: str
    model: str = "demo"
    turns: int = 10
    """Of one conversation; then the next one begins."""
    words: int = 100
    """Of one question: so many a turn computes, and all so far where it has moved."""
    talkers: int = TALKERS
    continues: bool = False
    """Whether streams ask to go on at another replica where theirs breaks off."""
    answered: list[Answered] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(n,)) for n in range(self.talkers)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=150)

    def replicas(self) -> set[str]:
        """Who has answered so far."""
        return {one.replica_id for one in self.answered}

    def _talk(self, number: int) -> None:
        drawn = random.Random(number)  # noqa: S311 - words of a conversation
        with httpx.Client(base_url=self.gateway_url, timeout=120) as client:
            while not self._stop.is_set():
                self._converse(client, drawn, streams=number % 2 == 0)

    def _converse(self, client: httpx.Client, drawn: random.Random, *, streams: bool) -> None:
        session = uuid.uuid4().hex
        said: tuple[tuple[str, str], ...] = ()
        for turn in range(self.turns):
            asked = " ".join(drawn.choices(_WORDS, k=self.words))
            said = (*said, ("user", asked))
            if sum(len(text) for _, text in said) > MOST_CHARACTERS:
                return  # the next answer might have no room
            answer = self._ask(client, session, said, streams=streams)
            if answer is not None:
                text, tokens, replica_id = answer
                self.answered.append(Answered(session, turn, said, tokens, replica_id))
                said = (*said, ("assistant", text or "-"))
            if self._stop.wait(PAUSE_SECONDS):
                return

    def _ask(
        self, client: httpx.Client, session: str, said: tuple[tuple[str, str], ...], *, streams: bool
    ) -> tuple[str, tuple[int, ...], str] | None:
        headers = {"Authorization": f"Bearer {self.token}", "x-session-id": session}
        headers |= {"x-continue-stream": "true"} if self.continues else {}
        body = question(said) | {"model": self.model, "stream": streams}
        began = time.monotonic()
        try:
            with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                content = response.read().decode()
            text, tokens = read_answer(response.status_code, content, streams=streams)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.failed.append(f"{session} after {time.monotonic() - began:.1f} s: {error!r}")
            return None
        return text, tokens, response.headers["x-exaops-replica"]


def question(said: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What is asked of the fleet and of the engines beside it alike."""
    return {
        "messages": [{"role": role, "content": text} for role, text in said],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }


def read_answer(status: int, content: str, *, streams: bool) -> tuple[str, tuple[int, ...]]:
    """Text and tokens. Raises `KeyError` or `ValueError` where it is no whole answer."""
    if status != httpx.codes.OK:
        raise ValueError(f"{status} {content[:300]}")
    return read_stream(content) if streams else read_whole(content)


def read_whole(content: str) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of an answer that came at once. Raises `KeyError` or `ValueError`."""
    choice = json.loads(content)["choices"][0]
    return choice["message"]["content"], tuple(choice["token_ids"])


def read_stream(content: str) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of a streamed answer. Raises `ValueError` where it broke off."""
    text, tokens, ended = "", [], False
    for line in content.splitlines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ValueError(f"the stream broke off: {event['error']}")
        for choice in event.get("choices", ()):
            text += choice.get("delta", {}).get("content") or ""
            tokens += choice.get("token_ids") or ()
    if not ended:
        raise ValueError("the stream ended without [DONE]")
    return text, tuple(tokens)


def otherwise_answered(
    answered: Sequence[Answered], models: Mapping[str, Path], model_of: Mapping[str, str], scratch: Path
) -> list[str]:
    """Answers that differ from those of an engine that is not part of the fleet and has the same weights.

    `models`: folder by name; `model_of`: name of a replica's model. One engine each, whole conversations in
    their order, so each has the context in its cache that nobody moved.
    """
    return asyncio.run(_differing(answered, models, model_of, scratch))


async def _differing(
    answered: Sequence[Answered], models: Mapping[str, Path], model_of: Mapping[str, str], scratch: Path
) -> list[str]:
    seats = [Seat(name, "", folder, scratch / name, BLOCKS) for name, folder in models.items()]
    found = []
    async with running(seats) as house:
        for one in sorted(answered, key=lambda one: (one.session, one.turn)):
            engine = house.find(model_of[one.replica_id])
            assert engine is not None, "the twin runs"
            status, told = await ask(
                engine.address,
                "POST",
                "/v1/chat/completions",
                key=engine.api_key,
                body=question(one.messages) | {"model": MODEL},
            )
            assert status == OK, told
            expected = tuple(told["choices"][0]["token_ids"])
            if one.tokens != expected:
                found.append(f"{one.session} turn {one.turn}: {one.tokens}, its twin {expected}")
    return found
