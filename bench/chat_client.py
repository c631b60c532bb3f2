"""A small streaming client of the OpenAI chat API, for benchmarks and background load."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_OK = 200
_DATA = b"data: "
_TIMEOUT_SECONDS = 120.0


class ChatError(Exception):
    """A turn was refused or broke off; `status` is 0 where there was no answer."""

    def __init__(self, message: str, *, status: int = 0, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished answer."""

    text: str
    ttft_seconds: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the replica already had."""
    completion_tokens: int
    gaps_seconds: tuple[float, ...] = ()
    """Between each two pieces of text that came one after the other."""


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Asks one gateway for one model with one key."""

    gateway_url: str
    api_key: str
    model: str
    timeout_seconds: float = _TIMEOUT_SECONDS

    def ask(self, messages: Sequence[dict[str, str]], *, session_id: str = "", max_tokens: int = 32) -> Turn:
        """Stream one answer to its end. Raises `ChatError`."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        parts = urlsplit(self.gateway_url)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=self.timeout_seconds
        )
        try:
            began = time.monotonic()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers(session_id))
            return _read_turn(connection.getresponse(), began)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _headers(self, session_id: str) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        return headers | ({"x-session-id": session_id} if session_id else {})


def _read_turn(response: http.client.HTTPResponse, began: float) -> Turn:
    if response.status != _OK:
        raise ChatError(
            f"HTTP {response.status}: {response.read(500)!r}",
            status=response.status,
            retry_after_seconds=_retry_after_seconds(response),
        )
    text, times = "", [began]
    usage: dict[str, Any] = {}
    for event in _events(response):
        for choice in event.get("choices", ()):
            piece = choice.get("delta", {}).get("content") or ""
            if piece:
                times.append(time.monotonic())
            text += piece
        usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Turn(
        text=text,
        ttft_seconds=times[1] - began if len(times) > 1 else 0.0,
        seconds=time.monotonic() - began,
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        cached_tokens=int(details.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens", 0)),
        gaps_seconds=tuple(later - earlier for earlier, later in itertools.pairwise(times[1:])),
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of the stream. Raises `ChatError` if it does not end properly."""
    for line in response:
        if not line.startswith(_DATA):
            continue
        content = line[len(_DATA) :].strip()
        if content == b"[DONE]":
            return
        event = json.loads(content)
        if "error" in event:
            raise ChatError(f"the stream broke off: {event['error']}")
        yield event
    raise ChatError("the stream ended without [DONE]")


def _retry_after_seconds(response: http.client.HTTPResponse) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 1.0
