"""Hears the KV events of the node's replicas and keeps what each of them has in its prefix cache.

Each rank of an engine numbers its messages. Who misses some asks its publisher to send them again, which
it does for the last ten thousand; where that does not help, the replica is taken to have nothing that was
cached until now. All of it is a hint for routing: what is wrong costs a prompt computed anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import zmq

from workers.engines.base import EngineSample, KvEventSource
from workers.engines.kv_events import MAX_BATCH_BYTES, DamagedEventsError, decode_batch
from workers.engines.kv_sight import KvSight

_POLL_MILLISECONDS = 200
_REPLAY_SECONDS = 1.0
"""To send one message again, and then for each further one."""
_LONGEST_REPLAY_SECONDS = 5.0
_WAITING_MESSAGES = 10_000
"""Kept by ZMQ for each rank while its replica's turn has not come; what is more shows as a gap."""
_MESSAGES_AT_ONCE = 500
"""Of one rank before the others have their turn."""
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_MESSAGE_FRAMES = 3

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Replica id and attempt."""


@dataclass(frozen=True, slots=True)
class KvTold:
    """What a replica's events have told so far."""

    evicted_until_seconds: float | None = None
    """What was used before (monotonic) may be gone; `None`: nothing had to go."""
    cached_tokens: int = 0
    batches: int = 0
    gaps: int = 0
    """Messages in a row that were missed and sent again."""
    lost: int = 0
    """Times that its knowledge was dropped: messages missed for good, or a publisher that began anew."""
    damaged: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """For people, where something was odd."""
        notes = []
        if self.lost:
            notes.append(f"KV events were lost {self.lost} times: its cache was taken for empty then")
        if self.damaged:
            notes.append(f"{self.damaged} damaged KV events")
        return tuple(notes)


class KvListener:
    """Listens to the replicas it is told to watch, in a thread of its own that begins with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[Key, tuple[KvEventSource, ...]] = {}
        self._told: dict[Key, KvTold] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, sources: Mapping[Key, tuple[KvEventSource, ...]]) -> None:
        """Listen to exactly these from now on: where each replica's ranks publish."""
        with self._lock:
            self._wanted = {key: found for key, found in sources.items() if found}
            self._told = {key: told for key, told in self._told.items() if key in self._wanted}
            if self._wanted and self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop listening; returns when all connections are closed."""
        self._stopping.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def told(self, key: Key) -> KvTold | None:
        """What one replica's events have told; `None` if none came yet."""
        with self._lock:
            return self._told.get(key)

    def complete(self, key: Key, sample: EngineSample, *, now: float) -> EngineSample:
        """Add to a sample what only events tell."""
        told = self.told(key)
        if told is None:
            return sample
        until = told.evicted_until_seconds
        return replace(
            sample,
            kv_evicted_idle_seconds=sample.kv_evicted_idle_seconds
            if until is None
            else max(0.0, now - until),
            kv_cached_tokens=told.cached_tokens,
            notes=(*sample.notes, *told.notes),
        )

    def _run(self) -> None:
        with zmq.Context(io_threads=1) as context:
            listening: dict[Key, _Replica] = {}
            try:
                while not self._stopping.is_set():
                    try:
                        self._round(context, listening)
                    except Exception:  # top of the loop: one odd engine must not end the others' news
                        logger.exception("listening to KV events failed")
                        self._stopping.wait(1.0)
            finally:
                for replica in listening.values():
                    replica.close()

    def _round(self, context: zmq.Context[Any], listening: dict[Key, _Replica]) -> None:
        self._follow(context, listening)
        poller = zmq.Poller()
        for replica in listening.values():
            for rank in replica.ranks:
                poller.register(rank.events, zmq.POLLIN)
        if listening:
            ready = {socket for socket, _ in poller.poll(_POLL_MILLISECONDS)}
        else:
            ready = set()
            self._stopping.wait(_POLL_MILLISECONDS / 1000)
        for key, replica in listening.items():
            if replica.hear(ready):
                with self._lock:
                    if key in self._wanted:
                        self._told[key] = replica.told()

    def _follow(self, context: zmq.Context[Any], listening: dict[Key, _Replica]) -> None:
        """Connect to those that are wanted, and let go of the others."""
        with self._lock:
            wanted = dict(self._wanted)
        for key in [key for key in listening if key not in wanted]:
            listening.pop(key).close()
        for key in wanted.keys() - listening.keys():
            listening[key] = _Replica(context, wanted[key])


