"""Typed engine options: known names, types, ranges, and how each becomes a flag."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from workers.engines.base import EngineOptionError, EngineOptions
from workers.protocol.confidential import find_secret

AGENT_FLAGS = (
    "--holder",
    "--host",
    "--kv-disk-dir",
    "--kv-pool-bytes",
    "--kv-pool-dir",
    "--port",
    "--model-dir",
    "--model-digest",
    "--served-model-name",
    "--memory-bytes",
    "--weights-cache",
)
"""What the agent itself passes: where an engine listens is never a deployment's choice."""
EXTRA_ARGUMENTS = "extra_arguments"
"""Option that every engine takes: text that is split like a shell line and put after the flags."""


@dataclass(frozen=True, slots=True)
class IntegerOption:
    """A whole number in a range, both ends included."""

    lowest: int
    highest: int

    def to_text(self, name: str, value: object) -> str:
        """Return the value as a flag's argument. Raises `EngineOptionError`."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise EngineOptionError(f"{name} must be a whole number, not {value!r}")
        if not self.lowest <= value <= self.highest:
            raise EngineOptionError(f"{name} must be from {self.lowest} to {self.highest}, not {value}")
        return str(value)


@dataclass(frozen=True, slots=True)
class NumberOption:
    """A number in a range, both ends included."""

    lowest: float
    highest: float

    def to_text(self, name: str, value: object) -> str:
        """Return the value as a flag's argument. Raises `EngineOptionError`."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise EngineOptionError(f"{name} must be a number, not {value!r}")
        if not self.lowest <= value <= self.highest:
            raise EngineOptionError(f"{name} must be from {self.lowest:g} to {self.highest:g}, not {value}")
        return repr(value)


@dataclass(frozen=True, slots=True)
class ChoiceOption:
    """One of a few words."""

    choices: tuple[str, ...]

    def to_text(self, name: str, value: object) -> str:
        """Return the value as a flag's argument. Raises `EngineOptionError`."""
        if value not in self.choices:
            raise EngineOptionError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}")
        return str(value)


@dataclass(frozen=True, slots=True)
class SwitchOption:
    """On or off: the flag is there or not."""

    def to_text(self, name: str, value: object) -> str:
        """Return `true` or nothing. Raises `EngineOptionError`."""
        if not isinstance(value, bool):
            raise EngineOptionError(f"{name} must be true or false, not {value!r}")
        return "true" if value else ""


Option = IntegerOption | NumberOption | ChoiceOption | SwitchOption


def option_arguments(known: Mapping[str, Option], options: EngineOptions) -> list[str]:
    """Return the flags of all options, in order of name. Raises `EngineOptionError`."""
    arguments: list[str] = []
    for name in sorted(options):
        if name == EXTRA_ARGUMENTS:
            continue
        option = known.get(name)
        if option is None:
            names = ", ".join(sorted([*known, EXTRA_ARGUMENTS]))
            raise EngineOptionError(f"unknown option {name}; this engine knows {names}")
        text = option.to_text(name, options[name])
        flag = "--" + name.replace("_", "-")
        if not isinstance(option, SwitchOption):
            arguments.append(f"{flag}={text}")
        elif text:
            arguments.append(flag)
    return arguments + _extra_arguments(options)


def _extra_arguments(options: EngineOptions) -> list[str]:
    value = options.get(EXTRA_ARGUMENTS, "")
    if not isinstance(value, str):
        raise EngineOptionError(f"{EXTRA_ARGUMENTS} must be text, not {value!r}")
    try:
        arguments = shlex.split(value)
    except ValueError as error:
        raise EngineOptionError(f"{EXTRA_ARGUMENTS} cannot be split: {error}") from error
    secret = find_secret(value)
    if secret:
        # The command line can be read by everyone on the machine.
        raise EngineOptionError(f"{EXTRA_ARGUMENTS} may not hold a secret ({secret})")
    for argument in arguments:
        flag = argument.partition("=")[0]
        # argparse takes any unambiguous beginning of a flag for the flag.
        if flag.startswith("--") and any(own.startswith(flag) for own in AGENT_FLAGS):
            raise EngineOptionError(f"{EXTRA_ARGUMENTS} may not hold {flag}: the agent decides that")
    return arguments
