"""All stages of a replica as one of them sees them: who is there, what was told to all, and how it ends.

Stages live and die together. Each hears the first one, and the first one hears all: a closed connection is
noticed at once, a stage that stands still by its silence. Whoever notices tells the others why, so that each
can say so.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from workers.engines.torch_engine.settings import StageSettings
from workers.engines.torch_engine.stage_link import (
    Beat,
    Bye,
    Link,
    Place,
    Put,
    StageLostError,
    connect,
    greet,
)

log = logging.getLogger(__name__)

_MOST_ENTRIES = 4096
_MOST_STRANGERS = 8
"""Connections that are heard out at once before they have proved anything."""
_BACKLOG = 16
_BEATS_IN_SILENCE = 8
_ACCEPT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the stages are no longer together."""

    reason: str
    is_failure: bool = True


class Company:
    """The stages, and a board that all of them read. Any thread may call this."""

    def __init__(self, settings: StageSettings) -> None:
        """Begin alone."""
        self._settings = settings
        self._links: dict[int, Link] = {}
        self._board: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._ending: Ending | None = None
        self._watchers: list[Callable[[Ending], None]] = []

    @property
    def ending(self) -> Ending | None:
        """Why it is over; `None` while it is not."""
        return self._ending

    @property
    def is_complete(self) -> bool:
        """Whether the first stage has all others."""
        return len(self._links) == self._settings.count - 1

    def has(self, number: int) -> bool:
        """Whether another stage is here."""
        return number in self._links

    def add(self, number: int, link: Link) -> None:
        """Take another stage in, and tell it what all know. Raises `StageLostError`, `OSError`."""
        with self._changed:
            if self._ending is not None:
                raise StageLostError(self._ending.reason)
            if number in self._links:
                raise StageLostError(f"stage {number} is here already")
            for key, value in self._board.items():
                link.send(Put(key, value))
            link.settle()
            self._links[number] = link
            self._changed.notify_all()
        _start(f"stage-{number}", lambda: self._listen(number, link))

    def keep_alive(self) -> None:
        """Begin to give signs of life, and to miss those of others."""
        _start("stage-beats", self._beat)

    def wait_for_all(self, *, seconds: float) -> None:
        """Wait until the other stages have come. Raises `StageLostError`, naming those that have not."""
        expected = range(1, self._settings.count)
        with self._changed:
            self._changed.wait_for(lambda: self._ending is not None or self.is_complete, seconds)
            self._raise_if_over()
            missing = [str(number) for number in expected if number not in self._links]
        if missing:
            raise StageLostError(f"stage {', '.join(missing)} did not come within {seconds:g} s")

    def put(self, key: str, value: bytes) -> None:
        """Tell all stages something."""
        self._note(key, value, told_by=None)

    def get(self, key: str, *, seconds: float) -> bytes:
        """Wait for something to be told. Raises `StageLostError`."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._ending is not None or key in self._board, seconds)
            self._raise_if_over()
            if not found:
                raise StageLostError(f"nobody told {key} within {seconds:g} s")
            return self._board[key]

    def wait_for_end(self, *, seconds: float) -> Ending | None:
        """Wait for at most so long until it is over; returns why, or `None`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending is not None, seconds)
            return self._ending

    def watch(self, on_end: Callable[[Ending], None]) -> None:
        """Have `on_end` called when it is over, by any thread; at once if it is."""
        with self._changed:
            ending = self._ending
            if ending is None:
                self._watchers.append(on_end)
        if ending is not None:
            on_end(ending)

    def leave(self, reason: str, *, is_failure: bool) -> None:
        """End it for all stages; `reason` is said of this one."""
        self._end(Ending(f"stage {self._settings.number}: {reason}", is_failure))

    def _raise_if_over(self) -> None:
        if self._ending is not None:
            raise StageLostError(self._ending.reason)

    def _listen(self, number: int, link: Link) -> None:
        who = f"stage {number} ({link.address})"
        try:
            while self._ending is None:
                match link.receive():
                    case Put(key, value):
                        self._note(key, value, told_by=number)
                    case Bye(reason, is_failure):
                        # A stage that goes in order takes its layers along all the same.
                        self._end(Ending(reason, is_failure or self._settings.number == 0))
                    case _:
                        pass  # a beat: that it came is all that it says
        except (OSError, StageLostError) as error:
            self._end(Ending(f"{who} went away: {error}"))

    def _note(self, key: str, value: bytes, *, told_by: int | None) -> None:
        with self._changed:
            if len(self._board) >= _MOST_ENTRIES:
                raise StageLostError(f"more than {_MOST_ENTRIES} things were told")
            self._board[key] = value
            self._changed.notify_all()
            others = [link for number, link in self._links.items() if number != told_by]
            for link in others:
                with suppress(OSError):  # who listens to it notices
                    link.send(Put(key, value))

    def _beat(self) -> None:
        silence = self._settings.silence_seconds
        pause = silence / _BEATS_IN_SILENCE
        looked_at = time.monotonic()
        while self._ending is None:
            with self._changed:
                self._changed.wait_for(lambda: self._ending is not None, pause)
                links = list(self._links.items())
            now = time.monotonic()
            # Who stood still for so long has itself heard nobody.
            stood_still = now - looked_at > silence / 2
            looked_at = now
            for number, link in links:
                if stood_still:
                    link.heard_at = max(link.heard_at, now - silence / 2)
                elif now - link.heard_at > silence:
                    said = f"stage {number} ({link.address}) has given no sign of life for {silence:g} s"
                    self._end(Ending(said))
                with suppress(OSError):
                    link.send(Beat())

    def _end(self, ending: Ending) -> None:
        with self._changed:
            if self._ending is not None:
                return
            self._ending = ending
            links, watchers = list(self._links.values()), list(self._watchers)
            self._changed.notify_all()
        for link in links:
            with suppress(OSError):
                link.send(Bye(ending.reason, ending.is_failure))
            link.close()
        for on_end in watchers:
            on_end(ending)


