"""What a device's holder and the replicas say to one another: one packet a message, descriptors beside it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

MOST_DESCRIPTORS = 64
"""In one packet; the kernel takes 253."""
_LARGEST_PACKET_BYTES = 64 * 1024


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Hand over memory for extents that the pool's table says are lent to the asking process."""

    pool_id: str
    extents: tuple[int, ...]


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
    """Wipe and free extents of the asking process."""

    pool_id: str
    extents: tuple[int, ...]


class OpenWeights(msgspec.Struct, frozen=True, tag="open_weights"):
    """Use weights of a name from now on; answered when they are there, or to be filled by the asker."""

    name: str
    size_bytes: int


class SealWeights(msgspec.Struct, frozen=True, tag="seal_weights"):
    """The asker has filled the weights and cannot write them any more."""

    name: str
    checksum: str


class RejectWeights(msgspec.Struct, frozen=True, tag="reject_weights"):
    """What is held under the name is not what was sealed: hand it to nobody else."""

    name: str


class AskStatus(msgspec.Struct, frozen=True, tag="ask_status"):
    """Say what is held."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First packet of a holder on each connection."""

    accelerator: str
    kind: str
    page_bytes: int
    device_uuid: str
    pid: int


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """Descriptors of the extents come along, in their order."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done."""


class Weights(msgspec.Struct, frozen=True, tag="weights"):
    """A descriptor comes along: to be filled, or of whole weights with this checksum."""

    state: Literal["fill", "ready"]
    size_bytes: int
    checksum: str = ""


class HeldWeights(msgspec.Struct, frozen=True):
    """One copy, for people."""

    name: str
    size_bytes: int
    state: Literal["fill", "ready"]
    users: int


class Status(msgspec.Struct, frozen=True, tag="status"):
    """What a holder holds."""

    lent_extents: int
    lent_bytes: int
    connections: int
    weights: tuple[HeldWeights, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It cannot be done; `errno` is as of `OSError`."""

    reason: str
    errno: int


Request = Lend | GiveBack | OpenWeights | SealWeights | RejectWeights | AskStatus
Answer = Hello | Lent | Done | Weights | Status | Refused

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)
_Message = TypeVar("_Message")


class WireError(OSError):
    """The other end said something that cannot be understood."""


def send(channel: socket.socket, message: Request | Answer, descriptors: Sequence[int] = ()) -> None:
    """Send one packet. Raises `OSError`."""
    content = _encoder.encode(message)
    if descriptors:
        socket.send_fds(channel, [content], list(descriptors))
    else:
        channel.sendall(content)


def receive_request(channel: socket.socket) -> Request | None:
    """Return the next request, or `None` at the end. Raises `OSError`."""
    content, descriptors = _receive(channel, 0)
    close_all(descriptors)
    return _decoded(_requests, content) if content else None


def receive_answer(channel: socket.socket) -> tuple[Answer, list[int]]:
    """Return an answer and its descriptors, which are the caller's. Raises `OSError`."""
    content, descriptors = _receive(channel, MOST_DESCRIPTORS)
    try:
        if not content:
            raise ConnectionResetError("the holder has ended")
        return _decoded(_answers, content), descriptors
    except OSError:
        close_all(descriptors)
        raise


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a path for a socket that is short enough, however deep its folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _receive(channel: socket.socket, most: int) -> tuple[bytes, list[int]]:
    content, descriptors, _flags, _address = socket.recv_fds(
        channel, _LARGEST_PACKET_BYTES, most, socket.MSG_CMSG_CLOEXEC
    )
    return content, descriptors


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], content: bytes) -> _Message:
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as error:
        raise WireError(f"not understood: {error}") from error
