"""Answers that the gateway gives by itself, in the error shape of the OpenAI API."""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus

import msgspec


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request goes no further."""

    status: int
    code: str
    message: str
    retry_after_seconds: int | None = None

    @property
    def type(self) -> str:
        """The API's coarse class of errors."""
        if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return "server_error"
        if self.status == HTTPStatus.UNAUTHORIZED:
            return "authentication_error"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "invalid_request_error"

    def body(self) -> bytes:
        """JSON text of the answer."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": None,
                    "code": self.code,
                }
            }
        )


MALFORMED = Refusal(400, "malformed_request", "This is not a valid HTTP/1.1 request.")
HOST_REQUIRED = Refusal(400, "malformed_request", "Exactly one Host header is required.")
CODING_UNKNOWN = Refusal(501, "unsupported_transfer_coding", "Only chunked is understood.")
EXPECTATION_UNKNOWN = Refusal(417, "unknown_expectation", "Only 100-continue is understood.")
VERSION_UNKNOWN = Refusal(505, "unsupported_http_version", "Use HTTP/1.1.")
HEAD_TOO_LARGE = Refusal(431, "head_too_large", "The request's header is too large.")
BODY_TOO_LARGE = Refusal(413, "body_too_large", "The request's body is too large.")
TOO_SLOW = Refusal(408, "request_timeout", "The request did not arrive in time.")
CLOSING = frozenset(
    {
        MALFORMED,
        HOST_REQUIRED,
        CODING_UNKNOWN,
        EXPECTATION_UNKNOWN,
        VERSION_UNKNOWN,
        HEAD_TOO_LARGE,
        BODY_TOO_LARGE,
        TOO_SLOW,
    }
)
"""After these the connection ends: what follows cannot be told from a body or another request."""

UNKNOWN_PATH = Refusal(404, "unknown_url", "There is nothing at this address.")
WRONG_METHOD = Refusal(405, "method_not_allowed", "This address does not take this method.")
NO_KEY = Refusal(401, "missing_api_key", "Send your API key in the header: Authorization: Bearer KEY")
BAD_KEY = Refusal(401, "invalid_api_key", "This API key is not valid.")
KEYS_UNKNOWN = Refusal(503, "keys_not_loaded", "API keys cannot be checked yet; try again shortly.", 2)
BAD_CONTINUE = Refusal(400, "invalid_continue_header", "x-continue-stream must be true or false.")
BAD_CLASS = Refusal(
    400, "invalid_traffic_class", "x-traffic-class must be interactive, batch or long-context."
)
BAD_SESSION = Refusal(400, "invalid_session_id", "A session id must be 1 to 128 of A-Z a-z 0-9 . _ : -")
BAD_JSON = Refusal(400, "invalid_json", "The body is not valid JSON.")
NOTHING_SERVES = Refusal(503, "no_replica", "No replica serves this model at present.", 5)
UNREACHABLE = Refusal(503, "no_replica_reachable", "No replica could be reached.", 2)
OVERLOADED = Refusal(429, "overloaded", "All replicas of this model are busy.", 1)
LONG_PROMPTS_QUEUE = Refusal(429, "overloaded", "Too many long prompts are being computed.", 5)
WAITING_ROOM_FULL = Refusal(429, "overloaded", "Too many requests are waiting.", 2)
UPSTREAM_BROKEN = Refusal(502, "upstream_broken", "The replica's answer could not be read.")
UPSTREAM_LATE = Refusal(504, "first_byte_timeout", "The replica did not answer in time.")

_INTERRUPTED = "The replica failed in the middle of the answer."


def interrupted_event(why_not_continued: str = "") -> bytes:
    """Last event of a stream that cannot be completed. No `[DONE]` follows."""
    text = f"{_INTERRUPTED} It was not continued: {why_not_continued}." if why_not_continued else _INTERRUPTED
    return b"data: %b\n\n" % Refusal(502, "upstream_interrupted", text).body()


INTERRUPTED_EVENT = interrupted_event()


def unknown_model(name: str) -> Refusal:
    """404 for a model that nothing here has ever served."""
    return Refusal(404, "model_not_found", f"The model {name[:200]!r} does not exist.")


def quota_exceeded(what: str, wait_seconds: float) -> Refusal:
    """429 for a key that uses all that it may: `concurrency` or `rate`."""
    seconds = max(1, math.ceil(wait_seconds))
    if what == "concurrency":
        return Refusal(429, "concurrency_limit", "This API key has as many requests open as it may.", seconds)
    return Refusal(429, "token_rate_limit", "This API key has used its tokens for now.", seconds)


def bad_field(detail: str) -> Refusal:
    """400 for a field that the router has to understand and cannot."""
    return Refusal(400, "invalid_request", detail[:300])
