"""What stages tell one another beside tensors: that they live, where gloo meets them, why they end.

The first stage listens where all others come to. A connection counts once both sides have proved that they
know the key of this start of the replica; nothing that a stranger says is taken further than that. Nothing is
encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec

VERSION = 1
"""Of what stages tell one another, the layout of steps included."""
ANSWER_SECONDS = 45.0
"""How long another stage waits at the first one's door: a backlog of strangers may be heard out before."""
_CONNECT_SECONDS = 10.0
_NONCE_BYTES = 32
_MOST_FRAME_BYTES = 1 << 20
_SEND_SECONDS = 10
_RETRY_SECONDS = 0.2
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")


class StageLostError(RuntimeError):
    """The stages are not together, or no longer; the message says why."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The first stage's first word."""

    version: int
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """Another stage's answer."""

    number: int
    count: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first stage's own proof."""

    proof: bytes


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Something that all stages are to see."""

    key: str
    value: bytes


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life."""


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The last word."""

    reason: str
    is_failure: bool


Message = Challenge | Proof | Welcome | Put | Beat | Bye
_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True, slots=True)
class Place:
    """Which stage of how many."""

    number: int
    count: int

    def __str__(self) -> str:
        """For people."""
        return f"stage {self.number} of {self.count}"


class Link:
    """A connection to one other stage. `send` may be called by any thread, `receive` by one at a time."""

    def __init__(self, connection: socket.socket, *, handshake_seconds: float) -> None:
        """Take a connection over; until `settle`, all that is said on it together may take so long."""
        self._connection = connection
        self._handshake_ends: float | None = time.monotonic() + handshake_seconds
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = str(connection.getpeername()[0])
        self.heard_at = time.monotonic()

    def settle(self) -> None:
        """From now on wait for words as long as it takes; saying some stays bounded."""
        self._handshake_ends = None
        self._connection.settimeout(None)
        bound = _TIMEVAL.pack(_SEND_SECONDS, 0)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)

    def send(self, message: Message) -> None:
        """Say something. Raises `OSError`."""
        body = msgspec.msgpack.encode(message)
        with self._sending:
            self._bound()
            self._connection.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Message:
        """Wait for what the other says. Raises `OSError`, `StageLostError` for what makes no sense."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MOST_FRAME_BYTES:
            raise StageLostError(f"a message of {length} bytes")
        try:
            message: Message = _decoder.decode(self._exactly(length))
        except msgspec.MsgspecError as error:
            raise StageLostError(f"a message that nobody understands: {error}") from error
        self.heard_at = time.monotonic()
        return message

    def close(self) -> None:
        """End the connection, and whoever waits for words of it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self._bound()
            part = self._connection.recv(count - len(parts))
            if not part:
                raise ConnectionResetError("the connection was closed")
            parts += part
        return bytes(parts)

    def _bound(self) -> None:
        """Have the next call end with the handshake. A limit for each call is none for who drips bytes."""
        if self._handshake_ends is None:
            return
        left = self._handshake_ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        self._connection.settimeout(left)


def greet(link: Link, key: bytes, count: int, *, is_here: Callable[[int], bool]) -> Place:
    """As the first stage, find out who came, and prove to be it. Raises `StageLostError`, `OSError`."""
    challenge = Challenge(VERSION, secrets.token_bytes(_NONCE_BYTES))
    link.send(challenge)
    told = link.receive()
    if not isinstance(told, Proof):
        raise StageLostError(f"no proof but a {type(told).__name__}")
    place = Place(told.number, told.count)
    nonces = challenge.nonce + told.nonce
    if not hmac.compare_digest(told.proof, _proof(key, "stage", place, nonces)):
        raise StageLostError("no proof that it belongs to this start of the replica")
    if place.count != count or not 0 < place.number < count:
        raise StageLostError(f"it is {place}, and this is stage 0 of {count}")
    if is_here(place.number):
        raise StageLostError(f"stage {place.number} is here already")
    link.send(Welcome(_proof(key, "head", place, nonces)))
    return place


def introduce(link: Link, key: bytes, place: Place) -> None:
    """As another stage, prove to be it, and that the other side is the first. As above."""
    challenge = link.receive()
    if not isinstance(challenge, Challenge) or len(challenge.nonce) != _NONCE_BYTES:
        raise StageLostError("what answers is no first stage")
    if challenge.version != VERSION:
        text = f"it speaks version {challenge.version} of what stages say, and this is {VERSION}"
        raise StageLostError(f"{text}: have the same agent on all nodes")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = challenge.nonce + nonce
    link.send(Proof(place.number, place.count, nonce, _proof(key, "stage", place, nonces)))
    answer = link.receive()
    if isinstance(answer, Bye):
        raise StageLostError(answer.reason)
    if not isinstance(answer, Welcome) or not hmac.compare_digest(
        answer.proof, _proof(key, "head", place, nonces)
    ):
        raise StageLostError("what answers as the first stage does not know the key of this replica")


def connect(
    address: tuple[str, int],
    host: str,
    key: bytes,
    place: Place,
    *,
    seconds: float,
    answer_seconds: float = ANSWER_SECONDS,
) -> Link:
    """Come to the first stage from `host`, trying again while nobody answers. Raises `StageLostError`."""
    deadline = time.monotonic() + seconds
    where = f"{address[0]} port {address[1]}"
    while True:
        patience = min(answer_seconds, max(deadline - time.monotonic(), _CONNECT_SECONDS))
        try:
            return _come(address, host, key, place, answer_seconds=patience)
        except StageLostError as error:
            raise StageLostError(f"stage 0 at {where}: {error}") from error
        except OSError as error:
            if time.monotonic() >= deadline:
                text = f"stage 0 did not answer at {where} for {seconds:g} s: {error}"
                raise StageLostError(text) from error
            time.sleep(_RETRY_SECONDS)


def _come(address: tuple[str, int], host: str, key: bytes, place: Place, *, answer_seconds: float) -> Link:
    connection = socket.create_connection(address, _CONNECT_SECONDS, source_address=(host, 0))
    with ExitStack() as undone:
        undone.callback(connection.close)
        link = Link(connection, handshake_seconds=answer_seconds)
        introduce(link, key, place)
        undone.pop_all()
    return link


def _proof(key: bytes, role: str, place: Place, nonces: bytes) -> bytes:
    said = f"stage link {VERSION} {role} {place.number} {place.count} ".encode() + nonces
    return hmac.digest(key, said, hashlib.sha256)
