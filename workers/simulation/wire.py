"""Redis, as all simulated nodes of one process use it: one writer of reports, many queues."""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.messaging import Consumer
from redis.exceptions import RedisError

from workers.agent import redis_link
from workers.protocol import names, pulse

_QUEUES_PER_CHANNEL = 64
"""A channel waits on all of its queues with one command of the store."""
_RETRY_SECONDS = 1.0
_SEND_AT_ONCE = 256

logger = logging.getLogger(__name__)

Take = Callable[[str, bytes], None]
"""Called with a node's id and the sealed command."""


class ReportWriter:
    """Appends reports to the stream, many with one exchange."""

    def __init__(self, url: str) -> None:
        self._redis = redis_link.connect(url, lambda: None)
        self._again_at = 0.0

    def send(self, reports: Sequence[bytes], pulses: Mapping[str, bytes]) -> bool:
        """Send; false where the store is away: the reports are lost, as those of a real node are.

        `pulses`: sealed, by node id.
        """
        if not reports and not pulses:
            return True
        if time.monotonic() < self._again_at:
            return False
        try:
            for start in range(0, len(reports), _SEND_AT_ONCE):
                self._send(reports[start : start + _SEND_AT_ONCE])
            self._write_pulses(pulses)
        except (RedisError, OSError) as error:
            logger.warning("redis is not reached: %s", type(error).__name__)
            self._again_at = time.monotonic() + _RETRY_SECONDS
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _send(self, reports: Sequence[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for report in reports:
            pipeline.xadd(
                names.REPORT_STREAM,
                {"m": report},
                maxlen=names.REPORT_STREAM_MAX_LENGTH,
                approximate=True,
            )
        pipeline.execute()

    def _write_pulses(self, pulses: Mapping[str, bytes]) -> None:
        if not pulses:
            return
        lifetime = round(pulse.LIFETIME_SECONDS * 1000)
        pipeline = self._redis.pipeline(transaction=False)
        for node_id, data in pulses.items():
            pipeline.set(pulse.key_of(node_id), data, px=lifetime)
        pipeline.execute()


class CommandReader:
    """Takes commands off the Celery queues of many nodes, and acknowledges each once it was taken."""

    def __init__(self, url: str, node_ids: Sequence[str], take: Take) -> None:
        self._url = url
        self._queues = {names.node_queue(node_id): node_id for node_id in node_ids}
        self._take = take
        self._connection: Any = None
        self._again_at = 0.0

    def drain(self, seconds: float) -> None:
        """Take in whatever arrives within so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._connection is None and not self._connect():
                time.sleep(left)
                return
            try:
                self._connection.drain_events(timeout=left)
            except TimeoutError:
                return
            except (*self._connection.connection_errors, *self._connection.channel_errors) as error:
                self._lose(error)

    def close(self) -> None:
        """Close all connections; what was not acknowledged comes again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> bool:
        if time.monotonic() < self._again_at:
            return False
        connection: Any = _untyped(Connection)(
            redis_link.kombu_url(self._url),
            transport_options=redis_link.kombu_options(self._url)
            # Commands all have the same priority: one list a queue instead of four to wait on.
            | {"priority_steps": [0]},
            ssl=redis_link.kombu_ssl(self._url),
        )
        self._connection = connection
        try:
            for names_of_queues in _chunks(list(self._queues), _QUEUES_PER_CHANNEL):
                self._consume(connection, names_of_queues)
        except (*connection.connection_errors, *connection.channel_errors) as error:
            self._lose(error)
            return False
        return True

    def _consume(self, connection: Any, queue_names: Sequence[str]) -> None:  # noqa: ANN401 - kombu has no types
        queues = [
            _untyped(Queue)(name, _untyped(Exchange)(name, type="direct"), routing_key=name)
            for name in queue_names
        ]
        consumer = _untyped(Consumer)(
            connection.channel(),
            queues,
            callbacks=[self._receive],
            accept=["json"],
            prefetch_count=len(queues),
        )
        consumer.consume()

    def _receive(self, body: Any, message: Any) -> None:  # noqa: ANN401 - kombu has no types
        node_id = self._queues.get(message.delivery_info.get("routing_key", ""))
        try:
            data = base64.b64decode(body[0][0], validate=True)
        except (binascii.Error, LookupError, TypeError, ValueError):
            data = b""
        if node_id is not None:
            self._take(node_id, data)
        message.ack()

    def _lose(self, error: BaseException) -> None:
        logger.warning("the command queues are not reached: %s", type(error).__name__)
        self._again_at = time.monotonic() + _RETRY_SECONDS
        connection, self._connection = self._connection, None
        try:
            connection.close()
        except (*connection.connection_errors, *connection.channel_errors):
            logger.debug("the broken connection could not be closed")


def _untyped(kombu_class: Any) -> Any:  # noqa: ANN401 - that is its purpose
    """A class of kombu, which has types for some of its functions only, without any."""
    return kombu_class


def _chunks(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
