"""Asks one replica's engine directly, as a validation does: beside the gateways, with the engine's key."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from exaserve_ops.validation.domain.asking import Answer, Ask
from exaserve_ops.validation.domain.probing import Target
from workers.protocol import digests

CONNECT_SECONDS = 5.0
MOST_LINE_BYTES = 1 << 20
MOST_ERROR_CHARACTERS = 300
_OK = 200


class HttpEngineProbe:
    """Sends single requests over connections of their own. Thread-safe: it keeps nothing."""

    def __init__(self, key_of: Callable[[str], bytes | None]) -> None:
        self._key_of = key_of

    def token_of(self, target: Target) -> str | None:
        """The key to a target's engine. It may be read from the database, which `ask` never needs."""
        key = self._key_of(target.node_id)
        return None if key is None else digests.engine_api_key(key, target.replica_id, target.attempt)

    def ask(self, target: Target, ask: Ask, *, seconds: float) -> Answer:
        """Send one request and wait for its whole answer. Never raises: what went wrong is in the answer.

        `seconds`: longest silence of the engine.
        """
        begun = time.monotonic()
        if target.token is None:
            return Answer(0, error="its node is not recorded any more")
        link = http.client.HTTPConnection(target.host, target.port, timeout=CONNECT_SECONDS)
        try:
            link.connect()
            if link.sock is not None:
                link.sock.settimeout(seconds)
            headers = {"Authorization": f"Bearer {target.token}", "Content-Type": "application/json"}
            path = "/v1/chat/completions" if ask.messages else "/v1/completions"
            link.request("POST", path, body=json.dumps(_body(target, ask)), headers=headers)
            reply = link.getresponse()
            if reply.status != _OK:
                text = reply.read(64 * 1024).decode(errors="replace")
                return Answer(reply.status, error=_error_of(text), seconds=time.monotonic() - begun)
            return _read(reply, begun)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(0, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - begun)
        finally:
            link.close()


def _body(target: Target, ask: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if ask.messages:
        body["messages"] = [{"role": role, "content": text} for role, text in ask.messages]
    else:
        body["prompt"] = list(ask.tokens)
    if ask.stop:
        body["stop"] = list(ask.stop)
    if ask.ignores_end:
        body["ignore_eos"] = True
    if ask.alternatives:
        body |= (
            {"logprobs": True, "top_logprobs": ask.alternatives}
            if ask.messages
            else {"logprobs": ask.alternatives}
        )
        body["return_tokens_as_token_ids"] = True
    return body


@dataclass(slots=True)
class _Heard:
    """What a stream has brought so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    finish: str = ""
    first_seconds: float | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    alternatives: list[dict[int, float]] = field(default_factory=list)
    error: str = ""

    def take(self, event: Mapping[str, Any], seconds: float) -> None:
        """Take one event in."""
        if "error" in event:
            self.error = _error_of(json.dumps(event))
        self.usage = event.get("usage") or self.usage
        self.prompt += event.get("prompt_token_ids") or ()
        for choice in event.get("choices") or ():
            self.prompt += choice.get("prompt_token_ids") or ()
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            tokens = choice.get("token_ids") or ()
            if (text or tokens) and self.first_seconds is None:
                self.first_seconds = seconds
            self.text.append(text)
            self.tokens += tokens
            self.finish = choice.get("finish_reason") or self.finish
            self.alternatives += _alternatives(choice.get("logprobs"))


def _read(reply: http.client.HTTPResponse, begun: float) -> Answer:
    heard = _Heard()
    for event in _events(reply):
        heard.take(event, time.monotonic() - begun)
    usage = heard.usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    error = heard.error or ("" if heard.finish else "the stream ended without saying why")
    return Answer(
        status=_OK,
        text="".join(heard.text),
        token_ids=tuple(heard.tokens),
        prompt_token_ids=tuple(heard.prompt),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=cached,
        finish_reason=heard.finish,
        ttft_seconds=heard.first_seconds,
        seconds=time.monotonic() - begun,
        alternatives=tuple(heard.alternatives),
        error=error,
    )


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events of a stream. Raises `ValueError` for one that is none."""
    while line := reply.readline(MOST_LINE_BYTES):
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event of the stream is no object")  # noqa: TRY004 - it is what the caller handles
        yield event


def _alternatives(told: Any) -> list[dict[int, float]]:  # noqa: ANN401 - whatever an engine says
    """Log-probabilities by token id, of completions whose tokens are written as `token_id:N`."""
    places = told.get("top_logprobs") if isinstance(told, dict) else None
    found: list[dict[int, float]] = []
    for place in places or ():
        if isinstance(place, dict):
            pairs = ((name.removeprefix("token_id:"), value) for name, value in place.items())
            found.append({int(name): float(value) for name, value in pairs if name.isdigit()})
    return found


def _error_of(text: str) -> str:
    """What an error body says, without its wrapping."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()[:MOST_ERROR_CHARACTERS]
    told = body.get("error", body) if isinstance(body, dict) else body
    message = told.get("message", told) if isinstance(told, dict) else told
    return str(message)[:MOST_ERROR_CHARACTERS]
