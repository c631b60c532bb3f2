"""A form field for JSON that people type, which refuses whatever could not be kept or shown."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from django import forms

from exaserve_ops.lib.json_text import read_json

_MOST_CHARACTERS = 100_000
_MOST_LEVELS = 32


class JsonTextField(forms.JSONField):
    """JSON of bounded length and depth, with nothing in it that a database refuses.

    Django's own field fails with an exception on deep nesting, on numbers of thousands of digits and, when
    it is saved, on infinities and null characters.
    """

    default_error_messages: ClassVar[dict[str, Any]] = {
        "invalid": f"Give JSON of at most {_MOST_CHARACTERS:,} characters, nested at most {_MOST_LEVELS} "
        "deep, without infinite numbers and null characters."
    }

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - whatever a field takes
        super().__init__(**options | {"decoder": _BoundedDecoder})


class _BoundedDecoder(json.JSONDecoder):
    """Reads what the field takes. The field reads twice, once to show it again: both go through here."""

    def decode(self, s: str, *_: Any) -> Any:  # noqa: ANN401 - JSON may be anything
        """Parse it. Raises `json.JSONDecodeError`, the one error that the field knows."""
        try:
            value = _read(s)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), s[:1], 0) from error
        return value


def _read(text: str) -> Any:  # noqa: ANN401 - JSON may be anything
    if len(text) > _MOST_CHARACTERS:
        raise ValueError("it is too long")
    value = read_json(text)
    _check_levels(value)
    json.dumps(value, allow_nan=False)  # an infinity raises
    return value


def _check_levels(value: Any) -> None:  # noqa: ANN401 - of parsed JSON
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += [*one, *one.values()]
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, str) and "\0" in one:
                raise ValueError("it has a null character")
        if not inner:
            return
        level = inner
    raise ValueError("it is nested too deeply")
