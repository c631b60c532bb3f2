"""An engine that says one text, token by token, and can be made to break off at any byte.

Its tokens are pieces of bytes: some hold a part of a character, and a stop string lies across three. It
gives token ids as vLLM and our engines do, and goes on from whatever tokens of the text its prompt ends with.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.upstream import DONE, STREAM_HEAD, Received, chunk, event

PROMPT = [11, 12, 13]
PIECES = (b"Hi", b" \xf0\x9f", b"\x98", b"\x80,", b" the", b" E", b"N", b"D of", b" it")
FIRST_ID = 100
CHAT_PATH = "/v1/chat/completions"


@dataclass
class TokenEngine:
    """Answers of one replica. `name` shows in what it calls its answers."""

    name: str
    knows_what_was_before: bool = True
    """As our engines do: a stop string may have begun in the tokens that are continued."""
    gives_token_ids: bool = True
    cuts: list[int] = field(default_factory=list)
    """Break off after so many bytes behind the head; each is for one answer. Engines may share them."""
    cut_each_after_tokens: int | None = None
    """Break off in each answer, after so many events with text."""
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, request: Received, writer: asyncio.StreamWriter) -> None:
        """Write the answer, as an `Answer`."""
        body = json.loads(request.body)
        self.asked.append(body)
        events = list(self.events(request.path, body))
        if self.cut_each_after_tokens is not None:
            opening = sum(b'"token_ids"' not in item for item in events[:2])
            events = events[: opening + self.cut_each_after_tokens]
        data = b"".join(chunk(item) for item in events)
        writer.write(STREAM_HEAD)
        if self.cut_each_after_tokens is not None:
            writer.write(data)
            await writer.drain()
            writer.close()
        elif self.cuts:
            writer.write(data[: self.cuts.pop(0)])
            await writer.drain()
            writer.close()
        else:
            writer.write(data + b"0\r\n\r\n")
            await writer.drain()

    def size(self, path: str, body: dict[str, Any]) -> int:
        """Bytes of an answer behind its head, without the last chunk."""
        return sum(len(chunk(item)) for item in self.events(path, body))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """The events of an answer."""
        is_chat = path == CHAT_PATH
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.name}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": len(self.name),
            "model": "m",
        }
        shows_ids = bool(body.get("return_token_ids")) and self.gives_token_ids
        prompt = body["prompt"] if self._is_continued(body) else PROMPT
        before = len(prompt) - len(PROMPT)
        if is_chat:
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            extra = {"prompt_token_ids": prompt} if shows_ids else {}
            yield event({**head, "choices": [choice], **extra})
        elif shows_ids:
            choice = {"index": 0, "text": "", "finish_reason": None, "prompt_token_ids": prompt}
            yield event({**head, "choices": [choice]})
        count = 0
        for count, (text, finish) in enumerate(self._parts(body, before), 1):
            choice = {"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}
            ids = {"token_ids": [FIRST_ID + before + count - 1]} if shows_ids else {}
            if text or ids or finish:
                yield event(
                    {**head, "choices": [{**choice, "logprobs": None, "finish_reason": finish, **ids}]}
                )
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
            details = {"prompt_tokens_details": {"cached_tokens": len(prompt) - 1}}
            yield event(
                {**head, "choices": [], "usage": {**usage, "total_tokens": sum(usage.values()), **details}}
            )
        yield DONE

    def _parts(self, body: dict[str, Any], before: int) -> Iterator[tuple[str, str | None]]:
        """Text that each token makes certain, and why the last one is the last."""
        limit = body.get("max_tokens") or len(PIECES)
        stop = body.get("stop") or "\0"
        stop = stop if isinstance(stop, str) else stop[0]
        said = _text_after(before)
        known = said if self.knows_what_was_before else ""
        for number in range(before, len(PIECES)):
            text = _text_after(number + 1)[len(said) :]
            said += text
            known += text
            if stop in known:
                assert body.get("include_stop_str_in_output"), "this engine holds nothing back"
                surplus = len(known) - known.index(stop) - len(stop)
                yield text[: len(text) - surplus], "stop"
                return
            is_last = number + 1 == len(PIECES)
            is_full = number + 1 - before == limit
            yield text, "stop" if is_last else "length" if is_full else None
            if is_full:
                return

    @staticmethod
    def _is_continued(body: dict[str, Any]) -> bool:
        return isinstance(body.get("prompt"), list)


def _text_after(count: int) -> str:
    """Text of so many tokens, without a character that has not ended."""
    return b"".join(PIECES[:count]).decode(errors="ignore")
