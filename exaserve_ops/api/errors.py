"""Every refusal has one shape: `{"error": {"code", "message", "fields"?}}`."""

from __future__ import annotations

from typing import Any

from rest_framework import exceptions, status
from rest_framework.response import Response
from rest_framework.views import exception_handler

from exaserve_ops.lib.errors import ConflictError, DeniedError, InvalidInputError, NotFoundError

_STATUS = {
    InvalidInputError: (status.HTTP_400_BAD_REQUEST, "invalid"),
    NotFoundError: (status.HTTP_404_NOT_FOUND, "not_found"),
    ConflictError: (status.HTTP_409_CONFLICT, "conflict"),
    DeniedError: (status.HTTP_403_FORBIDDEN, "denied"),
}


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """Turn an exception into a response; `None` leaves it to Django's 500."""
    for kind, (code, name) in _STATUS.items():
        if isinstance(error, kind):
            body: dict[str, Any] = {"code": name, "message": str(error)}
            if isinstance(error, InvalidInputError):
                body["fields"] = {error.field: [error.message]}
            return Response({"error": body}, status=code)
    response = exception_handler(error, context)
    if response is not None:
        response.data = {"error": _body_of(error, response.data)}
    return response


def _body_of(error: Exception, data: Any) -> dict[str, Any]:
    if isinstance(error, exceptions.ValidationError):
        fields = data if isinstance(data, dict) else {"non_field_errors": data}
        return {"code": "invalid", "message": "Some fields are not right.", "fields": fields}
    detail = data.get("detail", data) if isinstance(data, dict) else data
    return {"code": getattr(detail, "code", "error"), "message": str(detail)}