def open_company(settings: StageSettings) -> Company:
    """Listen for the other stages, or come to the first one. Raises `StageLostError`, `OSError`."""
    company = Company(settings)
    if settings.number == 0:
        listener = socket.create_server(settings.rendezvous, backlog=_BACKLOG)
        _start("stage-door", lambda: _Door(listener, company, settings).run())
    else:
        place = Place(settings.number, settings.count)
        link = connect(settings.rendezvous, settings.host, settings.key, place, seconds=settings.join_seconds)
        company.add(0, link)
    company.keep_alive()
    return company


class _Door:
    """Lets the other stages in until all are there."""

    def __init__(self, listener: socket.socket, company: Company, settings: StageSettings) -> None:
        self._listener = listener
        self._company = company
        self._settings = settings
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)

    def run(self) -> None:
        self._listener.settimeout(_ACCEPT_SECONDS)
        with self._listener:
            while not self._company.is_complete and self._company.ending is None:
                if not self._strangers.acquire(timeout=_ACCEPT_SECONDS):
                    continue  # who comes waits in the backlog, and this still sees when all are there
                try:
                    connection, _ = self._listener.accept()
                except (TimeoutError, ConnectionError):
                    self._strangers.release()
                    continue
                _start("stage-stranger", partial(self._hear, connection))

    def _hear(self, connection: socket.socket) -> None:
        try:
            link = Link(connection, handshake_seconds=self._settings.handshake_seconds)
        except OSError:
            connection.close()
            self._strangers.release()
            return
        try:
            place = greet(link, self._settings.key, self._settings.count, is_here=self._company.has)
            self._company.add(place.number, link)
            log.info("%s came from %s", place, link.address)
        except (OSError, StageLostError) as error:
            log.warning("a connection from %s was refused: %s", link.address, error)
            with suppress(OSError):
                link.send(Bye(str(error), is_failure=True))
            link.close()
        finally:
            self._strangers.release()


def _start(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()
