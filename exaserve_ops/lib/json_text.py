"""JSON that people paste, read so that whatever comes of it can be shown and kept."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str) -> Any:  # noqa: ANN401 - JSON may be anything
    """Parse it; NaN and infinities come as text. Raises `ValueError`, also where it is nested too deeply."""
    try:
        value = json.loads(text, parse_constant=str)
        check_characters(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def check_characters(value: Any) -> None:  # noqa: ANN401 - of parsed JSON
    """Raise `ValueError` for half a surrogate pair: it has no UTF-8, so no page and no database takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half of a surrogate pair, which is no character") from error
