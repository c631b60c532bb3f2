"""How a key is named without being kept."""

from __future__ import annotations

import hashlib


def hash_key(text: str) -> str:
    """SHA-256 of a key. Enough, because keys carry 256 random bits and nothing can be guessed."""
    return hashlib.sha256(text.encode()).hexdigest()