class _Replica:
    """The connections to one replica's ranks, and what they have told."""

    def __init__(self, context: zmq.Context[Any], sources: Iterable[KvEventSource]) -> None:
        self.sight = KvSight()
        self.ranks = [_Rank(context, source, self.sight) for source in sources]

    def hear(self, ready: set[object]) -> bool:
        """Take in what has come. True if there was something."""
        speaking = [rank for rank in self.ranks if rank.events in ready or rank.is_new]
        for rank in speaking:
            rank.hear(time.monotonic())
        return bool(speaking)

    def told(self) -> KvTold:
        idle = self.sight.evicted_idle_seconds(now := time.monotonic())
        return KvTold(
            evicted_until_seconds=None if idle is None else now - idle,
            cached_tokens=self.sight.cached_tokens,
            batches=sum(rank.batches for rank in self.ranks),
            gaps=sum(rank.gaps for rank in self.ranks),
            lost=sum(rank.lost for rank in self.ranks),
            damaged=sum(rank.damaged for rank in self.ranks),
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class _Rank:
    """One publisher: its numbering, and what to do where it has a hole."""

    def __init__(self, context: zmq.Context[Any], source: KvEventSource, sight: KvSight) -> None:
        self._source = source
        self._sight = sight
        self._next: int | None = None
        self._latest_seconds = 0.0
        self.is_new = True
        self.batches = self.gaps = self.lost = self.damaged = 0
        self.events = _connect(context, zmq.SUB, source.port)
        self.events.subscribe(source.topic)
        self._replay = _connect(context, zmq.DEALER, source.replay_port)

    def close(self) -> None:
        self.events.close()
        self._replay.close()

    def hear(self, now: float) -> None:
        """Take in what has come; a rank that is new is asked for all that it still has."""
        if self.is_new:
            self.is_new = False
            self._ask_again(0, now)
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                frames = self.events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear_one(frames, now)

    def _hear_one(self, frames: list[bytes], now: float) -> None:
        if len(frames) != _MESSAGE_FRAMES or len(frames[1]) != _SEQUENCE_BYTES:
            self.damaged += 1
            return
        number = int.from_bytes(frames[1], "big")
        due = number if self._next is None else self._next
        if number > due:
            self.gaps += 1
            self._ask_again(due, now)
            if number > (self._next or 0):  # it does not have them any more
                self._lose(now)
                self._next = number
        self._take(number, frames[2], now)

    def _take(self, number: int, payload: bytes, now: float) -> None:
        """Take in a message that is due; one that came before is left alone."""
        try:
            batch = decode_batch(payload)
        except DamagedEventsError as error:
            self.damaged += 1
            logger.debug("event=kv_events_damaged rank=%d error=%s", self._source.rank, error)
            if (
                self._next is None or number >= self._next
            ):  # what it said is not known, and asking again brings the same bytes
                self._lose(now)
                self._next = number + 1
            return
        if self._next is not None and number < self._next:
            if batch.at_seconds <= self._latest_seconds:
                return
            self._lose(now)  # a later message with an older number: its publisher began anew
        self._next = number + 1
        self._latest_seconds = max(self._latest_seconds, batch.at_seconds)
        self.batches += 1
        self._sight.take(batch, rank=self._source.rank, now=now)

    def _lose(self, now: float) -> None:
        self.lost += 1
        self._latest_seconds = 0.0
        self._sight.drop(now)

    def _ask_again(self, first: int, now: float) -> None:
        """Have messages from `first` on sent again, and take in those that are due."""
        while self._replay.poll(0):  # left over from an answer that nobody waited for
            self._replay.recv_multipart()
        self._replay.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")])
        give_up_at = time.monotonic() + _LONGEST_REPLAY_SECONDS
        while time.monotonic() < give_up_at and self._replay.poll(int(_REPLAY_SECONDS * 1000)):
            *_, number, payload = [b"", *self._replay.recv_multipart()]
            if number == _END or len(number) != _SEQUENCE_BYTES:
                return
            self._take_again(int.from_bytes(number, "big"), payload, now)

    def _take_again(self, number: int, payload: bytes, now: float) -> None:
        """Take in what comes next. What a new listener gets first is where it begins."""
        if self._next is None or number == self._next:
            self._take(number, payload, now)


def _connect(context: zmq.Context[Any], kind: int, port: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = 0
    socket.rcvhwm = _WAITING_MESSAGES
    socket.maxmsgsize = 2 * MAX_BATCH_BYTES
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket
