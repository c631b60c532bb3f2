"""The response that carries a generation, and ends it when its client goes away."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.types import Receive, Scope, Send

from workers.engines.openai_server.errors import ApiError, error_body, error_response
from workers.engines.openai_server.port import GenerationTask, TextEngine
from workers.engines.openai_server.replies import DONE_EVENT, ReplyShape, server_event, usage_of
from workers.engines.openai_server.stream import (
    Delta,
    FinishReason,
    GenerationAbortedError,
    GenerationStream,
)

log = logging.getLogger(__name__)

_ENGINE_FAILED = "The engine failed while generating."


class OpenGenerations:
    """How many generations are not yet sent to their last byte; a drain waits for none."""

    def __init__(self) -> None:
        """Begin with none."""
        self.count = 0


class GenerationResponse:
    """ASGI response of one generation.

    The connection is watched while the engine works, streaming or not, so that a client that hangs
    up frees its blocks at the next step rather than at the end of its text.
    """

    def __init__(
        self,
        engine: TextEngine,
        task: GenerationTask,
        stream: GenerationStream,
        shape: ReplyShape,
        open_generations: OpenGenerations,
    ) -> None:
        """Prepare a whole reply; `streamed` turns it into server-sent events.

        From here on the response counts as open, so it must be called.
        """
        self._open = open_generations
        self._open.count += 1
        self._engine = engine
        self._task = task
        self._stream = stream
        self._shape = shape
        self._events = False
        self._include_usage = False

    def streamed(self, *, include_usage: bool) -> GenerationResponse:
        """Answer with server-sent events, the last of which may carry the token counts."""
        self._events = True
        self._include_usage = include_usage
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the task and send its text, until it ends or the client goes."""
        watcher = asyncio.create_task(self._abort_on_disconnect(receive))
        finished = False
        try:
            self._engine.submit(self._task, self._stream)
            first = await self._stream.next_delta()
            if first.finish == "error":
                error = ApiError(500, _ENGINE_FAILED, code="engine_failed")
                await error_response(error)(scope, receive, send)
            elif self._events:
                await self._send_events(first, send)
            else:
                await self._send_whole(first, send)
            finished = True
        except GenerationAbortedError:
            log.info("request %s: the client has gone", self._task.request_id)
        finally:
            self._open.count -= 1
            watcher.cancel()
            if not finished:
                self._stream.count_outcome("aborted")
                self._engine.cancel(self._task.request_id)

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.abort()

    async def _send_whole(self, first: Delta, send: Send) -> None:
        texts, token_ids = [first.text], [*first.token_ids]
        finish = first.finish
        while finish is None:
            delta = await self._stream.next_delta()
            texts.append(delta.text)
            token_ids += delta.token_ids
            finish = delta.finish
        if finish == "error":
            body = error_body(ApiError(500, _ENGINE_FAILED, code="engine_failed"))
            await _send_json(500, body, send)
            return
        body = self._shape.whole("".join(texts), token_ids, finish, usage_of(self._stream))
        await _send_json(200, body, send)

    async def _send_events(self, first: Delta, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = self._shape.opening()
        if opening is not None:
            await _send_part(server_event(opening), send)
        delta = first
        while delta.finish is None:
            await self._send_delta(delta, send)
            delta = await self._stream.next_delta()
        await _send_part(self._ending(delta, delta.finish), send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_delta(self, delta: Delta, send: Send) -> None:
        """Send what there is to see: text, or tokens without any yet where they were asked for."""
        if delta.text or (delta.token_ids and self._shape.shows_tokens):
            await _send_part(server_event(self._shape.part(delta.text, delta.token_ids)), send)

    def _ending(self, delta: Delta, finish: FinishReason) -> bytes:
        if finish == "error":
            # No [DONE]: a cut text must not look like a whole one.
            return server_event(error_body(ApiError(500, _ENGINE_FAILED, code="engine_failed")))
        if self._shape.shows_tokens:
            ending = server_event(self._shape.last_part(delta.text, delta.token_ids, finish))
        else:
            ending = server_event(self._shape.part(delta.text, ())) if delta.text else b""
            ending += server_event(self._shape.closing(finish))
        if self._include_usage:
            ending += server_event(self._shape.usage_chunk(usage_of(self._stream)))
        return ending + DONE_EVENT


async def _send_json(status: int, body: object, send: Send) -> None:
    data = msgspec.json.encode(body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def _send_part(data: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
