"""Deployments out of pasted YAML: Helm values, custom resources, Kubernetes workloads, Compose services."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from exaserve_ops.serving.domain.launch_import import (
    Draft,
    DraftReader,
    Line,
    engine_of_image,
    read_words,
    version_of_tag,
)
from exaserve_ops.serving.domain.launch_words import Command, PasteError, read_command
from workers.protocol.confidential import mask
from workers.protocol.engines.vllm import VLLM

_DEEPEST = 24
_MOST_DRAFTS = 20
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_MIG = re.compile(r"mig-(\d+g\.\d+gb)$")
_GPU_KEYS = ("nvidia.com/gpu", "amd.com/gpu")
_STORAGE = re.compile(r"^(pvc|shm|storage|volume|extraVolume)", re.IGNORECASE)
_CONFIGS = ("vllmConfig", "engineConfig", "sglangConfig")
_PLAIN = {"modelURL": "model", "modelUrl": "model", "servedModelName": "served_name", "name": "name"}
_OTHER = ("env", "requestGPUType", "limitGPUType")
_COUNTS = {"replicaCount": "replicas", "replicas": "replicas", "requestGPU": "accelerators"}


def read_values(text: str) -> tuple[Draft, ...]:
    """Every deployment that pasted YAML describes. Raises `PasteError`."""
    documents = _load(text)
    found: list[Draft] = []
    for document in documents:
        for read, part in _parts(document, 0):
            found.append(read(part))
            if len(found) > _MOST_DRAFTS:
                raise PasteError(f"it describes more than {_MOST_DRAFTS} deployments: paste fewer at once")
    if not found:
        raise PasteError(
            "it is YAML, and nothing in it starts an engine: no modelSpec, vllmConfig, containers or services"
        )
    return tuple(found)


def _load(text: str) -> list[Any]:
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise PasteError("it has aliases (*name): write out what they stand for")
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PasteError(f"it is no YAML: {str(error).splitlines()[0]}") from error


def _parts(node: Any, depth: int) -> Iterator[tuple[Callable[[Any], Draft], Any]]:  # noqa: ANN401 - YAML
    """Parts that describe one deployment each, and how to read them."""
    if depth > _DEEPEST or not isinstance(node, Mapping | list):
        return
    if isinstance(node, list):
        for item in node:
            yield from _parts(item, depth + 1)
        return
    if any(isinstance(node.get(name), Mapping) for name in _CONFIGS) or "modelURL" in node:
        yield _read_spec, node
        return
    containers = node.get("containers")
    if isinstance(containers, list):
        yield from ((_read_container, item) for item in containers if _starts_engine(item))
        return
    services = node.get("services")
    if isinstance(services, Mapping):
        yield from ((_read_container, item) for item in services.values() if _starts_engine(item))
        return
    for value in node.values():
        yield from _parts(value, depth + 1)


def _starts_engine(item: object) -> bool:
    return isinstance(item, Mapping) and bool(engine_of_image(f"{item.get('image')} {item.get('command')}"))


# -- model specs of Helm values and custom resources -----------------------------------------------
def _read_spec(spec: Mapping[str, Any]) -> Draft:
    repository = str(spec.get("repository", ""))
    reader = DraftReader(engine_of_image(repository) or VLLM, version_of_tag(str(spec.get("tag", ""))))
    for name, value in spec.items():
        _take_entry(reader, str(name), value)
    return reader.draft()


def _take_entry(reader: DraftReader, name: str, value: Any) -> None:  # noqa: ANN401 - YAML
    if value in ("", None, [], {}):
        return  # an empty value means that it is not set
    said = mask(f"{name}: {value}"[:200])
    if name in _CONFIGS and isinstance(value, Mapping):
        for key, inner in value.items():
            _take_setting(reader, str(key), inner)
    elif name in _PLAIN or name in _COUNTS or name in _OTHER:
        _take_fact(reader, name, value, said)
    elif why := _needless(name):
        reader.understood.append(Line(said, f"nothing: {why}"))
    elif isinstance(value, Mapping):
        reader.not_understood.append(Line(said, "not known here: say it by the engine's own options"))
    else:
        _take_setting(reader, name, value)


def _take_fact(reader: DraftReader, name: str, value: Any, said: str) -> None:  # noqa: ANN401 - YAML
    """What is said of the deployment and not of the engine."""
    if name in _PLAIN:
        reader.take_named(_PLAIN[name], str(value), said=said)
    elif name in _COUNTS:
        reader.take_count(_COUNTS[name], value, said=said)
    elif name == "env":
        reader.take_environment(_pairs(value))
    else:
        _take_gpu_type(reader, str(value), said)


def _needless(name: str) -> str:
    if _STORAGE.match(name):
        return "weights are brought to each node's disk by the fleet"
    known = {
        "tag": "the version that a node has counts",
        "repository": "the engine that a node has counts",
        "limitGPU": "the same as what is asked for",
        "requestCPU": "placed by accelerators and their memory",
        "requestMemory": "placed by accelerators and their memory",
        "limitCPU": "placed by accelerators and their memory",
        "limitMemory": "placed by accelerators and their memory",
        "deploymentStrategy": "rollouts have a policy of their own",
        "hf_token": "secrets are not kept with a deployment",
    }
    return known.get(name, "")


def _take_setting(reader: DraftReader, name: str, value: Any) -> None:  # noqa: ANN401 - YAML
    said = mask(f"{name}: {value}"[:200])
    if value in ("", None, [], {}):
        return
    if name == "extraArgs":
        words = (
            [str(word) for word in value] if isinstance(value, list) else list(read_command(str(value)).words)
        )
        reader.take_arguments(words)
        return
    if name == "v1":
        reader.understood.append(Line(said, "nothing: all versions of today have that engine"))
        return
    option = reader.table.by_name.get(_snake(name)) or reader.table.find_flag("--" + _snake(name))
    if option is None:
        reader.not_understood.append(Line(said, "no option of this engine is called so"))
        return
    text = str(value).lower() if isinstance(value, bool) else str(value)
    reader.take_option(option, text, said=said)


def _take_gpu_type(reader: DraftReader, value: str, said: str) -> None:
    slice_of = _MIG.search(value)
    if slice_of:
        reader.take_named("accelerator", f"slice:{slice_of[1]}", said=said)
    elif value in _GPU_KEYS:
        reader.understood.append(Line(said, "nothing: any accelerator"))
    else:
        reader.not_understood.append(Line(said, "not known here: choose the nodes instead"))


# -- containers ------------------------------------------------------------------------------------
def _read_container(item: Mapping[str, Any]) -> Draft:
    image = str(item.get("image", ""))
    words = [*_as_words(item.get("command")), *_as_words(item.get("args"))]
    pairs = tuple(_pairs(item.get("env") or item.get("environment")))
    reader = _reader_of(words, image, pairs)
    reader.version = reader.version or version_of_tag(image.rpartition(":")[2])
    if item.get("name"):
        reader.take_named("name", str(item["name"]), said=f"name: {item['name']}")
    _take_resources(reader, item.get("resources"))
    return reader.draft()


def _reader_of(words: Sequence[str], image: str, pairs: tuple[tuple[str, str], ...]) -> DraftReader:
    script = next((words[place + 1] for place, word in enumerate(words[:-1]) if word in ("-c", "-lc")), "")
    if script:
        inner = read_command(script)
        return read_words(Command((*pairs, *inner.environment), inner.words, inner.notes))
    try:
        return read_words(Command(pairs, tuple(words)))
    except PasteError:
        # The image's own entry point starts the engine.
        return read_words(Command(pairs, (image, *words)))


def _take_resources(reader: DraftReader, resources: object) -> None:
    limits = resources.get("limits", {}) if isinstance(resources, Mapping) else {}
    for key, value in limits.items() if isinstance(limits, Mapping) else ():
        said = f"{key}: {value}"
        if key in _GPU_KEYS:
            reader.take_count("accelerators", value, said=said)
        elif _MIG.search(str(key)):
            _take_gpu_type(reader, str(key), said)


def _as_words(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    return list(read_command(value).words) if isinstance(value, str) else []


def _pairs(value: object) -> list[tuple[str, str]]:
    """Variables of a list of `{name, value}`, of `NAME=value`, or of an object."""
    if isinstance(value, Mapping):
        return [(str(name), str(text)) for name, text in value.items()]
    pairs = []
    for item in value if isinstance(value, list) else ():
        if isinstance(item, Mapping) and "value" in item:
            pairs.append((str(item.get("name", "")), str(item["value"])))
        elif isinstance(item, str) and "=" in item:
            name, _, text = item.partition("=")
            pairs.append((name, text))
    return pairs


def _snake(name: str) -> str:
    return _HUMP.sub("_", name).lower().replace("-", "_")
