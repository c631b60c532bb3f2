"""A publisher of KV events that numbers, keeps and sends again what it published, as engines' own do."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Any

import msgspec
import zmq

from workers.engines.base import KvEventSource

TOPIC = "kv-events"
END = (-1).to_bytes(8, "big", signed=True)


def stored(
    names: list[int], tokens: list[int], *, parent: int | None = None, medium: str = "GPU", **more: Any
) -> dict[str, Any]:
    """Blocks that came in; their size follows from the tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(names),
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def removed(names: list[int], *, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


class KvPublisher:
    """Publishes on loopback. `hide` numbers a batch and sends it to nobody: a gap for who listens."""

    def __init__(self, *, kept: int = 10_000, answers: bool = True, rank: int = 0) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.XPUB)
        self._events.linger = 0
        self._again = self._context.socket(zmq.ROUTER)
        self._again.linger = 0
        port = self._events.bind_to_random_port("tcp://127.0.0.1")
        replay_port = self._again.bind_to_random_port("tcp://127.0.0.1")
        self.source = KvEventSource(rank, port, replay_port, TOPIC)
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.number = 0
        self.clock = 1000.0
        self.asked: list[int] = []
        self._answers = answers
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._send_again, daemon=True)

    def __enter__(self) -> KvPublisher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._events.close()
        self._again.close()
        self._context.term()

    def wait_for_listener(self) -> None:
        """Return once somebody has subscribed."""
        assert self._events.poll(10_000), "nobody subscribed"
        assert self._events.recv() == b"\x01" + TOPIC.encode()

    def publish(self, *events: Any, payload: bytes | None = None) -> None:
        """Number, keep and send a batch."""
        number, data = self.hide(*events, payload=payload)
        self.send([TOPIC.encode(), number.to_bytes(8, "big"), data])

    def hide(self, *events: Any, payload: bytes | None = None) -> tuple[int, bytes]:
        """Number and keep a batch, and send it to nobody."""
        self.clock += 1.0
        data = msgspec.msgpack.encode([self.clock, list(events), 0]) if payload is None else payload
        with self._lock:
            number, self.number = self.number, self.number + 1
            self.buffer.append((number, data))
        return number, data

    def send(self, frames: list[bytes]) -> None:
        """Send any frames at all."""
        self._events.send_multipart(frames)

    def forget(self) -> None:
        """Keep nothing of what was published."""
        with self._lock:
            self.buffer.clear()

    def begin_anew(self) -> None:
        """As a publisher that was started again: numbers from 0."""
        with self._lock:
            self.number = 0
            self.buffer.clear()

    def _send_again(self) -> None:
        while not self._stopping.is_set():
            if not self._again.poll(20):
                continue
            client, _, first = self._again.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if not self._answers:
                continue
            with self._lock:
                kept = list(self.buffer)
            for number, data in kept:
                if number >= self.asked[-1]:
                    frames = [client, b"", TOPIC.encode(), number.to_bytes(8, "big"), data]
                    self._again.send_multipart(frames)
            self._again.send_multipart([client, b"", b"", END, b""])
