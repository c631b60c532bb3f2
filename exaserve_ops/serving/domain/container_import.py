"""Containers of pasted Kubernetes workloads and Compose files that start an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from exaserve_ops.serving.domain.launch_import import DraftReader, read_start
from exaserve_ops.serving.domain.launch_starts import (
    Start,
    engine_of_image,
    find_named_start,
    start_of_image,
    version_of_image,
)
from exaserve_ops.serving.domain.launch_words import Command, read_commands

Part = Mapping[str, Any]
_MIG = re.compile(r"mig-(\d+g\.\d+gb)$")
_GPU_KEYS = ("nvidia.com/gpu", "amd.com/gpu")
_READ = ("image", "command", "args", "entrypoint", "env", "environment", "resources", "deploy")
_ELSEWHERE = ("envFrom", "env_file")
_NEEDLESS = "ports, health, disks and places are the fleet's"


def read_container(item: Part) -> DraftReader | None:
    """Read a container or a service; `None` if no engine is started in it. Raises `PasteError`."""
    start = _start_of(item)
    if start is None:
        return None
    reader = read_start(start)
    reader.version = reader.version or version_of_image(str(item.get("image", "")))
    if item.get("name"):
        reader.take_named("name", str(item["name"]), said=f"name: {item['name']}")
    read_variables(reader, item.get("env") or item.get("environment"))
    _take_resources(reader, item)
    for name in _ELSEWHERE:
        if item.get(name):
            reader.refuse(name, "variables that stand elsewhere are not known here: write out what it needs")
    rest = [str(name) for name in item if name not in (*_READ, *_ELSEWHERE, "name")]
    if rest:
        reader.tell(", ".join(rest), f"nothing: {_NEEDLESS}")
    return reader


def read_variables(reader: DraftReader, value: object) -> None:
    """Take variables that stand in a list of `{name, value}`, as `NAME=value`, or in an object."""
    pairs, elsewhere = _variables(value)
    reader.take_environment(pairs)
    for name in elsewhere:
        reader.refuse(name, "its value stands elsewhere; secrets are not kept with a deployment")


def read_gpu_type(reader: DraftReader, value: str, *, said: str) -> None:
    """Take a kind of accelerator as Kubernetes calls it."""
    slice_of = _MIG.search(value)
    if slice_of:
        reader.take_named("accelerator", f"slice:{slice_of[1]}", said=said)
    elif value in _GPU_KEYS:
        reader.tell(said, "nothing: any accelerator")
    else:
        reader.refuse(said, "not known here: choose the nodes instead")


def _start_of(item: Part) -> Start | None:
    """What it runs: Kubernetes' `command` stands in place of the image's own, Compose's behind it."""
    image = str(item.get("image", ""))
    own, behind = (
        ("entrypoint", "command") if "args" not in item and _is_service(item) else ("command", "args")
    )
    entry, arguments = _words(item.get(own)), _words(item.get(behind))
    start = find_named_start(Command((), (*entry, *arguments)))
    if start is not None or entry or not engine_of_image(image):
        return start
    return start_of_image(image, (), arguments) if not arguments or arguments[0].startswith("-") else None


def _is_service(item: Part) -> bool:
    """Services have no name inside; containers must have one."""
    return "name" not in item


def _take_resources(reader: DraftReader, item: Part) -> None:
    limits = _inside(item, "resources", "limits") or _inside(item, "resources", "requests")
    for key, value in limits.items():
        if key in _GPU_KEYS:
            reader.take_count("accelerators", value, said=f"{key}: {value}")
        elif _MIG.search(str(key)):
            read_gpu_type(reader, str(key), said=f"{key}: {value}")
        else:
            reader.tell(f"{key}: {value}", "nothing: placed by accelerators and their memory")
    deploy = item.get("deploy")
    if not isinstance(deploy, Mapping):
        return
    if "replicas" in deploy:
        reader.take_count("replicas", deploy["replicas"], said=f"replicas: {deploy['replicas']}")
    devices = _inside(item, "deploy", "resources", "reservations").get("devices")
    for device in devices if isinstance(devices, list) else ():
        if isinstance(device, Mapping) and "count" in device:
            _take_device(reader, device["count"])


def _take_device(reader: DraftReader, count: object) -> None:
    if count == "all":
        reader.tell("count: all", "nothing: the parallel sizes say how many accelerators it takes")
    else:
        reader.take_count("accelerators", count, said=f"count: {count}")


def _inside(item: Part, *names: str) -> Part:
    found: object = item
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(str(word) for word in value)
    if not isinstance(value, str):
        return ()
    return tuple(word for command in read_commands(value)[:1] for word in command.words)


def _variables(value: object) -> tuple[list[tuple[str, str]], list[str]]:
    """Variables with their values, and names of those whose values stand elsewhere."""
    if isinstance(value, Mapping):
        items: list[object] = [{"name": name, "value": text} for name, text in value.items()]
    else:
        items = value if isinstance(value, list) else []
    pairs: list[tuple[str, str]] = []
    elsewhere: list[str] = []
    for item in items:
        name, text = _variable(item)
        if text is None:
            elsewhere += [name] if name else []
        else:
            pairs.append((name, text))
    return pairs, elsewhere


def _variable(item: object) -> tuple[str, str | None]:
    """Name and value; `None`: the value stands elsewhere."""
    if isinstance(item, Mapping):
        value = item.get("value")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return str(item.get("name", "")), None if value is None else text
    name, equals, text = str(item).partition("=")
    return name, text if equals else None
