"""A deployment out of a pasted launch command: what was understood, and what was not and why."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exaserve_ops.serving.domain.import_advice import advise, advise_flag
from exaserve_ops.serving.domain.import_sizes import size_launch
from exaserve_ops.serving.domain.launch_flags import (
    MODEL_FLAGS,
    NODES_FLAGS,
    SERVED_FLAG,
    becomes_nothing,
    long_form,
    stands_alone,
)
from exaserve_ops.serving.domain.launch_objects import OBJECT_FLAGS, read_object
from exaserve_ops.serving.domain.launch_prefix import Prefix, read_prefix
from exaserve_ops.serving.domain.launch_starts import Start
from exaserve_ops.serving.domain.launch_words import is_unexpanded
from exaserve_ops.serving.domain.pasted_secrets import HELD, holds_secret, mask_all, names_secret
from workers.protocol.confidential import MASK, find_secret
from workers.protocol.engines.kinds import EngineOptionError, IntegerOption, NumberOption, SwitchOption
from workers.protocol.engines.option import (
    ENVIRONMENT,
    EXTRA_ARGUMENTS,
    EngineOption,
    EngineTable,
    environment_objection,
    extra_objection,
    read_version,
)
from workers.protocol.engines.tables import TABLES

Value = str | int | float | bool

_COUNT = re.compile(r"^[0-9]{1,9}$")
_COUNTED = {"nodes": "nodes_per_replica"}
"""How counts are called where they become a field, if not by their own name."""
_SCALED = re.compile(r"^([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmgtKMGT])$")
_SCALES = {
    letter: base**power
    for letters, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, letter in enumerate(letters, start=1)
}
_DASHES = ("\u2013", "\u2014", "\u2212")
_CURLY_QUOTES = "\u201c\u201d\u2018\u2019"
_NOT_KEPT = "by its name it is a secret, and those are not kept with a deployment"
_UNWRITTEN = "a shell would have put a value there: write it out"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was said, without secrets, and what became of it."""

    said: str
    became: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A deployment as far as it was understood. `None` and empty: not said."""

    engine: str
    options: Mapping[str, Value] = field(default_factory=dict)
    version: str = ""
    name: str = ""
    model: str = ""
    """Path or name, as it was written."""
    served_name: str = ""
    replicas: int | None = None
    nodes: int = 1
    """That one replica runs on at once."""
    accelerators: int = 1
    """On each of its nodes."""
    accelerator: str = ""
    understood: tuple[Line, ...] = ()
    not_understood: tuple[Line, ...] = ()
    """With the reason."""
    notes: tuple[str, ...] = ()
    """What to know before it is used."""
    problems: tuple[str, ...] = ()
    """Why it would not start."""


class DraftReader:
    """Collects what is said of one deployment; gives the draft in the end."""

    def __init__(self, engine: str, version: str = "") -> None:
        self.table: EngineTable = TABLES[engine]
        self.engine = engine
        self.version = version
        self.options: dict[str, Value] = {}
        self.named: dict[str, str] = {}
        """`model`, `served_name`, `name`, `accelerator`."""
        self.counts: dict[str, int] = {}
        """`replicas`, `nodes` and, on each of them, `accelerators`."""
        self.notes: list[str] = []
        self.secrets: set[str] = set()
        """Values that were recognised as secrets: no line of the draft has them."""
        self._understood: list[Line] = []
        self._not_understood: list[Line] = []
        self._extra: list[str] = []
        self._environment: list[str] = []

    def tell(self, said: str, became: str) -> None:
        """Say what became of something; it is masked in the end, when all secrets are known."""
        self._understood.append(Line(said, became))

    def refuse(self, said: str, why: str) -> None:
        """Say why something was left out."""
        self._not_understood.append(Line(said, why))

    def hide(self, name: str, values: Iterable[str], why: str) -> None:
        """Take no secret: it is dropped, and shown nowhere."""
        self.secrets.update(value for value in values if not is_unexpanded(value))
        self.tell(f"{name} {MASK}" if name.startswith("-") else f"{name}={MASK}", f"nothing: {why}")

    # -- options ---------------------------------------------------------------------------------
    def take_arguments(self, words: Sequence[str]) -> None:
        """Read the arguments of a command line."""
        place = 0
        while place < len(words):
            word = words[place]
            place += 1
            if not word.startswith(("-", *_DASHES)):
                self._take_positional(word)
                continue
            flag, equals, value = word.partition("=")
            following = [value] if equals else _values(words[place:])
            place += self._take_flag(flag, following, given=bool(equals))

    def _take_positional(self, word: str) -> None:
        if any(letter in _CURLY_QUOTES for letter in word):
            self.refuse(word, "it has typographic quotes, which are part of the word: write plain ones")
        elif "model" in self.named:
            self.refuse(word, "it belongs to no option")
        else:
            self.take_named("model", word, said=word)

    def _take_flag(self, flag: str, values: list[str], *, given: bool) -> int:
        """Read one flag; says how many of the words behind it belong to it."""
        if flag.startswith(_DASHES):
            said = " ".join([flag, *values])
            self.refuse(said, f"it begins with a typographic dash ({flag[0]}): write - or --")
            return 0 if given else len(values)
        known = self._take_known(_dashed(flag), flag, values)
        if known is not None:
            return 0 if given else min(known, len(values))
        like = self._find(flag)
        if len(like) != 1:
            self._take_unknown(flag, values, like, given=given)
            return 0 if given else len(values)
        option = like[0]
        switch = isinstance(option.kind, SwitchOption)
        told = bool(values) and (given or not switch or values[0].lower() in ("true", "false"))
        off = _dashed(flag) == option.off_flag
        text = values[0] if told else ("" if not switch else "true")
        self.take_option(option, "false" if off else text, said=f"{flag} {text if told else ''}".strip())
        return 0 if given or not told else 1

    def _take_known(self, dashed: str, flag: str, values: list[str]) -> int | None:
        """Flags that become no option; says how many words they take, `None` if it is none of them."""
        said, first = " ".join([flag, *values[:1]]), values[0] if values else ""
        dashed = long_form(dashed)
        if find_secret(flag):
            self.hide(flag, values, "engines here get a key of their own; make API keys for clients")
            return len(values)
        if dashed == SERVED_FLAG:
            self._take_served(flag, values)
            return len(values)
        if dashed in MODEL_FLAGS[self.engine]:
            self.take_named("model", first, said=said)
        elif dashed in NODES_FLAGS[self.engine]:
            self.take_count("nodes", first, said=said)
        elif dashed in OBJECT_FLAGS:
            self._take_object(dashed, first)
        elif why := becomes_nothing(dashed):
            self.tell(flag if stands_alone(dashed) else said, f"nothing: {why}")
            self.notes += advise_flag(dashed, values)
        else:
            return None
        return 0 if stands_alone(dashed) else 1

    def _take_served(self, flag: str, values: list[str]) -> None:
        self.take_named("served_name", values[0] if values else "", said=" ".join([flag, *values[:1]]))
        if values[1:]:
            self.refuse(" ".join([flag, *values[1:]]), "a deployment has one name: clients ask by the first")

    def _take_object(self, flag: str, text: str) -> None:
        """Flags whose object is made here out of options."""
        try:
            parts = read_object(flag, text)
        except EngineOptionError as error:
            self.refuse(f"{flag} {text}", str(error))
            return
        for part in parts:
            option = self.table.by_name.get(part.option)
            if option is not None:
                self.take_option(option, part.text, said=part.said)
            elif part.became:
                self.tell(part.said, part.became)
            elif names_secret(part.name):
                self.hide(f"{flag} {part.name}", [part.text], _NOT_KEPT)
            else:
                self.refuse(part.said, "no option of this engine is called so")

    def _find(self, flag: str) -> tuple[EngineOption, ...]:
        """The option that a flag is, or those that it may be the beginning of."""
        option = self.table.find_flag(flag)
        if option is not None or not flag.startswith("--"):
            return () if option is None else (option,)
        like = self.table.complete_flag(flag)
        if len(like) == 1:
            self.notes.append(
                f"{flag} is no option; it is the beginning of {like[0].written}, so it is read as that"
            )
        return like

    def _take_unknown(
        self, flag: str, values: list[str], like: Sequence[EngineOption], *, given: bool
    ) -> None:
        said = f"{flag}={values[0]}" if given else " ".join([flag, *values])
        if like:
            flags = ", ".join(option.written for option in like)
            self.refuse(said, f"it may be {flags}: write it out")
        elif any(is_unexpanded(value) for value in values):
            self.refuse(said, _UNWRITTEN)
        elif names_secret(flag):
            self.hide(flag, values, _NOT_KEPT)
        elif objection := extra_objection(self.table, flag):
            self.refuse(said, objection)
        elif holds_secret(said):
            self.refuse(said, HELD)
        else:
            self._extra += [f"{flag}={values[0]}"] if given else [flag, *values]
            self.tell(said, f"{EXTRA_ARGUMENTS}: given to the engine as it is, not checked here")

    def take_option(self, option: EngineOption, text: str, *, said: str) -> None:
        """Take the value of a typed option, checked."""
        objection = _UNWRITTEN if is_unexpanded(text) else option.objection(read_version(self.version))
        if objection or holds_secret(text):
            self.refuse(said, objection or HELD)
            return
        try:
            value = _typed(option, text)
            option.kind.to_text(option.name, value)
        except EngineOptionError as error:
            self.refuse(said, str(error))
            return
        self._note_twice(option.name, self.options.get(option.name), value)
        self.options[option.name] = value
        self.tell(said, f"{option.name} = {value}")

    # -- the rest --------------------------------------------------------------------------------
    def take_prefix(self, prefix: Prefix) -> None:
        """Take what stands before the command."""
        self.secrets.update(prefix.secrets)
        if prefix.said:
            self.tell(prefix.said, prefix.became)
        for said in prefix.unknown:
            self.refuse(said, "variables that stand elsewhere are not known here: write out what it needs")
        self.take_environment(prefix.environment)

    def take_named(self, name: str, text: str, *, said: str) -> None:
        """Take a name: the model, what it is served as, the deployment's own."""
        if is_unexpanded(text) or holds_secret(text):
            self.refuse(said, _UNWRITTEN if is_unexpanded(text) else HELD)
            return
        shortened = text.rstrip("/") or text
        self._note_twice(name.replace("_", " "), self.named.get(name), shortened)
        self.named[name] = shortened
        self.tell(said, f"{name.replace('_', ' ')} {shortened}")

    def take_count(self, name: str, value: object, *, said: str) -> None:
        """Take a number of replicas, nodes or accelerators."""
        text, words = str(value).strip(), _COUNTED.get(name, name)
        if is_unexpanded(text):
            self.refuse(said, _UNWRITTEN)
        elif not _COUNT.match(text) or (name == "nodes" and not int(text)):
            self.refuse(said, f"{words} must be a whole number")
        else:
            self._note_twice(words, self.counts.get(name), int(text))
            self.counts[name] = int(text)
            self.tell(said, f"{words} {int(text)}")

    def take_environment(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Take variables that the engine may have."""
        for name, value in pairs:
            said = f"{name}={value}"
            if names_secret(name) or holds_secret(said):
                self.hide(
                    name,
                    [value],
                    "secrets are not kept with a deployment; engines here get a key of their own",
                )
                continue
            objection = environment_objection(self.table, name, value)
            if not objection and is_unexpanded(value):
                objection = _UNWRITTEN
            if objection:
                self.refuse(said, objection)
                continue
            self._environment.append(said)
            self.tell(said, ENVIRONMENT)

    def _note_twice(self, words: str, before: object, now: object) -> None:
        if before is not None and before != now:
            self.notes.append(f"{words} is said twice, {before} and {now}: the last one counts")

    def draft(self) -> Draft:
        """All of it, without secrets."""
        options = dict(self.options)
        if self._extra:
            options[EXTRA_ARGUMENTS] = shlex.join(self._extra)
        if self._environment:
            options[ENVIRONMENT] = shlex.join(self._environment)
        sizes = size_launch(
            self.engine, options, nodes=self.counts.get("nodes", 1), told=self.counts.get("accelerators")
        )
        notes = [*self.notes, *sizes.notes, *advise(self.engine, options, self.named.get("model", ""))]
        return Draft(
            engine=self.engine,
            options=options,
            version=self.version,
            replicas=self.counts.get("replicas"),
            nodes=sizes.nodes,
            accelerators=sizes.accelerators,
            name=self.named.get("name", ""),
            model=self.named.get("model", ""),
            served_name=self.named.get("served_name", ""),
            accelerator=self.named.get("accelerator", ""),
            understood=self._masked(self._understood),
            not_understood=self._masked(self._not_understood),
            notes=tuple(dict.fromkeys(mask_all(note, self.secrets) for note in notes)),
            problems=sizes.problems,
        )

    def _masked(self, lines: Iterable[Line]) -> tuple[Line, ...]:
        return tuple(
            Line(mask_all(line.said, self.secrets), mask_all(line.became, self.secrets)) for line in lines
        )


def read_start(start: Start) -> DraftReader:
    """Read the command that starts an engine."""
    reader = DraftReader(start.engine, start.version)
    before = start.command.words[: start.before]
    reader.notes += start.command.notes
    reader.take_prefix(read_prefix(before))
    reader.take_environment(start.command.environment)
    reader.take_arguments(start.command.words[start.begin :])
    return reader


def _values(words: Sequence[str]) -> list[str]:
    """Words up to the next flag; a negative number is a value."""
    found: list[str] = []
    for word in words:
        if word.startswith(("-", *_DASHES)) and not word.lstrip("-").replace(".", "", 1).isdigit():
            break
        found.append(word)
    return found


def _dashed(flag: str) -> str:
    body = flag.lstrip("-")
    return flag[: len(flag) - len(body)] + body.replace("_", "-")


def _typed(option: EngineOption, text: str) -> Value:
    """Text as the option's kind has it. Raises `EngineOptionError`."""
    match option.kind:
        case SwitchOption():
            if text.lower() in ("true", "false", "1", "0", ""):
                return text.lower() in ("true", "1", "")
            raise EngineOptionError(f"{option.name} must be true or false, not '{text[:40]}'")
        case IntegerOption():
            return _whole(option.name, text)
        case NumberOption():
            try:
                return float(text)
            except ValueError:
                raise EngineOptionError(f"{option.name} must be a number, not '{text[:40]}'") from None
        case _:
            return text


def _whole(name: str, text: str) -> int:
    scaled = _SCALED.match(text)
    if scaled:
        return int(float(scaled[1]) * _SCALES[scaled[2]])
    try:
        return int(text)
    except ValueError:
        raise EngineOptionError(f"{name} must be a whole number, not '{text[:40]}'") from None
