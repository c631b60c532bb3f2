"""A relay before an engine, which breaks the connection off when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

_TOKENS = b'"token_ids"'


@dataclass
class BreakingWire:
    """Listens on a free port. A break takes one connection, and the engine sees its client go."""

    engine_port: int
    breaks: list[int] = field(default_factory=list)
    """Break off behind the event that has so many with tokens before it; each number is for one answer."""
    port: int = 0
    _server: asyncio.Server | None = None
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> BreakingWire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Take no more, and end what is open: a connection that outlives its loop is a leak."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0)  # transports that were aborted close in the loop's next turn

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._relay(reader, writer)
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", self.engine_port)
        except OSError:
            return
        answer = bytearray()
        up = asyncio.ensure_future(_pump(reader, engine_writer, answer))
        try:
            with contextlib.suppress(OSError):
                await self._pass_on(engine_reader, writer, answer)
        finally:
            up.cancel()
            engine_writer.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray
    ) -> None:
        while data := await reader.read(65_536):
            seen += data
            place = _end_of_event(seen, self.breaks[0]) if self.breaks else None
            if place is not None:
                self.breaks.pop(0)
                writer.write(data[: max(0, place - (len(seen) - len(data)))])
                await writer.drain()
                # What is written is sent before the connection ends; an abort would throw it away.
                writer.close()
                return
            writer.write(data)
            await writer.drain()


def _end_of_event(data: bytearray, count: int) -> int | None:
    """Where the event with tokens of this number ends; 0: the head of the answer."""
    if count == 0:
        head = data.find(b"\r\n\r\n")
        return head + 4 if head >= 0 else None
    place = 0
    for _ in range(count):
        place = data.find(_TOKENS, place) + len(_TOKENS)
        if place < len(_TOKENS):
            return None
    end = data.find(b"\n\n", place)
    return end + 4 if end >= 0 else None  # and the chunk's own end


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytearray) -> None:
    """Pass requests on; with each begins another answer."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            answer.clear()
            writer.write(data)
            await writer.drain()
        writer.write_eof()
