"""Asking a vendor's command-line tool, which may be missing, complain, hang, or hang unkillably."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_DEFAULT_SECONDS = 15.0
_KILL_SECONDS = 1.0
_MOST_CHARACTERS = 16 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the tool wrote. With a `problem` the text may still hold what it could read."""

    text: str = ""
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether the tool ended well."""
        return not self.problem


class VendorTool:
    """One tool, found on PATH at each question. Not for several threads at once.

    A driver that hangs leaves the tool in a sleep that even SIGKILL does not end. Such a process is
    neither waited for nor joined by another: until it is gone, the tool counts as not answering.
    """

    def __init__(self, name: str, *, timeout_seconds: float = _DEFAULT_SECONDS) -> None:
        self.name = name
        self._timeout_seconds = timeout_seconds
        self._stuck: subprocess.Popen[str] | None = None

    @property
    def present(self) -> bool:
        """Whether there is such a program."""
        return shutil.which(self.name) is not None

    def ask(self, *arguments: str, say: str = "", env: Mapping[str, str] | None = None) -> Answer:
        """Run it once, with `say` as its input. Never raises; what went wrong is in the answer."""
        program = shutil.which(self.name)
        if program is None:
            return Answer(problem=f"no {self.name} on this host")
        if self._stuck is not None and self._stuck.poll() is None:
            return Answer(problem=f"{self.name} still hangs (pid {self._stuck.pid})")
        self._stuck = None
        try:
            child = subprocess.Popen(  # noqa: S603 - the vendor's tool, arguments of ours
                [program, *arguments],
                stdin=subprocess.PIPE if say else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                env=None if env is None else os.environ | dict(env),
            )
        except OSError as error:
            return self._failed(f"cannot be run: {error.strerror}")
        return self._collect(child, say)

    def _collect(self, child: subprocess.Popen[str], say: str) -> Answer:
        try:
            out, err = child.communicate(say or None, timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired:
            self._give_up(child)
            return self._failed(f"did not answer within {self._timeout_seconds:g} s")
        if child.returncode == 0:
            return Answer(out[:_MOST_CHARACTERS])
        said = (err.strip() or out.strip()).splitlines()
        reason = "".join(c for c in (said[-1] if said else "") if c.isprintable())[:200]
        return self._failed(f"ended with {child.returncode}: {reason}", out[:_MOST_CHARACTERS])

    def _give_up(self, child: subprocess.Popen[str]) -> None:
        child.kill()
        try:
            child.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._stuck = child
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()  # a grandchild may hold the other end open for ever

    def _failed(self, what: str, text: str = "") -> Answer:
        problem = f"{self.name} {what}"
        logger.warning("event=vendor_tool_failed %s", problem)
        return Answer(text, problem)
