"""What each limited API key uses over all gateways together: two small values in Redis for each key.

A request is admitted by one script in one round trip: it takes a place among the key's open requests
and charges its prompt to the key's bucket, or nothing at all. A place is a lease: a gateway renews those
of its open requests, so what a dead gateway held is free after a while. Times are Redis' own, so
gateways' clocks do not matter. Keys without limits never come here.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from exaserve_ops.adapters.resp_link import LinkError, Reply, RespLink, command
from exaserve_ops.routing.domain.quotas import BURST_SECONDS
from exaserve_ops.routing.domain.records import KeyRecord

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
    return 'concurrency 1'
  end
end
if rate > 0 then
  local tokens = bucket(KEYS[2], rate, burst)
  if tokens <= 0 then
    return 'rate ' .. tostring(math.max(0.001, (1 - tokens) * 60 / rate))
  end
  redis.call('SET', KEYS[2], string.format('%.3f %.6f', tokens - cost, now), 'EX', ARGV[7])
end
if most_open > 0 then
  redis.call('ZADD', KEYS[1], now + lease, request)
  redis.call('EXPIRE', KEYS[1], math.ceil(lease) + 60)
end
return 'admitted 0'
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


@dataclass(frozen=True, slots=True)
class QuotaVerdict:
    """Whether a request may go on."""

    exceeded: str = ""
    """`concurrency` or `rate`; empty: admitted."""
    retry_after_seconds: float = 0.0


OnVerdict = Callable[[QuotaVerdict | None], None]
"""Gets the verdict; `None` if the table is not to be had: limits then do not hold."""

_log = logging.getLogger(__name__)


class _Script:
    """One script, by its digest once Redis has it."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self._sha1 = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()  # how Redis names a script

    def call(
        self, link: RespLink, words: list[bytes | str | int], then: Callable[[Reply | LinkError], None]
    ) -> None:
        link.call(command(b"EVALSHA", self._sha1, *words), functools.partial(self._take, link, words, then))

    def _take(
        self,
        link: RespLink,
        words: list[bytes | str | int],
        then: Callable[[Reply | LinkError], None],
        reply: Reply | LinkError,
    ) -> None:
        if isinstance(reply, LinkError) and str(reply).startswith("NOSCRIPT"):
            link.call(command(b"EVAL", self.text, *words), then)
        else:
            then(reply)


_ADMIT_SCRIPT, _SETTLE_SCRIPT, _RENEW_SCRIPT = _Script(_ADMIT), _Script(_SETTLE), _Script(_RENEW)


def is_limited(key: KeyRecord) -> bool:
    """Whether a key has any limit at all."""
    return key.max_concurrent_requests is not None or key.tokens_per_minute is not None


def quota_keys(key_id: str) -> list[str]:
    """Redis keys of a key's open requests and of its bucket; one slot of a cluster holds both."""
    return [f"exaops:quota:{{{key_id}}}:open", f"exaops:quota:{{{key_id}}}:tokens"]


class QuotaTable:
    """The table, over one link."""

    def __init__(self, link: RespLink) -> None:
        self._link = link
        self.failures = 0
        """Requests whose limits could not be asked for, and which went on."""

    def admit(self, key: KeyRecord, lease_id: str, prompt_tokens: float, then: OnVerdict) -> None:
        """Take a place and charge the prompt; or neither, with the reason and when to come again."""
        words: list[bytes | str | int] = [
            2,
            *quota_keys(key.key_id),
            key.max_concurrent_requests or 0,
            key.tokens_per_minute or 0,
            f"{prompt_tokens:.1f}",
            lease_id,
            f"{LEASE_SECONDS:g}",
            f"{BURST_SECONDS:g}",
            _BUCKET_SECONDS,
        ]
        _ADMIT_SCRIPT.call(self._link, words, functools.partial(self._judge, then))

    def settle(self, key: KeyRecord, lease_id: str, further_tokens: float) -> None:
        """Give the place back and charge what the request cost beyond its prompt; negative gives back."""
        words: list[bytes | str | int] = [
            2,
            *quota_keys(key.key_id),
            key.tokens_per_minute or 0,
            f"{further_tokens:.1f}",
            lease_id,
            f"{BURST_SECONDS:g}",
            _BUCKET_SECONDS,
        ]
        _SETTLE_SCRIPT.call(self._link, words, self._note)

    def renew(self, key_id: str, lease_ids: Iterable[str]) -> None:
        """Keep the places of requests that are still open."""
        words: list[bytes | str | int] = [1, quota_keys(key_id)[0], f"{LEASE_SECONDS:g}", *lease_ids]
        _RENEW_SCRIPT.call(self._link, words, self._note)

    def _judge(self, then: OnVerdict, reply: Reply | LinkError) -> None:
        verdict = None
        if isinstance(reply, bytes):
            exceeded, _, wait = reply.decode().partition(" ")
            verdict = QuotaVerdict("" if exceeded == "admitted" else exceeded, float(wait))
        else:
            self._note(reply)
        then(verdict)

    def _note(self, reply: Reply | LinkError) -> None:
        if isinstance(reply, LinkError):
            self.failures += 1
            _log.debug("quota table: %s", reply)
