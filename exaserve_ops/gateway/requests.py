"""A request as it was read, and the few fields of its body that a router must understand."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from exaserve_ops.gateway.refusals import BAD_JSON, Refusal, bad_field
from exaserve_ops.routing.domain.records import KeyRecord


@dataclass(slots=True)
class Request:
    """One request of a client. Header names are in lower case."""

    method: bytes = b""
    target: bytes = b""
    version: str = "1.1"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body_parts: list[bytes] = field(default_factory=list)
    keep_alive: bool = True
    request_id: bytes = b""
    session_id: str = ""
    """Validated; empty for an anonymous request."""
    key: KeyRecord | None = None
    refusal: Refusal | None = None
    """Set as soon as it is known that the request goes no further."""

    @property
    def path(self) -> bytes:
        """Target without its query."""
        return self.target.partition(b"?")[0]

    @property
    def body(self) -> bytes:
        """The body, as it came."""
        parts = self.body_parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header."""
        return [value for header, value in self.headers if header == name]


class RoutedFields(msgspec.Struct, frozen=True):
    """What is read of a body; the rest is the engine's business and passes unread."""

    model: str
    stream: bool | None = None
    stream_options: dict[str, msgspec.Raw] | None = None
    user: str | None = None


_decoder = msgspec.json.Decoder(RoutedFields)


def read_fields(body: bytes) -> RoutedFields | Refusal:
    """Read the body's fields, or say what is wrong with them."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        return bad_field(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BAD_JSON
