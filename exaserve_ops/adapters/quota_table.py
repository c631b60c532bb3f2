"""What each limited API key uses over all gateways together: two small values in Redis for each key.

A request is admitted by one script in one round trip: it takes a place among the key's open requests
and charges its prompt to the key's bucket, or nothing at all. A place is a lease: a gateway renews those
of its open requests, so what a dead gateway held is free after a while. Times are Redis' own, so
gateways' clocks do not matter. Keys without limits never come here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import redis.asyncio
import redis.exceptions

from exaserve_ops.routing.domain.quotas import BURST_SECONDS
from exaserve_ops.routing.domain.records import KeyRecord

ANSWER_SECONDS = 0.150
LEASE_SECONDS = 30.0
RENEW_SECONDS = 10.0
_BUCKET_SECONDS = 3600

_TIME = """
local t = redis.call('TIME')
local now = tonumber(t[1]) + tonumber(t[2]) / 1e6
local function bucket(key, rate, burst)
  local most = rate * burst / 60
  local kept = redis.call('GET', key)
  if not kept then return most, most end
  local tokens, at = kept:match('([^ ]+) ([^ ]+)')
  local gained = math.max(0, now - tonumber(at)) * rate / 60
  return math.min(most, tonumber(tokens) + gained), most
end
"""

_ADMIT = (
    _TIME
    + """
local most_open, rate, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local request, lease, burst = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
if most_open > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  if redis.call('ZCARD', KEYS[1]) >= most_open then
    return {'concurrency', '1'}
  end
end
if rate > 0 then
  local tokens = bucket(KEYS[2], rate, burst)
  if tokens <= 0 then
    return {'rate', tostring(math.max(0.001, (1 - tokens) * 60 / rate))}
  end
  redis.call('SET', KEYS[2], string.format('%.3f %.6f', tokens - cost, now), 'EX', ARGV[7])
end
if most_open > 0 then
  redis.call('ZADD', KEYS[1], now + lease, request)
  redis.call('EXPIRE', KEYS[1], math.ceil(lease) + 60)
end
return {'', '0'}
"""
)

_SETTLE = (
    _TIME
    + """
local rate, cost, request, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
redis.call('ZREM', KEYS[1], request)
if rate > 0 then
  local tokens, most = bucket(KEYS[2], rate, burst)
  redis.call('SET', KEYS[2], string.format('%.3f %.6f', math.min(most, tokens - cost), now), 'EX', ARGV[5])
end
return 1
"""
)

_RENEW = (
    _TIME
    + """
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[1]), ARGV[i]) end
return 1
"""
)


class QuotaTableUnavailableError(Exception):
    """Redis is away, slow or confused. Limits then do not hold; requests go on."""


@dataclass(frozen=True, slots=True)
class QuotaVerdict:
    """Whether a request may go on."""

    exceeded: str = ""
    """`concurrency` or `rate`; empty: admitted."""
    retry_after_seconds: float = 0.0


def is_limited(key: KeyRecord) -> bool:
    """Whether a key has any limit at all."""
    return key.max_concurrent_requests is not None or key.tokens_per_minute is not None


def quota_keys(key_id: str) -> list[str]:
    """Redis keys of a key's open requests and of its bucket; one slot of a cluster holds both."""
    return [f"exaops:quota:{{{key_id}}}:open", f"exaops:quota:{{{key_id}}}:tokens"]


class QuotaTable:
    """The table, over a client that does not retry by itself. Raises `QuotaTableUnavailableError`."""

    def __init__(self, client: redis.asyncio.Redis, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._answer_seconds = answer_seconds
        self._admit = client.register_script(_ADMIT)
        self._settle = client.register_script(_SETTLE)
        self._renew = client.register_script(_RENEW)

    async def admit(self, key: KeyRecord, request_id: str, prompt_tokens: float) -> QuotaVerdict:
        """Take a place and charge the prompt; or neither, with the reason and when to come again."""
        arguments: Sequence[str | float] = [
            key.max_concurrent_requests or 0,
            key.tokens_per_minute or 0,
            prompt_tokens,
            request_id,
            LEASE_SECONDS,
            BURST_SECONDS,
            _BUCKET_SECONDS,
        ]
        answer = await self._bounded(self._admit(quota_keys(key.key_id), arguments))
        try:
            exceeded, wait = cast("list[bytes]", answer)
            return QuotaVerdict(exceeded.decode(), float(wait))
        except (TypeError, ValueError, AttributeError) as error:
            raise QuotaTableUnavailableError(f"not a verdict: {answer!r}") from error

    async def settle(self, key: KeyRecord, request_id: str, further_tokens: float) -> None:
        """Give the place back and charge what the request cost beyond its prompt; negative gives back."""
        arguments: Sequence[str | float] = [
            key.tokens_per_minute or 0,
            further_tokens,
            request_id,
            BURST_SECONDS,
            _BUCKET_SECONDS,
        ]
        await self._bounded(self._settle(quota_keys(key.key_id), arguments))

    async def renew(self, key_id: str, request_ids: Iterable[str]) -> None:
        """Keep the places of requests that are still open."""
        await self._bounded(self._renew(quota_keys(key_id)[:1], [LEASE_SECONDS, *request_ids]))

    async def _bounded(self, call: Awaitable[object]) -> object:
        try:
            async with asyncio.timeout(self._answer_seconds):
                return await call
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            raise QuotaTableUnavailableError(repr(error)) from error
