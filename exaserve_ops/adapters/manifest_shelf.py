"""Manifests of weights in Redis, where nodes read them: copies for a while, Postgres has them for good."""

from __future__ import annotations

from collections.abc import Callable, Collection

import redis

from workers.protocol import manifest

KEPT_SECONDS = 6 * 3600
_RENEW_SECONDS = 3 * 3600


class ManifestShelf:
    """Implements the controllers' port."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def lay_out(self, digests: Collection[str], body_of: Callable[[str], bytes]) -> int:
        """Have these manifests there for a while; returns how many were written.

        `body_of` is asked for the bytes of those only that are not there. Raises `ConnectionError`.
        """
        written = 0
        wanted = sorted(digests)
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for digest in wanted:
                pipeline.ttl(manifest.key_of(digest))
            for digest, seconds in zip(wanted, pipeline.execute(), strict=True):
                if seconds < 0:
                    self._redis.set(manifest.key_of(digest), body_of(digest), ex=KEPT_SECONDS)
                    written += 1
                elif seconds < _RENEW_SECONDS:
                    self._redis.expire(manifest.key_of(digest), KEPT_SECONDS)
        except redis.RedisError as error:
            raise ConnectionError(f"manifests are not laid out: {error}") from error
        return written
