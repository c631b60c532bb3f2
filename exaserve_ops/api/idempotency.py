"""`Idempotency-Key`: the same POST sent twice acts once and is answered alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from django.contrib.auth.models import AbstractUser
from django.db import transaction
from django.utils.crypto import salted_hmac
from rest_framework.exceptions import ValidationError
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.access.models import IdempotencyRecord
from exaserve_ops.access.selectors import find_answer
from exaserve_ops.access.services import lock_idempotency_key, remember_answer
from exaserve_ops.api.errors import KeyReusedError, RepeatedSecretError
from exaserve_ops.lib import clock

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotency-Replayed"
MAX_KEY_CHARACTERS = 200
NOT_YET = 202

Action = TypeVar("Action", bound=Callable[..., Response])


def acts_once(action: Action) -> Action:
    """Make a POST action answer a repetition with what it answered first.

    Its effect and the record of its answer are one transaction, so there is never one without the
    other; copies sent at the same time wait for the first. A refusal is not kept, nor is 202: nothing
    happened yet.
    """
    return _guard(action, answer_is_secret=False)


def acts_once_with_secret(action: Action) -> Action:
    """Like `acts_once`, for answers with a secret: those are not kept, so a repetition is told so (409)."""
    return _guard(action, answer_is_secret=True)


def _guard(action: Action, *, answer_is_secret: bool) -> Action:
    @wraps(action)
    def guarded(view: Any, request: Request, *args: Any, **kwargs: Any) -> Response:  # noqa: ANN401 - any view
        key = request.headers.get(HEADER)
        if key is None:
            return action(view, request, *args, **kwargs)
        _check(key)
        digest = _digest(request)
        user = cast("AbstractUser", request.user)
        with transaction.atomic():
            lock_idempotency_key(user, key)
            record = find_answer(user, key)
            if record is not None:
                return _replay(record, digest)
            response = action(view, request, *args, **kwargs)
            if response.status_code == NOT_YET:
                return response
            body = {"secret": True} if answer_is_secret else json.loads(JSONRenderer().render(response.data))
            remember_answer(
                user=user,
                key=key,
                request_sha256=digest,
                status=response.status_code,
                body=body,
                now=clock.now(),
            )
        return response

    guarded.acts_once = True  # type: ignore[attr-defined]  # read by the test that walks all routes
    return cast("Action", guarded)


def _check(key: str) -> None:
    if not 0 < len(key) <= MAX_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
        message = f"give 1 to {MAX_KEY_CHARACTERS} printable ASCII characters, such as a UUID"
        raise ValidationError({HEADER: [message]})


def _digest(request: Request) -> str:
    body = json.dumps(request.data, sort_keys=True, ensure_ascii=True)
    # Keyed: a body may hold a password, and nobody who reads the record shall try words against it.
    text = f"{request.method} {request.path}\n{body}"
    return salted_hmac("exaops.idempotency", text, algorithm="sha256").hexdigest()


def _replay(record: IdempotencyRecord, digest: str) -> Response:
    if record.request_sha256 != digest:
        raise KeyReusedError(f"This {HEADER} was used for another request; use a new one.")
    if record.response_body == {"secret": True}:
        raise RepeatedSecretError(
            "This request was carried out before. Its answer held a secret that is shown only once and not "
            "kept: revoke what was made then, and make a new one under a new key."
        )
    response = Response(record.response_body, status=record.response_status)
    response[REPLAYED_HEADER] = "true"
    return response
