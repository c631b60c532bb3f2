"""Which of the commands that were pasted starts which engine, whatever runs it: a container, a shell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from exaserve_ops.serving.domain.launch_prefix import CONTAINERS
from exaserve_ops.serving.domain.launch_words import Command, PasteError, read_commands
from workers.protocol.confidential import mask
from workers.protocol.engines.option import read_version
from workers.protocol.engines.sglang import SGLANG
from workers.protocol.engines.vllm import VLLM

_STARTS = {
    VLLM: (
        ("vllm", "serve"),
        ("-m", "vllm.entrypoints.openai.api_server"),
        ("-m", "vllm.entrypoints.cli.main", "serve"),
    ),
    SGLANG: (("sglang", "serve"), ("-m", "sglang.launch_server")),
}
_IMAGE = re.compile(
    r"(?:^|/)(?:vllm-(?:openai|cpu|omni)[\w.-]*|vllm|sglang)(?::(?P<tag>[\w.+-]+))?(?:@sha256:[0-9a-f]*)?$"
)
_NO_ENGINE = ("router", "gateway")
"""Parts of the names of images that have an engine's name and start none."""
_ROUTERS = ("sglang_router", "sglang-router", "vllm-router", "vllm_router", "smg", "launch_router")
_DEEPEST = 3
"""Of commands within the words of others: `docker run … bash -c "srun bash -c '…'"`."""
_SCRIPT = re.compile(r"\S\s.*(?:vllm|sglang)|(?:vllm|sglang)\S*\s", re.DOTALL)
"""A word that may be commands: several words, one of which has to do with an engine."""
_SHELLS = ("bash", "sh", "zsh", "dash", "ash")


@dataclass(frozen=True, slots=True)
class Start:
    """An engine that one of the commands starts."""

    engine: str
    command: Command
    before: int
    """Words in front of what starts the engine."""
    begin: int
    """First word that the engine gets."""
    version: str = ""
    """As an image's tag says; empty: none does."""


def find_starts(commands: Sequence[Command]) -> tuple[Start, ...]:
    """Every engine that is started, at least one, with what was left out noted. Raises `PasteError`."""
    starts: list[Start] = []
    left: list[str] = []
    for command in commands:
        found = [*_named_starts(command, 0)] or [*_image_starts(command, 0)]
        starts += found
        left += [] if found else [_name_of(command)]
    if not starts:
        raise PasteError(_objection(commands))
    note = f"not read, since no engine is started by it: {', '.join(dict.fromkeys(left))}" if left else ""
    return tuple(_noted(start, note) for start in starts)


def find_named_start(command: Command) -> Start | None:
    """The first engine that a command, or the script that it has a shell run, starts by its name."""
    return next(_named_starts(command, 0), None)


def start_of_image(image: str, environment: tuple[tuple[str, str], ...], arguments: Sequence[str]) -> Start:
    """The engine that a container's own entry point starts, with what its image's tag says."""
    command = Command(environment, (image, *arguments))
    return Start(engine_of_image(image), command, 0, 1, version_of_image(image))


def engine_of_image(image: str) -> str:
    """The engine that a container image has; empty for none that is known."""
    if any(part in image for part in _NO_ENGINE):
        return ""
    return SGLANG if "sglang" in image else VLLM if "vllm" in image else ""


def version_of_image(image: str) -> str:
    """Version that an image's tag says; empty if it says none."""
    name = image.partition("@")[0].rpartition("/")[2]
    return version_of_tag(name.partition(":")[2])


def version_of_tag(tag: str) -> str:
    """Version that a tag says, such as `v0.7.2`; empty for `latest` and the like."""
    return tag.removeprefix("v") if read_version(tag) and tag.removeprefix("v")[:1].isdigit() else ""


