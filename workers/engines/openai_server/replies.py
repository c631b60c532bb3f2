"""Reply bodies of both routes, whole and streamed. Pure but for the time stamp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from workers.engines.openai_server.stream import FinishReason, GenerationStream

Route = Literal["chat", "text"]
Json = dict[str, Any]

DONE_EVENT = b"data: [DONE]\n\n"


def unix_seconds() -> int:
    """Wall-clock time of a reply, which the API's `created` field asks for."""
    now = datetime.now(tz=UTC)  # noqa: TID251 - the one wall clock of the engines: `created`
    return int(now.timestamp())


def server_event(body: Json) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage_of(stream: GenerationStream) -> Json:
    """Token counts of a request; of an engine with tiers, what came from each, too."""
    usage: Json = {
        "prompt_tokens": stream.prompt_tokens,
        "completion_tokens": stream.completion_tokens,
        "total_tokens": stream.prompt_tokens + stream.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stream.prompt.cached_tokens},
    }
    if stream.swaps is not None:
        preemptions, fetches = stream.swaps
        usage["kv"] = {
            "cached_tokens": {
                "accelerator": stream.prompt.accelerator_tokens,
                "host": stream.prompt.host_tokens,
                "disk": stream.prompt.disk_tokens,
            },
            "preemptions": preemptions,
            "fetches": fetches,
        }
    return usage


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """What all bodies of one reply have in common."""

    route: Route
    request_id: str
    model: str
    created: int
    prompt_token_ids: Sequence[int] | None = None
    """`None`: the client did not ask for token ids, of the prompt or of the text."""

    @property
    def shows_tokens(self) -> bool:
        """Whether token ids were asked for."""
        return self.prompt_token_ids is not None

    def whole(self, text: str, token_ids: Sequence[int], finish: FinishReason, usage: Json) -> Json:
        """Body of a reply that is not streamed."""
        choice: Json = {"index": 0, "logprobs": None, "finish_reason": finish, **self._ids(token_ids)}
        if self.route == "chat":
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        name = "chat.completion" if self.route == "chat" else "text_completion"
        return self._with_prompt({**self._head(name), "choices": [choice], "usage": usage})

    def opening(self) -> Json | None:
        """First chunk, which names the role and has the prompt's tokens; else completions have none."""
        if self.route == "chat":
            return self._with_prompt(self._chunk({"delta": {"role": "assistant", "content": ""}}, None))
        return self._with_prompt(self._chunk({"text": ""}, None)) if self.shows_tokens else None

    def part(self, text: str, token_ids: Sequence[int]) -> Json:
        """Chunk with more text."""
        return self._chunk({**self._text_of(text), **self._ids(token_ids)}, None)

    def closing(self, finish: FinishReason) -> Json:
        """Chunk that says why the text ended."""
        empty: Json = {"delta": {}} if self.route == "chat" else {"text": ""}
        return self._chunk(empty, finish)

    def last_part(self, text: str, token_ids: Sequence[int], finish: FinishReason) -> Json:
        """Chunk with the last tokens and why they are the last: who has them knows that nothing follows."""
        return self._chunk({**self._text_of(text), **self._ids(token_ids)}, finish)

    def usage_chunk(self, usage: Json) -> Json:
        """Chunk without choices that carries the token counts."""
        return {**self._head(self._chunk_name), "choices": [], "usage": usage}

    def _ids(self, token_ids: Sequence[int]) -> Json:
        return {"token_ids": token_ids} if self.shows_tokens else {}

    def _with_prompt(self, body: Json) -> Json:
        """Add the prompt's tokens where vLLM has them: beside a chat's choices, in a completion's choice."""
        if self.shows_tokens:
            place = body if self.route == "chat" else body["choices"][0]
            place["prompt_token_ids"] = self.prompt_token_ids
        return body

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.route == "chat" else "text_completion"

    def _text_of(self, text: str) -> Json:
        return {"delta": {"content": text}} if self.route == "chat" else {"text": text}

    def _chunk(self, content: Json, finish: FinishReason | None) -> Json:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self._head(self._chunk_name), "choices": [choice]}

    def _head(self, name: str) -> Json:
        return {
            "id": self.request_id,
            "object": name,
            "created": self.created,
            "model": self.model,
        }
