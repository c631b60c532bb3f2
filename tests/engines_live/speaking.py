"""One conversation in turns, and one long answer that is still being read while something happens."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

from tests.rollouts.talking import Answered, question, read_answer, read_stream

LONG_ANSWER_TOKENS = 3800
"""Seconds of writing, even where nothing else is done."""
LONGEST_SECONDS = 900


@dataclass
class Conversation:
    """Turns of one session, one after the other."""

    client: httpx.Client
    deployment: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    answered: list[Answered] = field(default_factory=list)
    _said: tuple[tuple[str, str], ...] = ()

    def ask(self, text: str) -> None:
        """Take a turn. Raises `ValueError` where it has no whole answer."""
        said = (*self._said, ("user", text))
        body = question(said) | {"model": self.deployment}
        answer = self.client.post("/v1/chat/completions", json=body, headers={"x-session-id": self.name})
        words, tokens = read_answer(answer.status_code, answer.text, streams=False)
        replica = answer.headers["x-exaops-replica"]
        self.answered.append(Answered(self.name, len(self.answered), said, tokens, replica))
        self._said = (*said, ("assistant", words or "-"))


class LongStream:
    """A long streamed answer, read in a thread of its own from entering on."""

    def __init__(self, client: httpx.Client, deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._text: list[str] = []
        self._failure: BaseException | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.replica = ""
        """Who answers; known once entered."""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._begun.wait(LONGEST_SECONDS), "no answer begins"
        assert self._failure is None, self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(LONGEST_SECONDS)

    @property
    def pieces(self) -> int:
        """Events so far."""
        return len(self._text)

    def whole(self) -> str:
        """Its text, once it has ended. Raises `ValueError` where it broke off."""
        self._thread.join(LONGEST_SECONDS)
        assert not self._thread.is_alive(), "the stream does not end"
        assert self._failure is None, self._failure
        return read_stream("\n".join(self._text))[0]

    def _read(self) -> None:
        body = question([("user", "tell me all of it")]) | {
            "model": self._deployment,
            "stream": True,
            "max_tokens": LONG_ANSWER_TOKENS,
            "ignore_eos": True,
        }
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                self.replica = answer.headers.get("x-exaops-replica", "")
                for line in answer.iter_lines():
                    if line:
                        self._text.append(line)
                    if len(self._text) > 1:
                        self._begun.set()
        except httpx.HTTPError as error:
            self._failure = error
        finally:
            self._begun.set()
