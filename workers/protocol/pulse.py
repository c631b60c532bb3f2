"""The pulse: a second sign of life beside the report, kept in one key of each node.

It takes another thread of the agent and another connection than the reports, costs no ingest, and is
read only of nodes whose reports are missing. The key's time to live tells how old the pulse is, by
the store's own clock; the counter tells a new pulse from one that somebody wrote again.
"""

from __future__ import annotations

import hmac

import msgspec

from workers.protocol import digests

INTERVAL_SECONDS = 0.5
LIFETIME_SECONDS = 20.0

_KEY_PREFIX = "exaops:pulse:"
_LABEL = b"pulse\0"


class PulseError(Exception):
    """A pulse that cannot be believed."""


class Pulse(msgspec.Struct, frozen=True, array_like=True):
    """One beat of one run of an agent; the counter rises with each."""

    boot_id: str
    counter: int


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    body: bytes
    seal: bytes


_encoder = msgspec.msgpack.Encoder()
_sealed_decoder = msgspec.msgpack.Decoder(_Sealed)
_pulse_decoder = msgspec.msgpack.Decoder(Pulse)


def key_of(node_id: str) -> str:
    """Redis key of one node's pulse."""
    return _KEY_PREFIX + node_id


def encode(pulse: Pulse, *, node_id: str, node_key: bytes) -> bytes:
    """Encode and seal."""
    body = _encoder.encode(pulse)
    return _encoder.encode(_Sealed(body, _seal(node_key, node_id, body)))


def decode(data: bytes, *, node_id: str, node_key: bytes) -> Pulse:
    """Check the seal and decode. Raises `PulseError`."""
    try:
        sealed = _sealed_decoder.decode(data)
        if not hmac.compare_digest(sealed.seal, _seal(node_key, node_id, sealed.body)):
            raise PulseError(f"bad seal on the pulse of node {node_id}")
        return _pulse_decoder.decode(sealed.body)
    except msgspec.DecodeError as error:
        raise PulseError(f"no pulse: {error}") from error


def _seal(node_key: bytes, node_id: str, body: bytes) -> bytes:
    # The label keeps a pulse from being passed off as a report, and the other way round.
    return digests.seal(digests.report_key(node_key), node_id, _LABEL + body)
