"""A table of an engine's options: flags, defaults, meaning, and the versions that have each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from workers.protocol.confidential import find_secret
from workers.protocol.engines.kinds import EngineOptionError, Kind, SwitchOption

Version = tuple[int, ...]
Options = Mapping[str, str | int | float | bool]

EXTRA_ARGUMENTS = "extra_arguments"
"""Option that every engine takes: text that is split like a shell line and put after the flags."""
ENVIRONMENT = "environment"
"""Option of engines that are not ours: `NAME=value`, split like a shell line."""
_SHORT = len("-n")
_NUMBERS = re.compile(r"\d+")
_NAME = re.compile(r"^[A-Z][A-Z0-9_]{0,127}$")
_NAMES_CODE = re.compile(
    r"(?:_PLUGINS?|_PLUGIN_DIR|_PLUGIN_PATH|_MODULE_DIR|_SO_PATH|_LIBRARIES|_PTXAS\w*_PATH|_NVCC|_EXTENSIONS_DIR"
    r"|_FRONTEND_PATH|_LOGGING_CONFIG_PATH)$"
)
"""Variables of engines and their libraries by which a file is loaded or run."""
NEWEST: Version = ()
"""A version that nobody knows: the newest rows count."""


def read_version(text: str) -> Version:
    """Numbers of `0.32.0+cpu` or `v0.5.9.post1`, three at most; empty where there are none."""
    return tuple(int(part) for part in _NUMBERS.findall(text.partition("+")[0])[:3])


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One option: what it takes, what it means, and how the command line says it."""

    name: str
    kind: Kind
    group: str
    help: str
    default: str
    """What holds where nobody says it, in words."""
    flag: str = ""
    """Empty: as the name, with dashes."""
    off_flag: str = ""
    """Of a switch that is on by default, what turns it off."""
    aliases: tuple[str, ...] = ()
    """Other spellings on a command line, with their dashes."""
    since: Version = ()
    until: Version = ()
    """First version without it; empty: the newest has it."""
    instead: str = ""
    """What to use where it is gone or not there yet."""
    built: bool = False
    """It becomes part of something larger on the command line; its own flag does not exist."""

    @property
    def written(self) -> str:
        """Its flag."""
        return self.flag or "--" + self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.name.replace("_", " ")

    def objection(self, version: Version) -> str:
        """Why this version does not take it; empty if it does."""
        if version == NEWEST:
            return f"{self.name} is gone: {self.instead}" if self.until else ""
        told = ".".join(map(str, version))
        if self.since and version < self.since:
            came = ".".join(map(str, self.since))
            return _and_instead(f"{self.name} came with version {came}, and this is {told}", self.instead)
        if self.until and version >= self.until:
            gone = ".".join(map(str, self.until))
            return _and_instead(f"{self.name} is gone since version {gone}, and this is {told}", self.instead)
        return ""


