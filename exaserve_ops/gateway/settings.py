"""The gateway's settings: one frozen structure, read once from the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from exaserve_ops.adapters.session_table import DEFAULT_TTL_SECONDS
from exaserve_ops.gateway.headers import may_name_session

PREFIX = "EXAOPS_GATEWAY_"
_OF_THE_PARENT = frozenset({"process", "parent"})
_NEVER_ZERO = frozenset(
    {
        *("processes", "connections", "attempts", "in_flight_per_replica", "head_bytes", "body_bytes"),
        *("session_seconds", "session_answer_seconds", "poll_seconds", "prefix_news_seconds"),
    }
)


class SettingsError(ValueError):
    """An environment variable is missing or cannot be used; the message names it."""


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Every bound of the data plane. `EXAOPS_GATEWAY_<NAME>` sets the field `<name>`."""

    port: int
    redis_url: str
    fleet_secret: bytes
    host: str = "127.0.0.1"
    tls_certificate: str = ""
    """File with the certificate chain, in PEM; clients are then served by TLS. Read again at SIGHUP."""
    tls_key: str = ""
    """File with its key; empty if that is in the same file."""

    processes: int = 1
    """Gateway processes on this port, each with a core, connections and bounds of its own."""
    process: int = -1
    """Which of several this is; set by their parent, as are the next two."""
    parent: int = 0
    figures: str = ""

    head_bytes: int = 32 * 1024
    body_bytes: int = 8 * 1024 * 1024
    connections: int = 8192
    """Clients connected at once; one more is closed at once."""

    idle_seconds: float = 75.0
    """A kept-alive client connection without a request."""
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    client_stall_seconds: float = 60.0
    """A client that takes nothing while an answer waits for it."""

    connect_seconds: float = 1.2
    """Long enough for one lost SYN, which is sent again after a second."""
    first_byte_seconds: float = 120.0
    """From the request to the first byte of the answer's body, attempts and waiting included."""
    upstream_stall_seconds: float = 300.0
    """Between two pieces of an answer."""
    attempts: int = 3
    in_flight_per_replica: int = 256
    upstream_idle_seconds: float = 30.0
    upstream_idle_connections: int = 256
    """Kept for each replica, as many as may be in use: with fewer a busy one is connected to all the time."""

    wait_seconds: float = 5.0
    """How long a request waits for a replica to appear or to have room."""
    first_replica_seconds: float = 30.0
    """Likewise for the first replica of a model, if one is on its way; while half of the room is free."""
    first_table_seconds: float = 3.0
    """How long a gateway that begins waits for the route table before it listens."""
    wait_requests: int = 1024
    batch_wait_seconds: float = 60.0
    """Likewise, of batch requests, which wait behind all others."""
    batch_in_flight_per_replica: int = 4
    """A batch request goes only to a replica that has fewer requests open than this."""
    long_prompt_tokens: int = 16_384
    """A prompt with so much to compute is long: see the next two."""
    long_prompts_per_replica: int = 1
    """Long prompts that may be computed, or queue, at a replica at once; the others wait here."""
    long_prompt_share: float = 0.75
    """Share of a model's replicas that compute long prompts at once."""
    long_wait_seconds: float = 90.0
    prefix_news_seconds: float = 0.5
    """How often gateways tell one another where they sent which beginnings of prompts."""
    poll_seconds: float = 2.0
    session_seconds: int = DEFAULT_TTL_SECONDS
    session_answer_seconds: float = 0.150
    session_headers: str = "x-session-id,x-smg-routing-key,x-conversation-id"
    """Names of headers that may carry a session's id, by commas; the first that is there counts."""
    drain_seconds: float = 30.0

    continue_streams: bool = False
    """Whether streams are continued on another replica whose requests do not say (`x-continue-stream`)."""
    continuations: int = 2
    """How often one stream is continued; a request that kills its engine kills so many more."""
    continuation_seconds: float = 30.0
    """From a break to the next piece."""
    continuation_tokens: int = 131_072
    """Prompt and text that are kept of one stream; a longer one is not continued."""
    continuation_tokens_in_all: int = 33_554_432
    """Likewise of all streams of a process, four bytes each."""

    @property
    def session_header_names(self) -> tuple[bytes, ...]:
        """Names in lower case, in their order."""
        return tuple(
            name.strip().lower().encode() for name in self.session_headers.split(",") if name.strip()
        )


def read_settings(environment: Mapping[str, str]) -> GatewaySettings:
    """Read and check the environment. Raises `SettingsError`."""
    values: dict[str, object] = {
        field.name: environment[PREFIX + field.name.upper()]
        for field in msgspec.structs.fields(GatewaySettings)
        if PREFIX + field.name.upper() in environment
    }
    if "port" not in values:
        raise SettingsError(f"{PREFIX}PORT is not set")
    values["redis_url"] = environment.get("REDIS_URL", "")
    if not values["redis_url"]:
        raise SettingsError("REDIS_URL is not set")
    values["fleet_secret"] = _read_secret(environment.get("EXAOPS_FLEET_SECRET", ""))
    try:
        settings = msgspec.convert(values, GatewaySettings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{PREFIX}*: {error}") from error
    _check_numbers(settings)
    for name in settings.session_header_names:
        if not may_name_session(name):
            told = name.decode()
            raise SettingsError(f"{PREFIX}SESSION_HEADERS: {told} is no header that can carry a session's id")
    return settings


def _check_numbers(settings: GatewaySettings) -> None:
    """Refuse what no bound can be: a gateway that starts with it would serve nobody, or forget everything."""
    for name, value in msgspec.structs.asdict(settings).items():
        if not isinstance(value, int | float) or name in _OF_THE_PARENT:
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name in _NEVER_ZERO):
            least = "more than 0" if name in _NEVER_ZERO else "0 or more"
            raise SettingsError(f"{PREFIX}{name.upper()} is {value}; it must be {least}")


def _read_secret(text: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != 32:  # noqa: PLR2004 - 256 bits, the size of every key derived from it
        raise SettingsError("EXAOPS_FLEET_SECRET must be 64 hex digits")
    return secret
