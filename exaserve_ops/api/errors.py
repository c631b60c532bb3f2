"""Every refusal has one shape: `{"error": {"code", "message", "fields"?}}`."""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from django.core.exceptions import DisallowedHost, ObjectDoesNotExist, RequestDataTooBig
from django.db import IntegrityError, OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.template.loader import render_to_string
from django.views import defaults
from rest_framework import exceptions, status
from rest_framework.response import Response
from rest_framework.views import exception_handler

from exaserve_ops.lib.errors import ConflictError, DeniedError, InvalidInputError, NotFoundError
from exaserve_ops.lib.lifecycle import IllegalTransitionError

logger = logging.getLogger(__name__)

_UNIQUE_VIOLATION = "23505"
_RETRY_AFTER_SECONDS = 2
_REST_PATH = "/api/v1/"
_INTERNAL = {
    "code": "internal",
    "message": "This failed by a fault of the control plane; the log of its web process says how.",
}

_STATUS: dict[type[Exception], tuple[int, str]] = {
    InvalidInputError: (status.HTTP_400_BAD_REQUEST, "invalid"),
    NotFoundError: (status.HTTP_404_NOT_FOUND, "not_found"),
    ConflictError: (status.HTTP_409_CONFLICT, "conflict"),
    DeniedError: (status.HTTP_403_FORBIDDEN, "denied"),
    IllegalTransitionError: (status.HTTP_409_CONFLICT, "conflict"),
}


class PreconditionFailedError(exceptions.APIException):
    """`If-Match` names another generation than the present one."""

    status_code = status.HTTP_412_PRECONDITION_FAILED
    default_code = "precondition_failed"


class PreconditionRequiredError(exceptions.APIException):
    """The change needs `If-Match` or `generation`."""

    status_code = status.HTTP_428_PRECONDITION_REQUIRED
    default_code = "precondition_required"


class RepeatedSecretError(exceptions.APIException):
    """The request was answered before, with a secret that is shown only once."""

    status_code = status.HTTP_409_CONFLICT
    default_code = "already_answered"


class KeyReusedError(exceptions.APIException):
    """The idempotency key belongs to another request."""

    status_code = status.HTTP_422_UNPROCESSABLE_ENTITY
    default_code = "idempotency_key_reused"


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """Turn an exception into a response; `None` leaves it to Django's 500."""
    response = _domain_refusal(error) or _store_refusal(error)
    if response is not None:
        return response
    response = exception_handler(error, context)
    if response is not None:
        response.data = {"error": _body_of(error, response.data)}
    return response


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer a request that failed by a fault of ours: REST in its common shape, people with a page.

    What went wrong stands in the log alone: it may hold what the caller must not see.
    """
    if request.path.startswith(_REST_PATH):
        return JsonResponse({"error": _INTERNAL}, status=status.HTTP_500_INTERNAL_SERVER_ERROR)
    return defaults.server_error(request)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer a request that cannot even be read: REST in its common shape, people with a page."""
    if not request.path.startswith(_REST_PATH):
        # No context of the request: it may have been refused before anybody was signed in.
        said = {"of_other_host": isinstance(exception, DisallowedHost)}
        return HttpResponseBadRequest(render_to_string("400.html", said))
    if isinstance(exception, RequestDataTooBig):
        most = f"{settings.DATA_UPLOAD_MAX_MEMORY_SIZE:,}"
        error = {"code": "too_large", "message": f"The body is larger than {most} bytes: send less at once."}
        return JsonResponse({"error": error}, status=status.HTTP_413_REQUEST_ENTITY_TOO_LARGE)
    error = {"code": "invalid", "message": "This request cannot be read."}
    return JsonResponse({"error": error}, status=status.HTTP_400_BAD_REQUEST)


def refusal(status_code: int, code: str, message: str) -> Response:
    """Return a refusal in the common shape."""
    return Response({"error": {"code": code, "message": message}}, status=status_code)


def _domain_refusal(error: Exception) -> Response | None:
    for kind, (status_code, code) in _STATUS.items():
        if isinstance(error, kind):
            response = refusal(status_code, code, str(error))
            if isinstance(error, InvalidInputError):
                response.data["error"]["fields"] = {error.field: [error.message]}
            return response
    if isinstance(error, ObjectDoesNotExist):
        return refusal(status.HTTP_404_NOT_FOUND, "not_found", "No such object.")
    return None


def _store_refusal(error: Exception) -> Response | None:
    if isinstance(error, IntegrityError) and _sqlstate(error) == _UNIQUE_VIOLATION:
        message = "Somebody made the same object at the same time: read it, then decide."
        return refusal(status.HTTP_409_CONFLICT, "conflict", message)
    if isinstance(error, OperationalError):
        logger.warning("the database is away or busy", exc_info=error)
        response = refusal(
            status.HTTP_503_SERVICE_UNAVAILABLE, "unavailable", "The database is away or busy; try again."
        )
        response["Retry-After"] = str(_RETRY_AFTER_SECONDS)
        return response
    return None


def _sqlstate(error: IntegrityError) -> str:
    return getattr(error.__cause__, "sqlstate", None) or ""


def _body_of(error: Exception, data: Any) -> dict[str, Any]:  # noqa: ANN401 - DRF's bodies have no type
    if isinstance(error, exceptions.ValidationError):
        fields = data if isinstance(data, dict) else {"non_field_errors": data}
        return {"code": "invalid", "message": "Some fields are not right.", "fields": fields}
    detail = data.get("detail", data) if isinstance(data, dict) else data
    return {"code": getattr(detail, "code", "error"), "message": str(detail)}
