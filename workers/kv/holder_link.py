"""A replica's connection to the holder of its accelerator."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from workers.kv.holder_wire import (
    Answer,
    Hello,
    Refused,
    Request,
    WireError,
    close_all,
    receive_answer,
    send,
    short_path,
)

ANSWER_SECONDS = 2.0
"""Answers come within milliseconds; a replica's step waits no longer for a holder that is stopped."""
_RETRY_SECONDS = 1.0
_Answer = TypeVar("_Answer", bound=Answer)


class HolderLink:
    """One connection, made anew when it breaks. For one thread at a time."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        greeting_seconds: float = ANSWER_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Connect and hear who answers. Raises `OSError`."""
        self._path = path
        self._clock = clock
        self._greeting_seconds = greeting_seconds
        self._answer_seconds = answer_seconds
        self._not_before = float("-inf")
        self._channel: socket.socket | None = None
        self.hello = self._connect()

    def ask(
        self, request: Request, kind: type[_Answer], *, seconds: float | None = None
    ) -> tuple[_Answer, list[int]]:
        """Ask and return the answer of this kind with its descriptors, which are the caller's.

        Raises `OSError`: with the holder's reason if it refuses, else because it cannot be reached; then
        nothing is tried for a second, so that a holder that is stopped does not hold up each step.
        """
        channel = self._channel or self._reconnect()
        try:
            channel.settimeout(self._answer_seconds if seconds is None else seconds)
            send(channel, request)
            answer, descriptors = receive_answer(channel)
        except OSError:
            self._break_off()
            raise
        if isinstance(answer, kind):
            return answer, descriptors
        close_all(descriptors)
        if isinstance(answer, Refused):
            raise OSError(answer.errno, answer.reason)
        self._break_off()
        raise WireError(f"the holder answered {type(answer).__name__}")

    def close(self) -> None:
        """Say by hanging up that nothing is used any more."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _break_off(self) -> None:
        self.close()
        self._not_before = self._clock() + _RETRY_SECONDS

    def _reconnect(self) -> socket.socket:
        if self._clock() < self._not_before:
            raise ConnectionRefusedError("the accelerator's holder did not answer a moment ago")
        try:
            hello = self._connect()
        except OSError:
            self._break_off()
            raise
        same = (hello.accelerator, hello.kind, hello.page_bytes, hello.device_uuid)
        if same != (self.hello.accelerator, self.hello.kind, self.hello.page_bytes, self.hello.device_uuid):
            self._break_off()
            raise WireError("the holder has another device now")
        if self._channel is None:
            raise ConnectionResetError("the holder has ended")
        return self._channel

    def _connect(self) -> Hello:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.settimeout(self._greeting_seconds)
            with short_path(self._path) as address:
                channel.connect(address)
            answer, descriptors = receive_answer(channel)
            close_all(descriptors)
            if not isinstance(answer, Hello):
                raise WireError(f"the holder answered {type(answer).__name__}")
        except OSError:
            channel.close()
            raise
        self._channel = channel
        return answer


def socket_of(folder: Path, accelerator: str) -> Path:
    """Where the holder of an accelerator listens, below the folder of the node's pools."""
    name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in accelerator)
    return folder / f"holder-{name}"


def is_holder_there(path: Path) -> bool:
    """Whether a holder answers at a path."""
    if not os.path.lexists(path):
        return False
    try:
        HolderLink(path).close()
    except OSError:
        return False
    return True
