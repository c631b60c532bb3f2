"""Kinds of values that engine options take. Each checks a value and gives it as a flag's argument."""

from __future__ import annotations

import json
from dataclasses import dataclass


class EngineOptionError(ValueError):
    """An engine option that the engine does not know, or whose value is out of range."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, slots=True)
class IntegerOption:
    """A whole number in a range, both ends included."""

    lowest: int
    highest: int

    def to_text(self, name: str, value: object) -> str:
        """Return the value as a flag's argument. Raises `EngineOptionError`."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise EngineOptionError(f"{name} must be a whole number, not {value!r}", name)
        if not self.lowest <= value <= self.highest:
            raise EngineOptionError(f"{name} must be from {self.lowest} to {self.highest}, not {value}", name)
        return str(value)

    @property
    def words(self) -> str:
        """What may be given, for people."""
        return f"a whole number from {self.lowest:,} to {self.highest:,}"


@dataclass(frozen=True, slots=True)
class NumberOption:
    """A number in a range, both ends included."""

    lowest: float
    highest: float

    def to_text(self, name: str, value: object) -> str:
        """Return the value as a flag's argument. Raises `EngineOptionError`."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise EngineOptionError(f"{name} must be a number, not {value!r}", name)
        if not self.lowest <= value <= self.highest:
            raise EngineOptionError(
                f"{name} must be from {self.lowest:g} to {self.highest:g}, not {value}", name
            )
        return repr(value)

    @property
    def words(self) -> str:
        """What may be given, for people."""
        return f"a number from {self.lowest:g} to {self.highest:g}"


@dataclass(frozen=True, slots=True)
class ChoiceOption:
    """One of a few words."""

    choices: tuple[str, ...]

    def to_text(self, name: str, value: object) -> str:
        """Return the value as a flag's argument. Raises `EngineOptionError`."""
        if value not in self.choices:
            raise EngineOptionError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}", name)
        return str(value)

    @property
    def words(self) -> str:
        """What may be given, for people."""
        return f"one of {', '.join(self.choices)}"


@dataclass(frozen=True, slots=True)
class SwitchOption:
    """On or off: the flag is there or not."""

    def to_text(self, name: str, value: object) -> str:
        """Return `true` or nothing. Raises `EngineOptionError`."""
        if not isinstance(value, bool):
            raise EngineOptionError(f"{name} must be true or false, not {value!r}", name)
        return "true" if value else ""

    @property
    def words(self) -> str:
        """What may be given, for people."""
        return "true or false"


@dataclass(frozen=True, slots=True)
class TextOption:
    """One line of text that an engine understands, such as the name of a parser."""

    longest: int = 400

    def to_text(self, name: str, value: object) -> str:
        """Return the value as a flag's argument. Raises `EngineOptionError`."""
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise EngineOptionError(f"{name} must be a line of text, not {value!r}", name)
        if len(value) > self.longest:
            raise EngineOptionError(f"{name} has {len(value)} characters, at most {self.longest}", name)
        return value

    @property
    def words(self) -> str:
        """What may be given, for people."""
        return "text"


@dataclass(frozen=True, slots=True)
class JsonOption:
    """A JSON object, as text."""

    longest: int = 8000

    def to_text(self, name: str, value: object) -> str:
        """Return the value as a flag's argument. Raises `EngineOptionError`."""
        if not isinstance(value, str) or len(value) > self.longest:
            raise EngineOptionError(f"{name} must be a JSON object as text, not {value!r:.80}", name)
        self.read(name, value)
        return value

    @staticmethod
    def read(name: str, text: str) -> dict[str, object]:
        """Return the object. Raises `EngineOptionError`."""
        try:
            found = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise EngineOptionError(f"{name} is no JSON: {error}", name) from error
        if not isinstance(found, dict):
            raise EngineOptionError(f"{name} must be a JSON object", name)
        return found

    @property
    def words(self) -> str:
        """What may be given, for people."""
        return "a JSON object"


Kind = IntegerOption | NumberOption | ChoiceOption | SwitchOption | TextOption | JsonOption


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is none of JSON's numbers")
