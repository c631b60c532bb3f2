"""Puts engines to sleep and wakes them: one request at a time for each attempt, each in its own thread.

Moving weights between accelerator and host takes seconds, for which the reconcile loop must not wait. An
engine is put to sleep only once no look at its health is under way: some compute a token for that, and end
if their memory is to go meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import urllib3

from workers.agent.facts import RequestState
from workers.engines.base import EngineRequest

_OK = 200
_CONNECT_SECONDS = 2.0
_SHOWN_CHARACTERS = 200

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Replica id and attempt."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to an engine's control path."""

    host: str
    port: int
    api_key: str = field(repr=False)
    request: EngineRequest
    at_most_seconds: float

    def send(self) -> str:
        """Send it and wait; returns what went wrong, empty where nothing did."""
        timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=self.at_most_seconds)
        headers = {"Authorization": f"Bearer {self.api_key}"}
        body = self.request.body or None
        if body is not None:
            headers["Content-Type"] = "application/json"
        with urllib3.HTTPConnectionPool(self.host, self.port, timeout=timeout, retries=False) as pool:
            try:
                answer = pool.request(self.request.method, self.request.path, body=body, headers=headers)
            except urllib3.exceptions.TimeoutError:
                return f"no answer within {self.at_most_seconds:g} s"
            except urllib3.exceptions.HTTPError as error:
                return type(error).__name__
        if answer.status == _OK:
            return ""
        said = " ".join(answer.data.decode("utf-8", "replace").split())[:_SHOWN_CHARACTERS]
        return f"status {answer.status}: {said}" if said else f"status {answer.status}"


@dataclass(frozen=True, slots=True)
class SleepRequest:
    """What an engine was asked, and what came of it."""

    state: str
    """Which state of `engines.sleeping` it was asked for: `falling_asleep` or `waking`."""
    outcome: RequestState = RequestState.RUNNING
    error: str = ""
    done_at_seconds: float = 0.0


class SleepRequests:
    """Remembers for each attempt the request that was sent last; a new agent knows of none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Key, SleepRequest] = {}
        self._unsent: dict[Key, tuple[SleepRequest, EngineCall]] = {}

    def of(self, key: Key, state: str) -> SleepRequest | None:
        """The request for this state, if it was the last one that this agent sent."""
        with self._lock:
            found = self._known.get(key)
        return found if found is not None and found.state == state else None

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget attempts that are over."""
        kept = set(keys)
        with self._lock:
            self._known = {key: known for key, known in self._known.items() if key in kept}
            self._unsent = {key: unsent for key, unsent in self._unsent.items() if key in kept}

    def begin(self, key: Key, state: str, call: EngineCall) -> None:
        """Have it sent; `of` tells how it goes. What was asked before and has not ended is forgotten."""
        request = SleepRequest(state)
        with self._lock:
            self._known[key] = request
            self._unsent[key] = (request, call)

    def send_due(self, is_quiet: Callable[[Key], bool]) -> None:
        """Send what was begun, to those of whose health nobody asks."""
        with self._lock:
            due = {key: unsent for key, unsent in self._unsent.items() if is_quiet(key)}
            for key in due:
                del self._unsent[key]
        for key, (request, call) in due.items():
            self._start(key, request, call)

    def _start(self, key: Key, request: SleepRequest, call: EngineCall) -> None:
        thread = threading.Thread(
            target=self._send, args=(key, request, call), name=f"sleep-{key[0][:8]}", daemon=True
        )
        thread.start()

    def _send(self, key: Key, request: SleepRequest, call: EngineCall) -> None:
        error = call.send()
        outcome = RequestState.FAILED if error else RequestState.DONE
        logger.info("%s of %s: %s", request.state, key, error or "done")
        with self._lock:
            if self._known.get(key) is request:
                self._known[key] = replace(
                    request, outcome=outcome, error=error, done_at_seconds=time.monotonic()
                )
