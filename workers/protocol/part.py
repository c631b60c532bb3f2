"""What every part of a message is made of."""

from __future__ import annotations

import msgspec


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all parts: immutable, by keyword, defaults left off the wire."""
