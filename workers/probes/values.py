"""Single values as vendors' tools print them: read, or `None` with a note; never 0 in place of unknown."""

from __future__ import annotations

import re
from collections.abc import Callable

_MEBIBYTE = 1 << 20
_BYTES = {
    "": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "mib": 1 << 20,
    "g": 1 << 30, "gb": 1 << 30, "gib": 1 << 30, "tb": 1 << 40, "tib": 1 << 40,
}  # fmt: skip
_LARGEST = 1 << 53
"""Above it no figure of a machine is real, and JSON readers begin to round."""
_MOST_PROCESSES = 1 << 22
_TEXT_CHARACTERS = 120
_NOTE_CHARACTERS = 60

_QUANTITY = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,9})?)\s*([A-Za-z%/°]{0,8})")
_ABSENT = re.compile(
    r"\[?\s*(n/?a|none|not[ _]supported|not available|unknown"
    r"|requested functionality has been deprecated)\s*\]?",
    re.IGNORECASE,
)
_FAULT = re.compile(
    r"\[?\s*(err!?|unknown error|gpu is lost|gpu requires reset|insufficient permissions"
    r"|timeout|failed)\s*\]?",
    re.IGNORECASE,
)


def clean_text(text: str) -> str:
    """The printable part of a value, cut to a sane length."""
    return "".join(c for c in text.strip() if c.isprintable())[:_TEXT_CHARACTERS]


def is_absent(text: str) -> bool:
    """Whether it says that there is no such value: normal for most cards in most fields."""
    return not text.strip() or _ABSENT.fullmatch(text.strip()) is not None


def is_fault(text: str) -> bool:
    """Whether it says that the value could not be had just now: the card may be ill."""
    return _FAULT.fullmatch(text.strip()) is not None


def parse_quantity(text: str) -> tuple[float, str] | None:
    """A number and its unit, such as (38.0, "C"); `None` for everything else."""
    match = _QUANTITY.fullmatch(text.strip())
    return None if match is None else (float(match[1]), match[2])


def parse_size_bytes(text: str, *, unit: str = "") -> int | None:
    """Bytes of `40960 MiB`; a number alone is in `unit`. Vendors write MB and mean MiB."""
    quantity = parse_quantity(text)
    scale = None if quantity is None else _BYTES.get((quantity[1] or unit).lower())
    if quantity is None or scale is None or quantity[0] * scale > _LARGEST:
        return None
    return int(quantity[0] * scale)


def parse_pid(text: str) -> int | None:
    """A process id that Linux could have given."""
    text = text.strip()
    pid = int(text) if re.fullmatch("[0-9]{1,8}", text) else 0
    return pid if 0 < pid <= _MOST_PROCESSES else None


class Fields:
    """Reads the fields of one device through a look-up by name, and collects what went wrong.

    Each reader takes several names, since they changed from release to release: the first that holds
    a value counts. A fault is always noted, an absent value only where the field is `needed`.
    """

    def __init__(self, find: Callable[[str], str | None]) -> None:
        self._find = find
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """One for each field that could not be read."""
        return tuple(self._notes)

    def text(self, label: str, *names: str, needed: bool = False) -> str | None:
        """The value as text."""
        seen = [value.strip() for value in map(self._find, names) if value is not None]
        for value in seen:
            if not is_absent(value) and not is_fault(value):
                return clean_text(value) or None
        faults = [value for value in seen if is_fault(value)]
        if faults:
            self.note(label, faults[0])
        elif needed:
            self.note(label, seen[0] if seen else "")
        return None

    def number(self, label: str, *names: str) -> float | None:
        """The number in front of any unit."""
        text = self.text(label, *names)
        quantity = None if text is None else parse_quantity(text)
        if text is not None and quantity is None:
            self.note(label, text)
        return None if quantity is None else quantity[0]

    def count(self, label: str, *names: str) -> int | None:
        """A whole number."""
        number = self.number(label, *names)
        return None if number is None or number > _LARGEST else int(number)

    def ratio(self, label: str, *names: str) -> float | None:
        """A percentage as 0-1; more than that is no reading."""
        number = self.number(label, *names)
        if number is not None and number > 100:  # noqa: PLR2004 - percent
            self.note(label, f"{number} %")
            return None
        return None if number is None else number / 100

    def size_bytes(self, label: str, *names: str, unit: str = "", needed: bool = False) -> int | None:
        """A size in bytes; a number alone is in `unit`."""
        text = self.text(label, *names, needed=needed)
        size = None if text is None else parse_size_bytes(text, unit=unit)
        if text is not None and size is None:
            self.note(label, text)
        return size

    def switch(self, label: str, *names: str) -> bool | None:
        """`Enabled` or `Disabled`."""
        text = self.text(label, *names)
        return None if text is None else text.lower() in ("enabled", "on", "true")

    def note(self, label: str, value: str) -> None:
        """Say that a field could not be read, and what stood there."""
        self._notes.append(f"{label}: {clean_text(value)[:_NOTE_CHARACTERS] or 'missing'}")
