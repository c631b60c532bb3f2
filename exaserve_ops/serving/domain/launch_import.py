"""A deployment out of a pasted launch command: what was understood, and what was not and why."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exaserve_ops.serving.domain.import_advice import advise, advise_flag
from exaserve_ops.serving.domain.import_sizes import describe_prefix, size_launch
from exaserve_ops.serving.domain.launch_words import Command, PasteError, is_unexpanded
from workers.protocol.confidential import MASK, find_secret, mask
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
from workers.protocol.engines.sglang import SGLANG
from workers.protocol.engines.tables import TABLES
from workers.protocol.engines.vllm import VLLM

Value = str | int | float | bool

_STARTS = {
    VLLM: (
        ("vllm", "serve"),
        ("-m", "vllm.entrypoints.openai.api_server"),
        ("-m", "vllm.entrypoints.cli.main", "serve"),
    ),
    SGLANG: (("sglang", "serve"), ("-m", "sglang.launch_server")),
}
_IMAGES = re.compile(r"(?:^|/)(?:vllm-(?:openai|cpu|omni)[\w.-]*|vllm|sglang)(?::(?P<tag>[\w.+-]+))?$")
_COUNT = re.compile(r"^[0-9]{1,9}$")
_COUNTED = {"nodes": "nodes_per_replica"}
"""How counts are called where they become a field, if not by their own name."""
_SCALED = re.compile(r"^(\d+(?:\.\d+)?)([kmgKMG])$")
_SCALES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
_MODEL = {VLLM: ("--model", "--model-tag"), SGLANG: ("--model", "--model-path")}
_SERVED = "--served-model-name"
_NODES = {VLLM: ("--nnodes", "-n"), SGLANG: ("--nnodes",)}
_LONG = {"-r": "--node-rank"}
"""Short forms of what the fleet decides; other engines have none."""
_RANKS = "given by the fleet: it starts the ranks of a replica together and numbers them"
_RENDEZVOUS = "given by the fleet: the first node's address, and a port that its agent leases"
_AGENTS = {
    "--host": "its agent chooses the address",
    "--port": "its agent leases the ports",
    "--uds": "replicas are reached by address and port",
    "--node-rank": _RANKS,
    "--headless": _RANKS,
    "--dist-init-addr": _RENDEZVOUS,
    "--nccl-init-addr": _RENDEZVOUS,
    "--master-addr": _RENDEZVOUS,
    "--master-port": _RENDEZVOUS,
    "--nccl-port": "its agent leases the ports",
    "--enable-metrics": "metrics are always on",
    "--disable-log-stats": "metrics are always on",
    "--download-dir": "weights come from the model that is registered here",
    "--tokenizer": "the tokenizer comes with the model that is registered here",
    "--api-server-count": "one API server answers for each replica",
    "--enable-log-outputs": "what an engine answers is not written to logs here",
    "--disaggregation-mode": "replicas that only prefill or only decode are not offered",
}
_UNWRITTEN = "a shell would have put a value there: write it out"
_NEEDLESS = {
    "--disable-log-requests": "requests are not logged unless asked for",
    "--disable-uvicorn-access-log": "one line for each request costs little",
}


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
        self.understood: list[Line] = []
        self.not_understood: list[Line] = []
        self._extra: list[str] = []
        self._environment: list[str] = []

    # -- options ---------------------------------------------------------------------------------
    def take_arguments(self, words: Sequence[str]) -> None:
        """Read the arguments of a command line."""
        place = 0
        while place < len(words):
            word = words[place]
            place += 1
            if not word.startswith("-"):
                self._take_positional(word)
                continue
            flag, equals, value = word.partition("=")
            following = [value] if equals else _values(words[place:])
            place += self._take_flag(flag, following, given=bool(equals))

    def _take_positional(self, word: str) -> None:
        if "model" in self.named:
            self.not_understood.append(Line(mask(word), "it belongs to no option"))
        else:
            self.take_named("model", word, said=word)

    def _take_flag(self, flag: str, values: list[str], *, given: bool) -> int:
        """Read one flag; says how many of the words behind it belong to it."""
        known = self._take_known(_dashed(flag), flag, values)
        if known is not None:
            return 0 if given else min(known, len(values))
        option = self._find(flag)
        if option is None:
            self._take_unknown(flag, values, given=given)
            return 0 if given else len(values)
        switch = isinstance(option.kind, SwitchOption)
        told = bool(values) and (given or not switch or values[0].lower() in ("true", "false"))
        off = _dashed(flag) == option.off_flag
        text = values[0] if told else ("" if not switch else "true")
        self.take_option(option, "false" if off else text, said=f"{flag} {text if told else ''}".strip())
        return 0 if given or not told else 1

    def _take_known(self, dashed: str, flag: str, values: list[str]) -> int | None:
        """Flags that become no option; says how many words they take, `None` if it is none of them."""
        said = " ".join([flag, *values[:1]])
        if find_secret(flag):
            told = f"{flag} {MASK}"
            self.understood.append(
                Line(told, "nothing: engines here get a key of their own; make API keys for clients")
            )
            return len(values)
        if dashed in _MODEL[self.engine]:
            self.take_named("model", values[0] if values else "", said=said)
            return 1
        if dashed == _SERVED:
            self.take_named("served_name", values[0] if values else "", said=said)
            return 1
        if dashed in _NODES[self.engine]:
            self.take_count("nodes", values[0] if values else "", said=said)
            return 1
        dashed = _LONG.get(dashed, dashed)
        why = _AGENTS.get(dashed) or _NEEDLESS.get(dashed)
        if why is None:
            return None
        self.understood.append(Line(mask(said), f"nothing: {why}"))
        self.notes += advise_flag(dashed, values)
        return 0 if dashed == "--headless" else len(values[:1])

    def _find(self, flag: str) -> EngineOption | None:
        option = self.table.find_flag(flag)
        if option is not None or not flag.startswith("--"):
            return option
        like = self.table.complete_flag(flag)
        if len(like) != 1:
            return None
        self.notes.append(
            f"{flag} is no option; it is the beginning of {like[0].written}, so it is read as that"
        )
        return like[0]

    def _take_unknown(self, flag: str, values: list[str], *, given: bool) -> None:
        said = f"{flag}={values[0]}" if given else " ".join([flag, *values])
        if any(is_unexpanded(value) for value in values):
            self.not_understood.append(Line(mask(said), _UNWRITTEN))
        elif objection := extra_objection(self.table, flag):
            self.not_understood.append(Line(mask(said), objection))
        elif find_secret(said):
            self.not_understood.append(Line(mask(said), "it holds a secret, and options are shown"))
        else:
            self._extra += [f"{flag}={values[0]}"] if given else [flag, *values]
            self.understood.append(
                Line(said, f"{EXTRA_ARGUMENTS}: given to the engine as it is, not checked here")
            )

    def take_option(self, option: EngineOption, text: str, *, said: str) -> None:
        """Take the value of a typed option, checked."""
        objection = _UNWRITTEN if is_unexpanded(text) else option.objection(read_version(self.version))
        if objection:
            self.not_understood.append(Line(mask(said), objection))
            return
        try:
            value = _typed(option, text)
            option.kind.to_text(option.name, value)
        except EngineOptionError as error:
            self.not_understood.append(Line(mask(said), str(error)))
            return
        before = self.options.get(option.name)
        if before is not None and before != value:
            self.notes.append(f"{option.name} is said twice, {before} and {value}: the last one counts")
        self.options[option.name] = value
        self.understood.append(Line(mask(said), f"{option.name} = {value}"))

    # -- the rest --------------------------------------------------------------------------------
    def take_named(self, name: str, text: str, *, said: str) -> None:
        """Take a name: the model, what it is served as, the deployment's own."""
        if is_unexpanded(text):
            self.not_understood.append(Line(mask(said), _UNWRITTEN))
            return
        self.named[name] = text.rstrip("/") or text
        self.understood.append(Line(mask(said), f"{name.replace('_', ' ')} {self.named[name]}"))

    def take_count(self, name: str, value: object, *, said: str) -> None:
        """Take a number of replicas, nodes or accelerators."""
        text, words = str(value).strip(), _COUNTED.get(name, name)
        if is_unexpanded(text):
            self.not_understood.append(Line(mask(said), _UNWRITTEN))
        elif not _COUNT.match(text) or (name == "nodes" and not int(text)):
            self.not_understood.append(Line(mask(said), f"{words} must be a whole number"))
        else:
            before = self.counts.get(name)
            if before is not None and before != int(text):
                self.notes.append(f"{words} is said twice, {before} and {text}: the last one counts")
            self.counts[name] = int(text)
            self.understood.append(Line(said, f"{words} {int(text)}"))

    def take_environment(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Take variables that the engine may have."""
        for name, value in pairs:
            said = f"{name}={value}"
            if find_secret(said) or find_secret(name):
                told = "nothing: secrets are not kept with a deployment; engines here get a key of their own"
                self.understood.append(Line(f"{name}={MASK}", told))
                continue
            objection = environment_objection(self.table, name, value)
            if not objection and is_unexpanded(value):
                objection = _UNWRITTEN
            if objection:
                self.not_understood.append(Line(mask(said), objection))
                continue
            self._environment.append(said)
            self.understood.append(Line(said, ENVIRONMENT))

    def draft(self) -> Draft:
        """All of it."""
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
            understood=tuple(self.understood),
            not_understood=tuple(self.not_understood),
            notes=tuple(dict.fromkeys(notes)),
            problems=sizes.problems,
        )


def read_words(command: Command) -> DraftReader:
    """Read a command that launches a known engine. Raises `PasteError`."""
    for engine, starts in _STARTS.items():
        for start in starts:
            place = _find_start(command.words, start)
            if place is not None:
                return _filled(DraftReader(engine), command, place + len(start), place)
    for place, word in enumerate(command.words):
        image = _IMAGES.search(word)
        if image is not None and not word.startswith("-"):
            reader = DraftReader(engine_of_image(word), version_of_tag(image["tag"] or ""))
            return _filled(reader, command, place + 1, place)
    raise PasteError(
        "no engine is started by it: it should have `vllm serve`, `-m vllm.entrypoints.openai.api_server`, "
        "`sglang serve`, `-m sglang.launch_server`, or an image of one of them"
    )


def engine_of_image(image: str) -> str:
    """The engine that a container image has; empty for none that is known."""
    return SGLANG if "sglang" in image else VLLM if "vllm" in image else ""


def version_of_tag(tag: str) -> str:
    """Version that an image's tag says, such as `v0.7.2`; empty for `latest` and the like."""
    return tag.removeprefix("v") if read_version(tag) and tag.removeprefix("v")[:1].isdigit() else ""


def _filled(reader: DraftReader, command: Command, begin: int, before: int) -> DraftReader:
    reader.notes += command.notes
    said, became = describe_prefix(command.words[:before])
    if said:
        reader.understood.append(Line(mask(said), became))
    reader.take_environment([*command.environment, *_container_environment(command.words[:before])])
    reader.take_arguments(command.words[begin:])
    return reader


def _container_environment(words: Sequence[str]) -> list[tuple[str, str]]:
    """Variables of `docker run -e NAME=value`."""
    pairs = [
        words[place + 1].partition("=")
        for place, word in enumerate(words[:-1])
        if word in ("-e", "--env") and "=" in words[place + 1]
    ]
    return [(name, value) for name, _, value in pairs]


def _find_start(words: Sequence[str], start: tuple[str, ...]) -> int | None:
    for place in range(len(words) - len(start) + 1):
        here = (words[place].rpartition("/")[2], *words[place + 1 : place + len(start)])
        if here == start:
            return place
    return None


def _values(words: Sequence[str]) -> list[str]:
    """Words up to the next flag; a negative number is a value."""
    found: list[str] = []
    for word in words:
        if word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit():
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
