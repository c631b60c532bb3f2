"""Asks every replica about once a second how it is, without ever waiting for a slow one."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import urllib3

from workers.agent import processes
from workers.agent.facts import Probe
from workers.agent.kv_listener import KvListener
from workers.agent.probing import Answer, Outcome, ProbeState, advance
from workers.engines.base import EngineAdapter, EngineSample, KvEventSource
from workers.engines.capacity_log import LoggedCapacity, read_capacity, with_capacity

WINDOW_SECONDS = 10.0
_READY_INTERVAL_SECONDS = 1.0
_STARTING_INTERVAL_SECONDS = 0.25
_CONNECT_SECONDS = 1.0
_READ_SECONDS = 2.0
_PATIENT_SECONDS = 8.0
"""For the counters of an engine whose health came late: do tokens flow nevertheless?"""
_WHOLE_SECONDS = 10.0
"""For all of an answer, which may come byte by byte, each of them in time."""
_MAX_PAGE_BYTES = 8 * 1024 * 1024
_PART_BYTES = 128 * 1024
_LOG_BYTES = 1024 * 1024
"""Of the start of a log; an engine says what it has room for before it is ready."""
_THREADS = 16
_OK = 200
_WEB_PAGE = "text/html"

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Replica id and attempt."""


@dataclass(frozen=True, slots=True)
class Target:
    """An attempt to probe."""

    key: Key
    host: str
    port: int
    adapter: EngineAdapter
    leader: processes.ProcessId
    label: processes.LaunchLabel
    api_key: str = field(repr=False)
    is_own: bool = True
    """False: the head that this attempt, elsewhere a member, follows. It gets no key, and is asked for its
    health alone."""
    kv_sources: tuple[KvEventSource, ...] = ()
    """Where its engine publishes which KV blocks come and go."""
    log_file: Path | None = None
    """Where its engine says how much KV it has room for."""
    asks_health: bool = True
    """False while it sleeps, and on the way there and back."""
    is_awaited: bool = False
    """It wakes: whoever waits for it wants to know at once."""
    was_ready_at_seconds: float | None = None
    """Set for an attempt that was ready before this agent started: it still is until shown not."""


@dataclass(slots=True)
class _Watched:
    target: Target
    pool: urllib3.HTTPConnectionPool
    state: ProbeState
    due_at: float = 0.0
    in_flight: bool = False
    health_in_flight: bool = False
    """What is under way is, or may be, a look at its health."""
    owned: bool = False
    logged: LoggedCapacity | None = None
    """Read once, with the first metrics; what an engine has room for does not change."""


class Scraper:
    """Probes the attempts it is told to watch; readers take an immutable state of each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[Key, _Watched] = {}
        self._wake = threading.Event()
        self._kv = KvListener()
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="probe")
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def start(self) -> None:
        """Start probing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop probing; returns when no probe is under way."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._kv.stop()
        self.watch(())

    def watch(self, targets: Iterable[Target]) -> None:
        """Probe exactly these from now on; what is known of those that stay is kept."""
        wanted = {target.key: target for target in targets}
        with self._lock:
            for key in self._watched.keys() - wanted.keys():
                self._watched.pop(key).pool.close()
            fresh = wanted.keys() - self._watched.keys()
            for key, target in wanted.items():
                if key in fresh:
                    self._watched[key] = _begin(target)
                else:
                    self._watched[key].target = target
        if fresh:
            self._wake.set()
        self._kv.watch({key: target.kv_sources for key, target in wanted.items()})

    def state(self, key: Key) -> ProbeState:
        """Return what is known of one attempt."""
        with self._lock:
            watched = self._watched.get(key)
            return ProbeState() if watched is None else watched.state

    def is_quiet(self, key: Key) -> bool:
        """Whether nobody asks for the health of an attempt, nor waits for an answer to that."""
        with self._lock:
            watched = self._watched.get(key)
            return watched is None or not (watched.target.asks_health or watched.health_in_flight)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for watched in self._due(time.monotonic()):
                self._pool.submit(self._probe, watched)
            self._wake.wait(_STARTING_INTERVAL_SECONDS / 2)
            self._wake.clear()

    def _due(self, now: float) -> list[_Watched]:
        with self._lock:
            due = [w for w in self._watched.values() if not w.in_flight and w.due_at <= now]
            for watched in due:
                watched.in_flight, watched.health_in_flight = True, watched.target.asks_health
                ready = watched.state.probe is Probe.READY and not watched.target.is_awaited
                pause = _READY_INTERVAL_SECONDS if ready else _STARTING_INTERVAL_SECONDS
                watched.due_at = now + pause
            return due

    def _probe(self, watched: _Watched) -> None:
        try:
            outcome = _ask(watched)
            now = time.monotonic()
            if outcome.sample is not None:
                sample = self._kv.complete(watched.target.key, outcome.sample, now=now)
                outcome = replace(outcome, sample=sample)
            with self._lock:
                watched.state = advance(watched.state, outcome, now=now, window_seconds=WINDOW_SECONDS)
        except Exception:  # top of a probe: one replica's odd answer must not end the others'
            logger.exception("probing %s failed", watched.target.key)
        finally:
            with self._lock:
                watched.in_flight = watched.health_in_flight = False


