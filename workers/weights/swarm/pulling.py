"""The taking end: a thread for each stripe pulls what is missing from one parent, and checks every piece.

A piece is hashed while its bytes arrive, and only what is whole and right is written and passed on. A
parent that is silent, breaks off, is busy, or sends what the manifest does not name is left for the next
one at once; closing its connection is what cancels the pieces that were asked of it.
"""

from __future__ import annotations

import enum
import hmac
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from blake3 import blake3

from workers.weights.swarm import passes, wire
from workers.weights.swarm.board import PieceBoard
from workers.weights.swarm.parents import ORIGIN, Parent, ParentChoice
from workers.weights.swarm.pieces import Piece, PieceRow, to_map
from workers.weights.swarm.port import Origin, PieceSink, RangeReader
from workers.weights.swarm.rates import SLICE_BYTES, RateCap, RateMeter

_OK, _BUSY = 200, 503
_RETRY_LOOK_SECONDS = 0.25
_MICRO = 1e6

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullLimits:
    """How long a parent is waited for, and how fast this node takes in."""

    connect_seconds: float = 3.0
    silent_seconds: float = 5.0
    """A parent that lives says so each second."""
    starved_seconds: float = 20.0
    """It lives and has had nothing new for so long: another may have."""
    origin_patience_seconds: float = 5.0
    """Without a parent for so long, a node that may turn to the origin does."""
    strikes: int = 2
    """Bad pieces from one parent before it is asked no more."""
    niceness: int = 0
    """Of its threads: what nobody waits for yields to what serves."""


class Stage(enum.Enum):
    """What a pull is doing."""

    WAITING = "waiting"
    """No parent may be asked now."""
    CONNECTING = "connecting"
    STARVED = "starved"
    """The parent lives and has nothing new."""
    FLOWING = "flowing"
    DONE = "done"
    FAILED = "failed"
    """This node cannot go on, such as for a full disk."""


@dataclass(slots=True)
class PullFacts:
    """One stripe as it goes now; written by its thread, read by others."""

    stripe: int
    stage: Stage = Stage.WAITING
    parent: str = ""
    why: str = ""
    meter: RateMeter = field(default_factory=RateMeter)
    starved_seconds: float = 0.0
    wire_seconds: float = 0.0
    check_seconds: float = 0.0
    disk_seconds: float = 0.0
    capped_seconds: float = 0.0
    since: float = 0.0
    """Monotonic time from which on this parent is pulled from."""
    starved: RateMeter = field(default_factory=RateMeter)
    """Microseconds in which the parent had nothing, over the last few seconds."""
    by_parent: Counter[str] = field(default_factory=Counter)
    """Verified bytes."""
    bad_pieces: int = 0

    @property
    def origin_bytes(self) -> int:
        """Verified bytes that came from the origin."""
        return self.by_parent[ORIGIN]

    @property
    def starved_ratio(self) -> float:
        """Share of the last few seconds in which the parent had nothing new."""
        return min(1.0, self.starved.rate() / _MICRO)

    def begin(self, parent: str) -> None:
        """Note that another parent is asked now."""
        self.stage = Stage.CONNECTING
        self.parent, self.since, self.starved = parent, time.monotonic(), RateMeter()

    def note_starved(self, seconds: float) -> None:
        """Count time in which the parent had nothing to send."""
        self.starved_seconds += seconds
        self.starved.add(int(seconds * _MICRO))

    def bottleneck(self) -> str:
        """Name what most of the time went into: `parent`, `network`, `check`, `disk` or `cap`."""
        times = {
            "parent": self.starved_seconds,
            "network": self.wire_seconds,
            "check": self.check_seconds,
            "disk": self.disk_seconds,
            "cap": self.capped_seconds,
        }
        return max(times, key=lambda name: times[name]) if any(times.values()) else ""


class BadPieceError(wire.WireError):
    """A piece that is not what the manifest says."""


class _StarvedError(wire.WireError):
    """The parent lives, and has had nothing for too long."""


class _BusyError(wire.WireError):
    """The parent has no stream free."""


class _RefusedError(wire.WireError):
    """The parent answers, and not with pieces: it may not have been told of the swarm yet."""


@dataclass(frozen=True, slots=True)
class Revision:
    """What a pull is about: the same for all stripes of a node."""

    node_id: str
    row: PieceRow
    board: PieceBoard
    sink: PieceSink
    keys: passes.KeyRing
    origin: Origin | None

    @property
    def name(self) -> str:
        """The manifest's name."""
        return self.row.name


