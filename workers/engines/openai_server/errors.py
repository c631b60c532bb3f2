"""Refusals in the shape that OpenAI clients understand."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response


class ApiError(Exception):
    """A request that is answered with an error body; `status` is the HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """Describe the refusal; `param` names the field at fault, `code` is for programs."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Refusal of a request that can never be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str) -> ApiError:
    """Refusal of a request that may be answered later or elsewhere."""
    return ApiError(503, message, code=code)


def error_body(error: ApiError) -> dict[str, dict[str, str | None]]:
    """Body of an error reply."""
    return {
        "error": {
            "message": error.message,
            "type": _error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> Response:
    """Reply with the error's status and body; a 503 says when to try again."""
    headers: Mapping[str, str] = (
        {"retry-after": "1"} if error.status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    )
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        media_type="application/json",
        headers=headers,
    )


def _error_type(status: int) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
