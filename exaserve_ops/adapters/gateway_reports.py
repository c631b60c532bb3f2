"""What gateways say of themselves: written by each every few seconds, read by web processes."""

from __future__ import annotations

import logging
from typing import cast

import msgspec
import redis
import redis.asyncio

from exaserve_ops.routing.domain.records import GatewayReport

KEY_PREFIX = "exaops:gateway:"
LIFETIME_SECONDS = 15

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GatewayReport)
_log = logging.getLogger(__name__)


class GatewayReportWriter:
    """Writer side, for one gateway. Takes an asynchronous client."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client

    async def write(self, report: GatewayReport) -> None:
        """Replace what this gateway said; without another word it is forgotten soon."""
        await self._redis.set(KEY_PREFIX + report.gateway, _encoder.encode(report), ex=LIFETIME_SECONDS)


class GatewayReportReader:
    """Reader side, for a web process."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def read(self) -> list[GatewayReport] | None:
        """Living gateways, by name; `None` where the store is away."""
        try:
            keys = sorted(cast("list[bytes]", list(self._redis.scan_iter(KEY_PREFIX + "*", count=1000))))
            raws = cast("list[bytes | None]", self._redis.mget(keys)) if keys else []
        except redis.RedisError:
            return None
        reports = []
        for key, raw in zip(keys, raws, strict=True):
            try:
                reports += [_decoder.decode(raw)] if raw is not None else []
            except msgspec.MsgspecError as error:
                _log.warning("event=gateway_report_not_read key=%r error=%s", key, error)
        return reports