class StripePull:
    """Pulls one stripe until it is whole, stopped, or cannot be written."""

    def __init__(
        self,
        revision: Revision,
        stripe: int,
        pieces: range,
        choice: ParentChoice,
        *,
        limits: PullLimits,
        caps: Sequence[RateCap],
    ) -> None:
        self.facts = PullFacts(stripe)
        self._revision = revision
        self._pieces = pieces
        self._choice = choice
        self._limits = limits
        self._caps = caps
        self._wake = threading.Event()
        self._stopped = False
        self._lock = threading.Lock()
        self._connection: wire.Connection | None = None
        self._current: Parent | None = None
        self._memory = memoryview(bytearray(revision.row.manifest.piece_bytes))
        self._thread = threading.Thread(target=self._run, name=f"stripe-{stripe}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def follow(self, parents: Sequence[Parent]) -> None:
        """Use these parents from now on; one that is not the first of them any more is left."""
        self._choice.set(parents)
        with self._lock:
            if self._current is not None and self._current != next(iter(parents), None):
                self._leave()
        self._wake.set()

    def stop(self, *, wait: bool = True) -> None:
        """End, within a moment."""
        self._stopped = True
        with self._lock:
            self._leave()
        self._wake.set()
        if wait and self._thread.is_alive():
            self._thread.join(10.0)

    @property
    def ended(self) -> bool:
        """Whether its thread is over."""
        return not self._thread.is_alive()

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.shut()

    # -- the loop --------------------------------------------------------------------------------
    def _run(self) -> None:
        if self._limits.niceness:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._limits.niceness)
        try:
            while not self._stopped and self._revision.board.missing(self._pieces):
                self._turn()
            if not self._stopped:
                self.facts.stage, self.facts.parent, self.facts.why = Stage.DONE, "", ""
        except OSError as error:
            # What comes from peers and origin was caught before: this node's own disk failed.
            self.facts.stage, self.facts.why = (
                Stage.FAILED,
                f"pieces cannot be kept: {error.strerror or error}",
            )
            logger.error("event=pieces_not_kept revision=%s error=%s", self._revision.name, error)  # noqa: TRY400
        except Exception:  # top of the thread
            self.facts.stage, self.facts.why = Stage.FAILED, "an unforeseen error; the agent's log has it"
            logger.exception("event=stripe_failed revision=%s", self._revision.name)

    def _turn(self) -> None:
        """Take from one parent for as long as that goes well."""
        self._wake.clear()
        parent = self._choice.next()
        if parent is None:
            self.facts.stage, self.facts.parent = Stage.WAITING, ""
            self._wake.wait(_RETRY_LOOK_SECONDS)
            return
        self.facts.begin(parent.node_id)
        with self._lock:
            self._current = parent
        try:
            if parent.node_id == ORIGIN:
                self._pull_from_origin(parent)
            else:
                self._pull_from_peer(parent)
        except _BusyError as error:
            self.facts.why = f"{parent.node_id}: {error}"
            self._choice.busy(parent)
        except _RefusedError as error:
            self._note_failure(parent, str(error), refused=True)
        except BadPieceError as error:
            self.facts.bad_pieces += 1
            struck = self._choice.bad_piece(parent)
            self.facts.why = f"{parent.node_id}: {error}"
            logger.warning("event=bad_piece parent=%s struck=%s error=%s", parent.node_id, struck, error)
        except (wire.WireError, passes.NotAllowedError) as error:
            self._note_failure(parent, str(error))
        finally:
            with self._lock:
                self._current = self._connection = None

    def _note_failure(self, parent: Parent, why: str, *, refused: bool = False) -> None:
        if self._stopped or self._wake.is_set():
            return  # it was left on purpose
        self.facts.why = f"{parent.node_id}: {why}"
        self._choice.failed(parent, why, refused=refused)
        logger.info("event=parent_left parent=%s why=%s", parent.node_id, why)

    # -- a peer ----------------------------------------------------------------------------------
    def _pull_from_peer(self, parent: Parent) -> None:
        connection = self._connect(parent)
        try:
            while missing := self._revision.board.missing(self._pieces):
                self._ask(connection, parent, missing)
                self._take_frames(connection, parent)
                if self._stopped or self._wake.is_set():
                    return
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def _connect(self, parent: Parent) -> wire.Connection:
        try:
            sock = socket.create_connection((parent.host, parent.port), self._limits.connect_seconds)
        except OSError as error:
            raise wire.PeerGoneError(f"cannot connect to {parent.host}:{parent.port}: {error}") from error
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.set_timeouts(sock, self._limits.silent_seconds)
        connection = wire.Connection(sock)
        with self._lock:
            self._connection = connection
            if self._stopped:
                connection.shut()
        return connection

    def _ask(self, connection: wire.Connection, parent: Parent, missing: list[int]) -> None:
        path, body = wire.path_of(self._revision.name), to_map(missing, self._revision.row.map_bytes)
        asked = passes.Asked("POST", path, body)
        signature = self._revision.keys.sign(asked, child=self._revision.node_id, parent=parent.node_id)
        host = f"[{parent.host}]" if ":" in parent.host else parent.host
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{parent.port}\r\nAuthorization: {signature}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.send(head.encode() + body)
        answer = connection.read_response()
        if answer.status == _BUSY:
            raise _BusyError("all of its streams are taken")
        if answer.status != _OK:
            raise _RefusedError(
                f"it answers {answer.status}: it is not in this swarm, or takes us for none of it"
            )

    def _take_frames(self, connection: wire.Connection, parent: Parent) -> None:
        facts, last_piece_at = self.facts, time.monotonic()
        while True:
            began = time.monotonic()
            size = connection.read_chunk_size()
            if size == 0:
                connection.read_chunk_end()
                return
            index = wire.INDEX.unpack(connection.read_exactly(wire.INDEX.size))[0]
            now = time.monotonic()
            facts.note_starved(now - began)
            if index == wire.IDLE:
                facts.stage = Stage.STARVED
                if now - last_piece_at > self._limits.starved_seconds:
                    raise _StarvedError(f"it had nothing new for {now - last_piece_at:.0f} s")
            else:
                self._take_piece(connection, parent, index, size - wire.INDEX.size)
                last_piece_at = time.monotonic()
                if self._choice.prefers_another(parent):
                    self._wake.set()
                    return
            connection.read_chunk_end()

    def _take_piece(self, connection: wire.Connection, parent: Parent, index: int, length: int) -> None:
        if index not in self._pieces:
            raise BadPieceError(f"it sent piece {index}, which nobody asked it for")
        piece = self._revision.row.piece(index)
        if piece.length != length:
            raise BadPieceError(f"its piece {index} of {piece.path} has {length} bytes, not {piece.length}")
        self.facts.stage = Stage.FLOWING
        self._take(connection, piece)
        self._note_good(parent, piece)

    # -- the origin ------------------------------------------------------------------------------
    def _pull_from_origin(self, parent: Parent) -> None:
        if self._revision.origin is None:
            raise wire.WireError("this node was told no origin")
        for run in _runs(self._revision.board.missing(self._pieces), self._revision.row):
            first, last = run[0], run[-1]
            length = last.offset + last.length - first.offset
            try:
                with _from_origin(self._revision.origin, first, length) as source:
                    for piece in run:
                        if self._stopped or self._wake.is_set():
                            return
                        self.facts.stage = Stage.FLOWING
                        self._take(source, piece)
                        self._note_good(parent, piece)
            except _OriginError as error:
                raise wire.WireError(str(error)) from error

    def _note_good(self, parent: Parent, piece: Piece) -> None:
        self.facts.by_parent[parent.node_id] += piece.length
        self._choice.went_well(parent)

    # -- any -------------------------------------------------------------------------------------
    def _take(self, source: wire.Connection | _FromOrigin, piece: Piece) -> None:
        """Read, check, write and announce one piece. Raises `BadPieceError`, `WireError`, `OSError`."""
        facts, memory, hasher = self.facts, self._memory[: piece.length], blake3()
        for start in range(0, piece.length, SLICE_BYTES):
            part = memory[start : start + SLICE_BYTES]
            facts.capped_seconds += sum(cap.take(len(part)) for cap in self._caps)
            began = time.monotonic()
            source.read_into(part)
            arrived = time.monotonic()
            hasher.update(part)
            facts.wire_seconds += arrived - began
            facts.check_seconds += time.monotonic() - arrived
            facts.meter.add(len(part))
        if not hmac.compare_digest(hasher.digest(), piece.digest):
            raise BadPieceError(f"piece {piece.index} of {piece.path} is damaged")
        began = time.monotonic()
        if not self._revision.board.has(piece.index):
            self._revision.sink.write(piece, memory)
            self._revision.board.add(piece.index)
        facts.disk_seconds += time.monotonic() - began


class _OriginError(Exception):
    """The origin failed."""


@contextmanager
def _from_origin(origin: Origin, first: Piece, length: int) -> Iterator[_FromOrigin]:
    try:
        opened = origin.open_range(first.path, first.offset, length)
        reader = opened.__enter__()
    except OSError as error:
        raise _OriginError(f"the origin does not give {first.path}: {error}") from error
    try:
        yield _FromOrigin(reader)
    finally:
        with suppress(OSError):
            opened.__exit__(None, None, None)


class _FromOrigin:
    """An origin's bytes, so that its errors are told from those of this node's disk."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader

    def read_into(self, memory: memoryview) -> None:
        try:
            self._reader.read_into(memory)
        except OSError as error:
            raise _OriginError(f"the origin broke off: {error}") from error


def _runs(indices: Sequence[int], row: PieceRow) -> Iterator[list[Piece]]:
    """Pieces that follow one another in one file, so that one request of the origin brings them all."""
    run: list[Piece] = []
    for piece in map(row.piece, indices):
        if run and (run[-1].index + 1, run[-1].path) != (piece.index, piece.path):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
