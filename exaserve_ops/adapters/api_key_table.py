"""Who may ask for inference: the gateway's copy of the hashed API keys.

Only SHA-256 hashes are ever stored or sent; a key of ours has enough chance in it that a plain hash
cannot be reversed. The copy is replaced as a whole whenever the route table's reader sees a change,
so a revoked key stops within one poll.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from exaserve_ops.routing.domain.records import KeyRecord


def key_digest(text: str | bytes) -> str:
    """Field of a key in the table: SHA-256 of its text, in hex."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


class ApiKeyTable:
    """Keys that are valid now. Before the first table arrived it is not `loaded`."""

    __slots__ = ("_records", "_seen", "loaded")

    def __init__(self) -> None:
        self._records: Mapping[str, KeyRecord] = {}
        self._seen: dict[bytes, KeyRecord] = {}
        """Valid tokens that were sent since the table came, so that each is hashed only once."""
        self.loaded = False

    def replace(self, records: Mapping[str, KeyRecord]) -> None:
        """Take a new table in whole; what it lacks is revoked."""
        self._records = records
        self._seen = {}
        self.loaded = True

    def find(self, text: bytes) -> KeyRecord | None:
        """Return the record of a bearer token, or `None` if it is not valid."""
        known = self._seen.get(text)
        if known is None and (known := self._records.get(key_digest(text))) is not None:
            self._seen[text] = known
        return known
