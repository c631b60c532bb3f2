"""What the person at the terminal sees while the fleet starts and stops, and how they interrupt."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

POLL_SECONDS = 0.2
_NOTE_EVERY_SECONDS = 10.0
_SPINNER = "|/-\\"
_NAME_WIDTH = 26
_LINE_WIDTH = 79


class StartError(Exception):
    """The fleet cannot be started; the message says why and what to do."""


class InterruptedStartError(Exception):
    """Somebody asked to stop before the fleet was up."""


class Terminal:
    """Standard output, as far as it is still there."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_watched = stream.isatty()
        """A person sees it, so that a line may be redrawn."""

    def write(self, text: str) -> None:
        """Show text. A terminal that was closed must not keep the fleet from being stopped."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


class Interrupts:
    """Counts requests to stop: the first one means in order, the second one means now."""

    def __init__(self) -> None:
        self._count = 0

    def install(self) -> None:
        """Take over Ctrl-C, SIGTERM, and the end of the terminal."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._count_one)

    @property
    def requested(self) -> bool:
        """Whether the fleet should stop."""
        return self._count > 0

    @property
    def hurried(self) -> bool:
        """Whether it should stop without waiting for anybody."""
        return self._count > 1

    def _count_one(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1


class Stage:
    """One step of the start or the stop, with the time it takes."""

    def __init__(self, terminal: Terminal, name: str) -> None:
        self._terminal = terminal
        self._name = name
        self._began = time.monotonic()
        self._noted = self._began
        self._spinner = itertools.cycle(_SPINNER)
        self._shown = ""
        self.outcome = "ready"

    @property
    def elapsed_seconds(self) -> float:
        """Since the step began."""
        return time.monotonic() - self._began

    def wait(self, note: str) -> None:
        """Show what the step waits for: a moving line for a person, a line now and then for a log."""
        if self._terminal.is_watched:
            self._redraw(f"  {next(self._spinner)} {self._line(note)}"[:_LINE_WIDTH])
        elif time.monotonic() - self._noted >= _NOTE_EVERY_SECONDS:
            self._noted = time.monotonic()
            self._terminal.write(f"  . {self._line(note)}\n")

    def finish(self, sign: str) -> None:
        """Leave one line that says how it ended and how long it took."""
        if self._terminal.is_watched:
            self._redraw("")
        self._terminal.write(f"  {sign} {self._line(self.outcome)}\n")

    def _line(self, note: str) -> str:
        return f"{self._name:<{_NAME_WIDTH}} {self.elapsed_seconds:5.1f} s  {note}"

    def _redraw(self, text: str) -> None:
        self._terminal.write(f"\r{' ' * len(self._shown)}\r{text}")
        self._shown = text


class Console:
    """Prints the progress of the fleet."""

    def __init__(self, terminal: Terminal, interrupts: Interrupts) -> None:
        self._terminal = terminal
        self._interrupts = interrupts

    def say(self, text: str = "") -> None:
        """Print a line."""
        self._terminal.write(f"{text}\n")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Time a step and print its outcome, whether it succeeds or not."""
        stage = Stage(self._terminal, name)
        try:
            yield stage
        except InterruptedStartError:
            stage.outcome = "interrupted"
            stage.finish("-")
            raise
        except Exception:
            stage.outcome = "failed"
            stage.finish("x")
            raise
        stage.finish("+")

    def wait_until_done(
        self, stage: Stage, missing: Callable[[], str], *, limit_seconds: float, advice: str
    ) -> None:
        """Wait until `missing` returns nothing; else it says what is still awaited.

        Raises `InterruptedStartError`, or `StartError` with the advice when the limit is reached.
        """
        while note := missing():
            if self._interrupts.requested:
                raise InterruptedStartError
            if stage.elapsed_seconds > limit_seconds:
                raise StartError(f"after {limit_seconds:.0f} s still waiting: {note}. {advice}")
            stage.wait(note)
            time.sleep(POLL_SECONDS)
