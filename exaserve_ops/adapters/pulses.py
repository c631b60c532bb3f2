"""Pulses of agents, read of those nodes alone whose reports are missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import redis

from exaserve_ops.health.domain.detector import SeenPulse
from workers.protocol import pulse

_log = logging.getLogger(__name__)


class RedisPulseReader:
    """Takes a client that returns bytes; not for several threads."""

    def __init__(self, client: redis.Redis, node_key_of: Callable[[str], bytes | None]) -> None:
        self._redis = client
        self._node_key_of = node_key_of
        self.refused = 0
        """Pulses that were not believed."""

    def read(self, node_ids: Sequence[str]) -> dict[str, SeenPulse]:
        """Pulses by node, in one round trip; nothing of a node that has none or a forged one."""
        pipeline = self._redis.pipeline(transaction=False)
        for node_id in node_ids:
            key = pulse.key_of(node_id)
            pipeline.get(key)
            pipeline.pttl(key)
        answers = pipeline.execute()
        seen = {}
        for node_id, data, left_milliseconds in zip(node_ids, answers[::2], answers[1::2], strict=True):
            found = self._open(node_id, data, left_milliseconds)
            if found is not None:
                seen[node_id] = found
        return seen

    def _open(self, node_id: str, data: bytes | None, left_milliseconds: int) -> SeenPulse | None:
        key = self._node_key_of(node_id)
        if data is None or left_milliseconds < 0 or key is None:
            return None
        try:
            beat = pulse.decode(data, node_id=node_id, node_key=key)
        except pulse.PulseError as error:
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:  # each power of two: a stranger cannot fill the log
                _log.warning("event=pulse_refused count=%d detail=%s", self.refused, error)
            return None
        age = max(0.0, pulse.LIFETIME_SECONDS - left_milliseconds / 1000)
        return SeenPulse(beat.boot_id, beat.counter, age)
