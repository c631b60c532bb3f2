"""Token rate of one API key: a bucket that fills evenly and may be overdrawn once. Pure.

A request's cost is known only when it has ended, so what is charged first is its prompt, and the rest
afterwards. A bucket may fall below zero by one request's cost; nothing more is admitted until it is
above zero again. Over time no more than the rate is used, and a request is never cut off half way.
"""

from __future__ import annotations

from dataclasses import dataclass

BURST_SECONDS = 60.0
"""A full bucket holds as much as a minute's rate."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tokens left at a moment."""

    tokens: float
    at_seconds: float


def refill(bucket: Bucket | None, tokens_per_minute: float, now: float) -> Bucket:
    """Return the bucket as it is now; a new one, or one of a clock that went back, is full."""
    most = tokens_per_minute * BURST_SECONDS / 60.0
    if bucket is None:
        return Bucket(most, now)
    gained = max(0.0, now - bucket.at_seconds) * tokens_per_minute / 60.0
    return Bucket(min(most, bucket.tokens + gained), now)


def charge(
    bucket: Bucket | None, tokens_per_minute: float, tokens: float, now: float
) -> tuple[Bucket, float]:
    """Take a request's first cost. The second value is 0, or the seconds to wait: then nothing is taken."""
    full = refill(bucket, tokens_per_minute, now)
    if full.tokens <= 0:
        return full, max(0.001, (1.0 - full.tokens) * 60.0 / tokens_per_minute)
    return Bucket(full.tokens - tokens, now), 0.0


def settle(bucket: Bucket | None, tokens_per_minute: float, tokens: float, now: float) -> Bucket:
    """Take what a request cost beyond its first charge; a negative cost gives back."""
    full = refill(bucket, tokens_per_minute, now)
    most = tokens_per_minute * BURST_SECONDS / 60.0
    return Bucket(min(most, full.tokens - tokens), now)
