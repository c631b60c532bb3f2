"""Who may ask what: deny by default, decided on a request's head, before its body is read."""

from __future__ import annotations

import enum
import itertools
import secrets
from collections.abc import Sequence

from exaserve_ops.adapters.api_key_table import ApiKeyTable
from exaserve_ops.gateway import headers, refusals
from exaserve_ops.gateway.headers import FORWARDED, is_request_id, is_session_id
from exaserve_ops.gateway.refusals import Refusal
from exaserve_ops.gateway.requests import Request
from exaserve_ops.routing.domain.records import BATCH, LONG_CONTEXT, KeyRecord

_BEARER = b"bearer "
_BATCH = BATCH.encode()
_LONG_CONTEXT = LONG_CONTEXT.encode()
_CLASSES = frozenset({b"interactive", _BATCH, _LONG_CONTEXT})


class Access(enum.Enum):
    """Who may use an endpoint."""

    PUBLIC = "public"
    KEY = "key"
    LOOPBACK_OR_KEY = "loopback or key"


class Endpoint(enum.Enum):
    """Everything that exists here: method, path, and who may use it. All else is 404."""

    CHAT = (b"POST", b"/v1/chat/completions", Access.KEY)
    COMPLETIONS = (b"POST", b"/v1/completions", Access.KEY)
    MODELS = (b"GET", b"/v1/models", Access.KEY)
    MODEL = (b"GET", b"/v1/models/", Access.KEY)
    """The model's name follows, which may hold slashes of its own."""
    HEALTH = (b"GET", b"/health", Access.PUBLIC)
    METRICS = (b"GET", b"/metrics", Access.LOOPBACK_OR_KEY)

    def __init__(self, method: bytes, path: bytes, access: Access) -> None:
        self.method = method
        self.path = path
        self.access = access


_BY_PATH = {endpoint.path: endpoint for endpoint in Endpoint if endpoint is not Endpoint.MODEL}


def endpoint_of(path: bytes) -> Endpoint | None:
    """What a path leads to; `None` where there is nothing."""
    found = _BY_PATH.get(path)
    if found is None and path.startswith(Endpoint.MODEL.path) and path != Endpoint.MODEL.path:
        return Endpoint.MODEL
    return found


def _is_forwarded(request: Request) -> bool:
    """Whether a proxy says that it passes somebody else on: one on this host makes everybody local."""
    return any(name in request.known for name in FORWARDED)


class Admission:
    """Checks heads against the table of endpoints and the table of keys."""

    def __init__(
        self,
        keys: ApiKeyTable,
        *,
        body_bytes: int,
        session_headers: Sequence[bytes] = (b"x-session-id",),
        continues: bool = False,
    ) -> None:
        """`continues`: whether streams are continued that do not say."""
        self._keys = keys
        self._body_bytes = body_bytes
        self._session_headers = session_headers
        self._continues = continues
        self._request_id_prefix = secrets.token_hex(8)
        self._request_numbers = itertools.count(1)

    def check(self, request: Request, *, is_loopback: bool) -> Refusal | None:
        """Check a head, and fill in what it says: request id, session id, key."""
        request.path = request.target.partition(b"?")[0]
        self._name(request, request.known.get(b"x-request-id"))
        return (
            self._check_message(request)
            or self._check_access(request, is_loopback=is_loopback)
            or self._check_session(request)
            or self._check_class(request)
            or self._check_continuation(request)
        )

    def readmit(self, request: Request, token: bytes, asked_class: bytes, given_id: bytes | None) -> bool:
        """Admit another request with a head that was admitted; `False` if that needs a closer look.

        Of what a head says only its key may have become another one, or none.
        """
        key = self._keys.find(token)
        if key is None or len(request.body) > self._body_bytes:
            return False
        self._name(request, given_id)
        self._take_key(request, key, asked_class)
        return True

    def _name(self, request: Request, given: bytes | None) -> None:
        if given is not None and is_request_id(given):  # repeated ones are joined by a comma: refused
            request.request_id = given
        else:
            number = next(self._request_numbers)
            request.request_id = f"{self._request_id_prefix}-{number:x}".encode()

    def _check_message(self, request: Request) -> Refusal | None:
        """Judge what the parser lets through, but a relay must not guess about."""
        known = request.known
        if request.version not in {"1.1", "1.0"}:
            return refusals.VERSION_UNKNOWN
        if b"host" not in known or b"host" in request.repeated:
            return refusals.HOST_REQUIRED
        if known.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            return refusals.CODING_UNKNOWN
        if known.get(b"expect", b"100-continue").lower() != b"100-continue":
            return refusals.EXPECTATION_UNKNOWN
        if int(known.get(b"content-length", b"0")) > self._body_bytes:
            return refusals.BODY_TOO_LARGE
        return None

    def _check_access(self, request: Request, *, is_loopback: bool) -> Refusal | None:
        endpoint = endpoint_of(request.path)
        if endpoint is None:
            return refusals.UNKNOWN_PATH
        if endpoint.method != request.method:
            return refusals.WRONG_METHOD
        if endpoint.method == b"POST" and request.version != "1.1":
            return refusals.VERSION_UNKNOWN  # answers are in chunks, which 1.0 cannot read
        if endpoint.access is Access.PUBLIC:
            return None
        if endpoint.access is Access.LOOPBACK_OR_KEY and is_loopback and not _is_forwarded(request):
            return None
        return self._check_key(request)

    def _check_key(self, request: Request) -> Refusal | None:
        given = request.known.get(b"authorization", b"")
        if b"authorization" in request.repeated or given[: len(_BEARER)].lower() != _BEARER:
            return refusals.NO_KEY
        if not self._keys.loaded:
            return refusals.KEYS_UNKNOWN
        key = self._keys.find(given[len(_BEARER) :].strip())
        if key is None:
            return refusals.BAD_KEY
        self._take_key(request, key, request.known.get(headers.TRAFFIC_CLASS, b""))
        return None

    def _take_key(self, request: Request, key: KeyRecord, asked_class: bytes) -> None:
        """A caller may ask for less than its key is given, never for more."""
        request.key = key
        asked_class = asked_class.lower()
        request.is_batch = key.traffic_class == BATCH or asked_class == _BATCH
        request.is_long = asked_class == _LONG_CONTEXT

    def _check_session(self, request: Request) -> Refusal | None:
        """Take the first session header that is there, in the order of the settings."""
        for name in self._session_headers:
            given = request.known.get(name)
            if given is None:
                continue
            if name in request.repeated or not is_session_id(given):
                return refusals.BAD_SESSION
            request.session_id = given.decode()
            return None
        return None

    def _check_class(self, request: Request) -> Refusal | None:
        """A misspelt class must not have batch work pass for somebody's who waits for it."""
        given = request.known.get(headers.TRAFFIC_CLASS, b"interactive")
        return None if given.lower() in _CLASSES else refusals.BAD_CLASS

    def _check_continuation(self, request: Request) -> Refusal | None:
        given = request.known.get(headers.CONTINUE)
        if given is None:
            request.is_continued = self._continues
            return None
        request.is_continued = given.lower() == b"true"
        return None if given.lower() in {b"true", b"false"} else refusals.BAD_CONTINUE
