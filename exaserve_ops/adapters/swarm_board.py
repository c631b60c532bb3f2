"""What the leader notes of swarms, in Redis: written by it, read by every web process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import redis

from exaserve_ops.weights.domain.swarm_notes import SwarmNotes

KEY = "exaops:live:swarms"
KEPT_SECONDS = 24 * 3600
"""Nothing is left of it a day after the last swarm."""
KEPT_SWARMS = 64

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(SwarmNotes)


class RedisSwarmBoard:
    """Implements the controllers' port. Takes a client that returns bytes; for one thread."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def read(self) -> dict[str, SwarmNotes]:
        """Return all that is noted, by revision; nothing where the store is away."""
        return read_swarms(self._redis)

    def publish(self, notes: Sequence[SwarmNotes]) -> None:
        """Replace the notes of these swarms. A store that is away gets the next ones."""
        told = {one.revision: _encoder.encode(one) for one in notes}
        try:
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.hset(KEY, mapping=cast("Any", told))
            pipeline.expire(KEY, KEPT_SECONDS)
            pipeline.hlen(KEY)
            if pipeline.execute()[-1] > KEPT_SWARMS:
                self._drop_oldest()
        except redis.RedisError as error:
            _log.info("event=swarms_not_told error=%s", type(error).__name__)

    def _drop_oldest(self) -> None:
        ended = [one for one in self.read().values() if one.ended_at_seconds is not None]
        ended.sort(key=lambda one: one.ended_at_seconds or 0.0)
        gone = [one.revision for one in ended[: max(0, len(ended) - KEPT_SWARMS // 2)]]
        if gone:
            self._redis.hdel(KEY, *gone)


def read_swarms(client: redis.Redis) -> dict[str, SwarmNotes]:
    """Return what is noted of every swarm, by revision; nothing where the store is away.

    Notes that another version wrote otherwise are passed over.
    """
    try:
        raw = cast("dict[bytes, bytes]", client.hgetall(KEY))
    except redis.RedisError:
        return {}
    found = {}
    for key, value in raw.items():
        try:
            found[key.decode()] = _decoder.decode(value)
        except msgspec.MsgspecError:
            _log.warning("event=swarm_not_read revision=%s", key[:19])
    return found
