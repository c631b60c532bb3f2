"""KV events of real engines: which blocks came into their cache, and which left it.

vLLM publishes them over ZMQ as msgpack, SGLang in the same shape: a batch of events, each one a map with
a `type` (newer) or an array that begins with it (older, and SGLang). What a name of a block is, is the
engine's own affair; the tokens stand beside it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

BlockName = int | bytes
"""What the engine calls a block."""
MAX_BATCH_BYTES = 16 * 1024 * 1024
_FULL_ATTENTION = (None, "full_attention", "mla_attention")
_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_DAMAGE = (
    *(msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(OverflowError, RecursionError),
)
_MOST_KEY_BYTES = 64
_decoder = msgspec.msgpack.Decoder(list[Any])


class DamagedEventsError(ValueError):
    """Bytes that are no batch of events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks came in, one after the other behind `parent`."""

    names: tuple[BlockName, ...]
    parent: BlockName | None
    """`None`: they begin a prompt."""
    tokens: tuple[tuple[int, ...], ...]
    """Of each block."""
    apart: tuple[bytes, ...]
    """Of each block, what makes equal tokens different content: an adapter, a picture, a tenant's salt."""
    medium: str = ""
    group: int = 0
    whole_prefix: bool = True
    """False for layers that keep a part of the prefix only, such as a sliding window."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left one medium."""

    names: tuple[BlockName, ...]
    medium: str = ""
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached any more."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """What one message says."""

    at_seconds: float
    """By the engine's wall clock: tells a publisher that began anew from a message that came twice."""
    events: tuple[Event, ...] = field(default=())
    unknown: int = 0
    """Events of kinds that nobody here knows."""


def decode_batch(payload: bytes) -> Batch:
    """Read one message. Raises `DamagedEventsError`."""
    if len(payload) > MAX_BATCH_BYTES:
        raise DamagedEventsError(f"a batch of {len(payload)} bytes")
    try:
        at_seconds, events, *_ = _decoder.decode(payload)
        found = [_event(raw) for raw in events]
        at_seconds = float(at_seconds)
        if not math.isfinite(at_seconds):
            raise ValueError(f"a time of {at_seconds}")
    except _DAMAGE as error:
        raise DamagedEventsError(f"{type(error).__name__}: {error}") from error
    known = tuple(event for event in found if event is not None)
    return Batch(at_seconds, known, len(found) - len(known))


def _event(raw: Any) -> Event | None:  # noqa: ANN401 - whatever was sent
    kind = raw["type"] if isinstance(raw, dict) else raw[0]
    if kind == _STORED:
        return _stored(raw if isinstance(raw, dict) else dict(zip(_STORED_FIELDS, raw[1:], strict=False)))
    if kind == _REMOVED:
        fields = raw if isinstance(raw, dict) else dict(zip(_REMOVED_FIELDS, raw[1:], strict=False))
        return Removed(_names(fields["block_hashes"]), str(fields.get("medium") or ""), _group(fields))
    return Cleared() if kind == _CLEARED else None


def _stored(fields: Mapping[str, Any]) -> Stored:
    names, size = _names(fields["block_hashes"]), int(fields["block_size"])
    tokens = [_token(token) for token in fields["token_ids"]]
    if size <= 0 or len(tokens) != size * len(names):
        raise ValueError(f"{len(tokens)} tokens in {len(names)} blocks of {size}")
    parent = fields.get("parent_block_hash")
    return Stored(
        names=names,
        parent=None if parent is None else _name(parent),
        tokens=tuple(tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)),
        apart=_apart(fields, len(names)),
        medium=str(fields.get("medium") or ""),
        group=_group(fields),
        whole_prefix=fields.get("kv_cache_spec_kind") in _FULL_ATTENTION,
    )


def _apart(fields: Mapping[str, Any], count: int) -> tuple[bytes, ...]:
    adapter = fields.get("lora_name") or fields.get("lora_id")
    extra: Sequence[Any] = fields.get("extra_keys") or (None,) * count
    if len(extra) != count:
        raise ValueError(f"{len(extra)} extra keys of {count} blocks")
    plain = b"" if adapter is None else repr(adapter).encode()
    return tuple(plain if keys is None else plain + repr(keys).encode() for keys in extra)


def _names(raw: Sequence[Any]) -> tuple[BlockName, ...]:
    return tuple([_name(one) for one in raw])


def _name(raw: Any) -> BlockName:  # noqa: ANN401 - whatever was sent
    if isinstance(raw, int | bytes) and not isinstance(raw, bool):
        return raw
    raise TypeError(f"a block called {raw!r}")


def _token(raw: Any) -> int:  # noqa: ANN401 - whatever was sent
    """A token; of pairs, which speculative decoding stores, the first."""
    token = raw if isinstance(raw, int) else raw[0]
    if not isinstance(token, int) or not 0 <= token < 1 << 32:
        raise ValueError(f"token {token!r}")
    return token


def _group(fields: Mapping[str, Any]) -> int:
    return int(fields.get("group_idx") or 0)


def extend_chain(parent: bytes, tokens: Sequence[int], apart: bytes = b"") -> bytes:
    """Digest of a block behind a chain: equal digests mean equal content, whatever engines call it."""
    key = apart if len(apart) <= _MOST_KEY_BYTES else hashlib.blake2b(apart).digest()
    digest = hashlib.blake2b(parent, digest_size=16, key=key)
    digest.update(b"".join([token.to_bytes(4, "little") for token in tokens]))
    return digest.digest()
