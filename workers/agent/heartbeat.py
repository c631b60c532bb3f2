"""The thread that reports: a heartbeat each second, and in between whatever else is to be said.

It has its own Redis connection and waits for nothing else in the agent, nor does anything wait for
it: reports are queued, bounded, and the oldest are dropped while Redis is away. Heartbeats carry
the whole state, so nothing dropped is the only copy.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
from redis import Redis
from redis.exceptions import RedisError

from workers.agent import redis_link
from workers.agent.credential import REACHED, Link, judge
from workers.protocol import names, v1

_INTERVAL_SECONDS = 1.0
_HELLO_SECONDS = 3.0
"""Between introductions while the node holds no lease."""
_GAP_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 5.0
_QUEUE_LENGTH = 1000

logger = logging.getLogger(__name__)


def encode_within_bound(report: v1.Report, *, node_id: str, node_key: bytes) -> bytes:
    """Encode a report; a heartbeat that is too long loses its less important parts first."""
    for lighter in _lighter_and_lighter(report):
        try:
            return v1.encode_report(lighter, node_id=node_id, node_key=node_key)
        except v1.MalformedMessageError:
            logger.warning("a %s is over the size bound", type(report).__name__)
    raise v1.MalformedMessageError(f"{type(report).__name__} cannot be made small enough")


def _lighter_and_lighter(report: v1.Report) -> list[v1.Report]:
    if not isinstance(report, v1.Heartbeat):
        return [report]
    without_tails = msgspec.structs.replace(
        report,
        replicas=tuple(
            msgspec.structs.replace(
                replica,
                reason=replica.reason[:200],
                last_exit=replica.last_exit and msgspec.structs.replace(replica.last_exit, log_tail=()),
            )
            for replica in report.replicas
        ),
        unknown_processes=report.unknown_processes[:50],
        kv_pools=tuple(msgspec.structs.replace(pool, map=b"") for pool in report.kv_pools),
    )
    bare = msgspec.structs.replace(
        without_tails,
        replicas=tuple(
            msgspec.structs.replace(replica, telemetry=None, last_exit=None, reason="")
            for replica in without_tails.replicas
        ),
        unknown_processes=(),
        kv_pools=(),
        weights=None,
        accelerator_loads=(),
    )
    return [report, without_tails, bare]


class Reporter:
    """Sends this node's reports."""

    def __init__(
        self,
        redis_url: str,
        node_id: str,
        node_key: bytes,
        *,
        make_hello: Callable[[bool], v1.Hello],
        make_heartbeat: Callable[[int], v1.Heartbeat],
        note_link: Callable[[Link], None] = lambda _link: None,
    ) -> None:
        self._redis_url = redis_url
        self._node_id = node_id
        self._node_key = node_key
        self._make_hello = make_hello
        self._make_heartbeat = make_heartbeat
        self._note_link = note_link
        self._link: Link | None = None
        self._queue: deque[v1.Report] = deque(maxlen=_QUEUE_LENGTH)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._sequence = 0
        self._failures = 0
        self._hello_wanted = True
        self._hello_is_first = True
        self._connected_anew = False
        self._hello_at = 0.0
        self._beat_at = 0.0
        self.reached = False
        """True while the last send arrived."""

    def start(self) -> None:
        """Start reporting."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; at most one send is waited for."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(2 * redis_link.SOCKET_SECONDS)

    def submit(self, report: v1.Report) -> None:
        """Queue a report; never blocks."""
        self._queue.append(report)
        self._wake.set()

    def say_hello(self) -> None:
        """Introduce the node again with the next send."""
        self._hello_wanted = True
        self._wake.set()

    def _run(self) -> None:
        client = redis_link.connect(self._redis_url, self._note_connection)
        while not self._stopping.is_set():
            pause = self._step(client)
            self._wake.wait(pause)
            self._wake.clear()
        client.close()

    def _step(self, client: Redis) -> float:
        """Send what is due. Returns the seconds until the next heartbeat, or of the back-off."""
        try:
            self._send_due(client, time.monotonic())
        except (RedisError, OSError) as error:
            return self._note_failure(error)
        except Exception:  # top of the loop: an odd value must not end the signs of life
            logger.exception("making a report failed")
            return _INTERVAL_SECONDS
        if self._failures:
            logger.info("redis is reached again after %d failures", self._failures)
        self._failures = 0
        self._say_link(REACHED)
        self.reached = True
        return max(0.0, self._beat_at + _INTERVAL_SECONDS - time.monotonic())

    def _note_connection(self) -> None:
        """A new connection, by the first send on it: whoever listens may have lost all it knew."""
        self._connected_anew = True

    def _note_failure(self, error: Exception) -> float:
        self.reached = False
        self._hello_wanted = True
        self._say_link(judge(error))
        self._failures += 1
        longest = min(_LONGEST_PAUSE_SECONDS, 0.25 * 2 ** min(self._failures, 8))
        pause = longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret
        self._stopping.wait(pause)  # not woken by new reports: they wait for Redis too
        return 0.0

    def _say_link(self, link: Link) -> None:
        """Say what has changed: an outage is not told at each try, nor a refusal hidden behind one."""
        before, self._link = self._link, link
        if before is not None and before.state == link.state:
            return
        if link is not REACHED:
            logger.log(logging.ERROR if link.state == "refused" else logging.WARNING, "%s", link.detail)
        self._note_link(link)

    def _send_due(self, client: Redis, now: float) -> None:
        if self._beat_at and now - self._beat_at > _GAP_SECONDS:
            self._hello_wanted = True  # this process stood still: the lease may be over
        if now - self._beat_at >= _INTERVAL_SECONDS:
            heartbeat = self._make_heartbeat(self._sequence + 1)
            self._introduce(client, heartbeat, now)
            self._sequence += 1
            self._send(client, heartbeat)
            self._beat_at = now  # after the send: a try with nothing to send would count as arrived
        while self._queue:
            report = self._queue[0]
            self._send(client, report)
            if self._queue[0] is report:  # a full queue may have dropped it meanwhile
                self._queue.popleft()

    def _introduce(self, client: Redis, heartbeat: v1.Heartbeat, now: float) -> None:
        no_lease = heartbeat.lease_epoch == 0 and now - self._hello_at >= _HELLO_SECONDS
        if not (self._hello_wanted or self._connected_anew or no_lease):
            return
        self._hello_wanted = False  # before the send: one asked for meanwhile is said as well
        self._send(client, self._make_hello(not self._hello_is_first))
        self._connected_anew = False
        self._hello_is_first = False
        self._hello_at = now

    def _send(self, client: Redis, report: v1.Report) -> None:
        try:
            data = encode_within_bound(report, node_id=self._node_id, node_key=self._node_key)
        except v1.MalformedMessageError:
            logger.exception("a report was left out")
            return
        client.xadd(
            names.REPORT_STREAM,
            {"m": data},
            maxlen=names.REPORT_STREAM_MAX_LENGTH,
            approximate=True,
        )