def _named_starts(command: Command, depth: int) -> Iterator[Start]:
    """Engines that are started by name; else those of scripts that are words of the command."""
    for engine, starts in _STARTS.items():
        for start in starts:
            place = _find_words(command.words, start)
            if place is not None:
                version = _version_of_images(command.words[:place])
                yield Start(engine, command, place, place + len(start), version)
                return
    if depth < _DEEPEST:
        yield from _script_starts(command, lambda inner: _named_starts(inner, depth + 1))


def _script_starts(command: Command, look: Callable[[Command], Iterator[Start]]) -> Iterator[Start]:
    """What is started in a script for a shell, ssh or tmux; what gives it to them stands before it."""
    for place, word in enumerate(command.words):
        if not _SCRIPT.search(word):
            continue
        for found in (start for inner in _read_quietly(word) for start in look(inner)):
            before = _without_shell(command.words[:place])
            inner = found.command
            yield Start(
                found.engine,
                Command(
                    (*command.environment, *inner.environment),
                    (*before, *inner.words),
                    (*command.notes, *inner.notes),
                ),
                found.before + len(before),
                found.begin + len(before),
                found.version or _version_of_images(before),
            )


def _read_quietly(text: str) -> tuple[Command, ...]:
    """Commands of a word that may be none: what cannot be split starts nothing."""
    try:
        return read_commands(text)
    except PasteError:
        return ()


def _without_shell(words: Sequence[str]) -> tuple[str, ...]:
    """Words without a shell and its flags at their end: what counts is its script."""
    for place, word in enumerate(words):
        if word.rpartition("/")[2] in _SHELLS and all(one.startswith("-") for one in words[place + 1 :]):
            return tuple(words[:place])
    return tuple(words)


def _image_starts(command: Command, depth: int) -> Iterator[Start]:
    """What `docker run … IMAGE arguments` starts."""
    if not any(word.rpartition("/")[2] in CONTAINERS for word in command.words):
        if depth < _DEEPEST:
            yield from _script_starts(command, lambda inner: _image_starts(inner, depth + 1))
        return
    for place, word in enumerate(command.words):
        image = None if word.startswith("-") else _IMAGE.search(word)
        if image is None or not engine_of_image(word):
            continue
        arguments = command.words[place + 1 :]
        if not _is_other_command(arguments):
            version = version_of_tag(image["tag"] or "")
            yield Start(engine_of_image(word), command, place, place + 1, version)
        return


def _is_other_command(arguments: Sequence[str]) -> bool:
    """Whether a container is told to run something of its own; newer images take a model as first word."""
    if not arguments or arguments[0].startswith("-"):
        return False
    name = arguments[0].rpartition("/")[2]
    return name in _SHELLS or name.startswith(("python", "ray", "vllm", "sglang"))


def _version_of_images(words: Sequence[str]) -> str:
    image = next((found for word in words if (found := _IMAGE.search(word))), None)
    return "" if image is None else version_of_tag(image["tag"] or "")


def _find_words(words: Sequence[str], start: tuple[str, ...]) -> int | None:
    for place in range(len(words) - len(start) + 1):
        here = (words[place].rpartition("/")[2], *words[place + 1 : place + len(start)])
        if here == start:
            return place
    return None


def _noted(start: Start, note: str) -> Start:
    if not note:
        return start
    command = start.command
    noted = Command(command.environment, command.words, (*command.notes, note))
    return Start(start.engine, noted, start.before, start.begin, start.version)


def _name_of(command: Command) -> str:
    return mask(command.words[0])[:40]


def _objection(commands: Sequence[Command]) -> str:
    words = {word for command in commands for word in command.words}
    if any(router in word for word in words for router in _ROUTERS):
        return (
            "it starts a router and no engine: gateways here do what it does; paste what starts the engines "
            "behind it (of `sglang_router.launch_server --dp-size N` the same as `sglang.launch_server` "
            "without --dp-size, and N replicas)"
        )
    return (
        "no engine is started by it: it should have `vllm serve`, `-m vllm.entrypoints.openai.api_server`, "
        "`sglang serve`, `-m sglang.launch_server`, or an image of one of them"
    )
