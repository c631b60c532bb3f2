"""Bodies of requests: JSON, strict and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rest_framework import status
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import JSONParser

from exaserve_ops.lib.json_text import check_characters

MAX_BODY_BYTES = 1024 * 1024


class BodyTooLargeError(APIException):
    """More than any request of this API needs."""

    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_detail = f"The body is over {MAX_BODY_BYTES} bytes."
    default_code = "too_large"


class BoundedJSONParser(JSONParser):
    """Reads no more than it may, and answers 400 to nesting that would exhaust the stack.

    Also to characters that neither an answer nor the database could hold.
    """

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - the base class's signature
        """Return the parsed body. Raises `ParseError` or `BodyTooLargeError`."""
        request = (parser_context or {}).get("request")
        declared = request.META.get("CONTENT_LENGTH") if request is not None else None
        if declared and int(declared) > MAX_BODY_BYTES:
            raise BodyTooLargeError
        try:
            parsed = super().parse(stream, media_type, dict(parser_context or {}))
            check_characters(parsed)
        except ValueError as error:
            raise ParseError(f"This JSON is not taken: {error}.") from error
        except RecursionError as error:
            raise ParseError("The JSON is nested too deeply.") from error
        return parsed
