"""A request as it was read, and the few fields of its body that a router must understand."""

from __future__ import annotations

import msgspec

from exaserve_ops.gateway.refusals import BAD_JSON, Refusal, bad_field
from exaserve_ops.routing.domain.records import KeyRecord


class Request:
    """One request of a client. A header is looked at once, as it is read."""

    __slots__ = (
        "body_parts",
        "is_batch",
        "is_continued",
        "is_long",
        "keep_alive",
        "key",
        "known",
        "lines",
        "method",
        "path",
        "refusal",
        "repeated",
        "request_id",
        "session_id",
        "target",
        "version",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.path = b""
        """Target without its query."""
        self.version = "1.1"
        self.keep_alive = True
        self.lines: list[bytes] = []
        """Header lines that may go to an engine, as they go there."""
        self.known: dict[bytes, bytes] = {}
        """Values of the headers that the gateway itself understands; repeated ones joined by commas."""
        self.repeated: frozenset[bytes] = frozenset()
        self.body_parts: list[bytes] = []
        self.request_id = b""
        self.session_id = ""
        """Validated; empty for an anonymous request."""
        self.key: KeyRecord | None = None
        self.is_batch = False
        """Whether it may wait: its key or its header says so."""
        self.is_long = False
        """Whether it says of itself that it takes long to compute."""
        self.is_continued = False
        """Whether a stream is to be continued elsewhere when its replica breaks off."""
        self.refusal: Refusal | None = None
        """Set as soon as it is known that the request goes no further."""

    def note(self, name: bytes, value: bytes) -> None:
        """Keep the value of a header that the gateway understands."""
        known = self.known
        if name in known:
            self.repeated |= {name}
            value = known[name] + b"," + value
        known[name] = value

    @property
    def body(self) -> bytes:
        """The body, as it came."""
        parts = self.body_parts
        return parts[0] if len(parts) == 1 else b"".join(parts)


Prompt = bytes | msgspec.Raw
"""A part of the body. A `Raw` is not copied out of it until somebody wants to look into it."""

_NO_TEXT = msgspec.Raw()


class RoutedFields(msgspec.Struct, frozen=True):
    """What is read of a body; the rest is the engine's business and passes unread."""

    model: str
    stream: bool | None = None
    stream_options: dict[str, msgspec.Raw] | None = None
    user: str | None = None
    messages: msgspec.Raw = _NO_TEXT
    prompt: msgspec.Raw = _NO_TEXT

    @property
    def text(self) -> Prompt:
        """The prompt's part of the body, as it came: where two begin alike, so do these."""
        return self.messages or self.prompt


_decoder = msgspec.json.Decoder(RoutedFields)


def read_fields(body: bytes) -> RoutedFields | Refusal:
    """Read the body's fields, or say what is wrong with them."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        return bad_field(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BAD_JSON