@dataclass(frozen=True, slots=True)
class EngineTable:
    """All that is known of one engine's command line."""

    engine: str
    title: str
    options: tuple[EngineOption, ...]
    agents_flags: tuple[str, ...]
    """What the agent passes itself, or what would take an engine out of its hands."""
    code_flags: tuple[str, ...] = ()
    """What has an engine run code that is no part of it, whatever its node's operator allows."""
    newest: Version = ()
    """The newest version that the table was compared with; empty: it comes with this product."""
    environment_prefixes: tuple[str, ...] = ()
    """Of variables that a deployment may set."""
    agents_environment: tuple[str, ...] = ()
    """Variables with such a prefix that the agent sets itself."""
    check_together: Callable[[Options], None] | None = None
    """Raises `EngineOptionError` for options that are right each by itself and do not go with one another."""
    by_name: Mapping[str, EngineOption] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Index the options."""
        object.__setattr__(self, "by_name", {option.name: option for option in self.options})

    @property
    def known_names(self) -> tuple[str, ...]:
        """Names of all options, the common ones included."""
        common = (EXTRA_ARGUMENTS, *((ENVIRONMENT,) if self.environment_prefixes else ()))
        return tuple(sorted([*self.by_name, *common]))

    def note_of(self, version: Version) -> str:
        """What is to be said of a version that is newer than the table; empty for others."""
        if not self.newest or version[: len(self.newest)] <= self.newest:
            return ""
        told, known = (".".join(map(str, numbers)) for numbers in (version, self.newest))
        return f"{self.title} {told} is newer than {known}, which its options were compared with"

    def find_flag(self, flag: str) -> EngineOption | None:
        """The option that a flag of a command line stands for, `_` or `-`, with or without `no-`."""
        wanted = _dashed(flag)
        for option in self.options:
            spellings = (option.written, option.off_flag, "--" + option.name, *option.aliases)
            if wanted in {_dashed(spelling) for spelling in spellings if spelling}:
                return option
        return None

    def complete_flag(self, beginning: str) -> tuple[EngineOption, ...]:
        """Options whose flags begin so: argparse takes an unambiguous beginning for the whole."""
        wanted = _dashed(beginning)
        return tuple(option for option in self.options if _dashed(option.written).startswith(wanted))


def option_arguments(table: EngineTable, options: Options, version: Version = NEWEST) -> list[str]:
    """Return the flags of all options, in order of name, checked. Raises `EngineOptionError`."""
    arguments: list[str] = []
    for name in sorted(options):
        if name in (EXTRA_ARGUMENTS, ENVIRONMENT) and name in table.known_names:
            continue
        option = table.by_name.get(name)
        if option is None:
            names = ", ".join(table.known_names)
            raise EngineOptionError(f"unknown option {name}; this engine knows {names}", name)
        objection = option.objection(version)
        if objection:
            raise EngineOptionError(objection, name)
        arguments += _written(option, options[name])
    if table.check_together is not None:
        table.check_together(options)
    read_environment(table, options)
    return arguments + extra_arguments(table, options)


def _written(option: EngineOption, value: object) -> list[str]:
    text = option.kind.to_text(option.name, value)
    if find_secret(text):
        raise EngineOptionError(f"{option.name} may not hold a secret: options are shown", option.name)
    if option.built:
        return []
    if isinstance(option.kind, SwitchOption):
        return [option.written] if text else [option.off_flag] if option.off_flag else []
    return [f"{option.written}={text}"]


def extra_arguments(table: EngineTable, options: Options) -> list[str]:
    """Return the arguments that nobody typed, checked as far as that goes. Raises `EngineOptionError`."""
    value = options.get(EXTRA_ARGUMENTS, "")
    if not isinstance(value, str):
        raise EngineOptionError(f"{EXTRA_ARGUMENTS} must be text, not {value!r}", EXTRA_ARGUMENTS)
    arguments = _split(EXTRA_ARGUMENTS, value)
    secret = find_secret(value)
    if secret:
        # The command line can be read by everyone on the machine.
        raise EngineOptionError(f"{EXTRA_ARGUMENTS} may not hold a secret ({secret})", EXTRA_ARGUMENTS)
    for argument in arguments:
        objection = extra_objection(table, argument.partition("=")[0])
        if objection:
            raise EngineOptionError(objection, EXTRA_ARGUMENTS)
    return arguments


def extra_objection(table: EngineTable, flag: str) -> str:
    """Why a flag may not stand among extra arguments; empty if it may, or is no flag."""
    if not flag.startswith("-") or _is_number(flag):
        return ""
    # `--config.key=value` sets one key of a flag that takes an object.
    wanted = _dashed(flag).partition(".")[0]
    if any(_means(wanted, own) for own in table.agents_flags):
        return f"{EXTRA_ARGUMENTS} may not hold {flag}: the agent decides that"
    typed = table.find_flag(wanted) if table.environment_prefixes else None
    if typed is not None:
        return f"{EXTRA_ARGUMENTS} holds {flag}, which is an option of its own: say {typed.name} = … instead"
    if any(_means(wanted, own) for own in table.code_flags):
        return f"{EXTRA_ARGUMENTS} may not hold {flag}: it would run code that is no part of the engine"
    return ""


def _means(flag: str, own: str) -> bool:
    """Whether argparse may take the one for the other: any beginning of a long flag, and `-n8` for `-n 8`."""
    if flag.startswith("--"):
        return own.startswith(flag)
    return flag == own or (len(own) == _SHORT and flag.startswith(own))


def read_environment(table: EngineTable, options: Options) -> dict[str, str]:
    """Return the variables that a deployment sets for its engine. Raises `EngineOptionError`."""
    value = options.get(ENVIRONMENT, "")
    if not isinstance(value, str):
        raise EngineOptionError(f"{ENVIRONMENT} must be text, not {value!r}", ENVIRONMENT)
    found: dict[str, str] = {}
    for word in _split(ENVIRONMENT, value):
        name, equals, text = word.partition("=")
        if not equals or not _NAME.match(name):
            raise EngineOptionError(f"{ENVIRONMENT}: '{word[:60]}' is not NAME=value", ENVIRONMENT)
        objection = environment_objection(table, name, text)
        if objection:
            raise EngineOptionError(f"{ENVIRONMENT} may not hold {name}: {objection}", ENVIRONMENT)
        found[name] = text
    return found


def environment_objection(table: EngineTable, name: str, value: str) -> str:
    """Why a deployment may not set this variable; empty if it may."""
    if find_secret(f"{name}={value}"):
        return "no secrets here, options are shown; an engine gets its key from its agent"
    if name in table.agents_environment:
        return "the agent sets it"
    if "/" in value and _NAMES_CODE.search(name):
        return "it would run code that is no part of the engine"
    if not name.startswith(table.environment_prefixes):
        return f"only names that begin with {', '.join(table.environment_prefixes)}"
    return ""


def _split(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise EngineOptionError(f"{name} cannot be split: {error}", name) from error


def _dashed(flag: str) -> str:
    """Flag as argparse of these engines compares it: `_` and `-` are the same behind the dashes."""
    body = flag.lstrip("-")
    return flag[: len(flag) - len(body)] + body.replace("_", "-")


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdigit()


def _and_instead(objection: str, instead: str) -> str:
    return f"{objection}; {instead}" if instead else objection


def whole(options: Options, name: str, default: int) -> int:
    """A whole number among checked options."""
    value = options.get(name, default)
    return value if isinstance(value, int) else default


def names_of(options: Sequence[EngineOption], group: str) -> tuple[str, ...]:
    """Names of the options of one group, in the table's order."""
    return tuple(option.name for option in options if option.group == group)