def _begin(target: Target) -> _Watched:
    pool = urllib3.HTTPConnectionPool(
        target.host,
        target.port,
        maxsize=1,
        timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
        retries=False,
        headers={"Authorization": f"Bearer {target.api_key}"} if target.is_own else {},
    )
    state = ProbeState()
    if target.was_ready_at_seconds is not None:
        state = ProbeState(probe=Probe.READY, ready_at_seconds=target.was_ready_at_seconds)
    return _Watched(target, pool, state)


def _ask(watched: _Watched) -> Outcome:
    """One round: is the port open and ours, is the engine ready, what do its metrics say."""
    if (stranger := _own(watched)) is not None:
        return stranger
    if watched.target.asks_health:
        return _ask_health(watched)
    sample, note = _scrape(watched)
    return Outcome(Answer.ASLEEP, sample=sample, note=note)


def _own(watched: _Watched) -> Outcome | None:
    """Make sure that the port is open and our engine's; else say what it is."""
    target = watched.target
    if not target.is_own:
        return None
    # Of a sleeper the port is all that tells whether it lives.
    looks = not watched.owned or not target.asks_health
    if looks and not processes.is_answered(target.host, target.port):
        watched.owned = False
        return Outcome(Answer.CLOSED)
    if not watched.owned:
        # Before anything is sent: a stranger on the port must get neither the token nor our trust.
        group = processes.members(target.leader, target.label)
        if not processes.listens(group, target.port):
            return Outcome(Answer.FOREIGN, f"port {target.port}")
        watched.owned = True
    return None


def _ask_health(watched: _Watched) -> Outcome:
    asked_at = time.monotonic()
    try:
        health = _get(watched.pool, watched.target.adapter.health_path)
    except urllib3.exceptions.HTTPError as error:
        return _failed(watched, error)
    if not health.is_whole:
        return Outcome(Answer.BROKEN, "the answer was cut off")
    if health.status != _OK:
        return Outcome(Answer.NOT_READY, _told(health.status, health.body))
    sample, note = _scrape(watched)
    return Outcome(Answer.READY, sample=sample, note=note, asked_at_seconds=asked_at)


def _failed(watched: _Watched, error: urllib3.exceptions.HTTPError) -> Outcome:
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        if not isinstance(error.__cause__, ConnectionRefusedError):
            return Outcome(Answer.TIMEOUT)  # no way to another node: whether it lives is not known
        watched.owned = False  # the port was given up; whoever opens it next is looked at again
        return Outcome(Answer.CLOSED)
    if isinstance(error, urllib3.exceptions.TimeoutError):
        return _late(watched)
    return Outcome(Answer.BROKEN, type(error).__name__)


def _late(watched: _Watched) -> Outcome:
    """No health in time. Once it was ready, its counters say whether it is busy or hung."""
    if watched.state.ready_at_seconds is None:
        return Outcome(Answer.TIMEOUT)
    patience = urllib3.Timeout(connect=_CONNECT_SECONDS, read=_PATIENT_SECONDS)
    sample, note = _scrape(watched, timeout=patience)
    return Outcome(Answer.TIMEOUT, sample=sample, note=note)


