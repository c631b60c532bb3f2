"""Optimistic concurrency: a deployment's `generation`, as ETag or in the body."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.errors import PreconditionFailedError
from exaserve_ops.lib.errors import StaleError

_TAG = re.compile(r'(?:W/)?"(\d{1,18})"')


def stamp(response: Response, generation: int) -> Response:
    """Put the ETag of a generation on a response."""
    response["ETag"] = f'"{generation}"'
    return response


def if_match(request: Request) -> int | None:
    """Return the generation that `If-Match` demands; `None` where it demands none, or any (`*`).

    Raises `PreconditionFailedError` for a tag that no generation ever had.
    """
    text = request.headers.get("If-Match", "").strip()
    if text in {"", "*"}:
        return None
    match = _TAG.fullmatch(text)
    if match is None:
        raise PreconditionFailedError(f'If-Match is {text!r}; give the ETag of the object, such as "7".')
    return int(match.group(1))


@contextmanager
def precondition(request: Request) -> Iterator[None]:
    """Answer 412 rather than 409 to a stale generation that came in `If-Match`."""
    try:
        yield
    except StaleError as error:
        if "If-Match" in request.headers:
            raise PreconditionFailedError(str(error)) from error
        raise