def _told(status: int, page: bytes) -> str:
    """What an engine says of itself while it is not ready: `loading, 40 %`; the status if nothing."""
    try:
        body = json.loads(page)
    except (ValueError, RecursionError):
        return f"status {status}"
    told = body.get("status") if isinstance(body, dict) else None
    if not isinstance(told, str):
        return f"status {status}"
    progress = body.get("progress")
    if not isinstance(progress, int | float) or not 0 <= progress <= 1:
        return told[:40]
    # In steps of ten: each change of this text is written down.
    return f"{told[:40]}, {int(progress * 10) * 10} %"


def _scrape(watched: _Watched, *, timeout: urllib3.Timeout | None = None) -> tuple[EngineSample | None, str]:
    if not watched.target.is_own:
        return None, ""  # its own agent reads them
    sample, note = scrape(watched.pool, watched.target.adapter, timeout=timeout)
    if sample is not None:
        if watched.logged is None:
            watched.logged = _read_log(watched.target.log_file)
        sample = with_capacity(sample, watched.logged)
    return sample, note


def _read_log(path: Path | None) -> LoggedCapacity:
    if path is None:
        return LoggedCapacity()
    try:
        with path.open("rb") as file:
            text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return LoggedCapacity()
    return read_capacity(text.splitlines())


def scrape(
    pool: urllib3.HTTPConnectionPool, adapter: EngineAdapter, *, timeout: urllib3.Timeout | None = None
) -> tuple[EngineSample | None, str]:
    """Fetch a metrics page and read it. Without a sample, the note says why."""
    try:
        answer = _get(pool, adapter.metrics_path, timeout=timeout)
    except urllib3.exceptions.TimeoutError:
        return None, "busy: metrics answered late"
    except urllib3.exceptions.HTTPError as error:
        return None, f"metrics: {type(error).__name__}"
    if answer.status != _OK:
        return None, f"metrics disabled ({answer.status})"
    if answer.content_type == _WEB_PAGE:
        return None, f"metrics: a web page came ({_WEB_PAGE}), no metrics; is a proxy in between?"
    if len(answer.body) > _MAX_PAGE_BYTES:
        return None, f"metrics page over {_MAX_PAGE_BYTES} bytes"
    page = answer.body.decode("utf-8", "replace")
    # A body that came whole needs no line end to show that its last line is not cut.
    return adapter.parse_metrics(page + "\n" if answer.is_whole and not page.endswith("\n") else page), ""


@dataclass(frozen=True, slots=True)
class _Answered:
    status: int
    content_type: str
    body: bytes
    is_whole: bool
    """False if the connection ended within it."""


def _get(pool: urllib3.HTTPConnectionPool, path: str, *, timeout: urllib3.Timeout | None = None) -> _Answered:
    """Ask for a path; whatever codings the answer has are undone. Reads a part more than a page may have.

    Raises `urllib3.exceptions.HTTPError`; a `ReadTimeoutError` also for an answer that goes on too long.
    """
    ends_at = time.monotonic() + _WHOLE_SECONDS
    response = pool.urlopen(
        "GET", path, preload_content=False, redirect=False, timeout=timeout or pool.timeout
    )
    content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    body, is_whole = bytearray(), True
    try:
        while len(body) <= _MAX_PAGE_BYTES and (part := response.read1(_PART_BYTES)):
            body += part
            if time.monotonic() > ends_at:
                response.close()
                raise urllib3.exceptions.ReadTimeoutError(pool, path, f"not whole in {_WHOLE_SECONDS:g} s")
        if len(body) > _MAX_PAGE_BYTES:
            response.close()  # what is left unread must not be taken for the next answer
    except (urllib3.exceptions.ProtocolError, urllib3.exceptions.DecodeError):
        is_whole = False
        response.close()
    finally:
        response.release_conn()
    return _Answered(response.status, content_type, bytes(body), is_whole)
