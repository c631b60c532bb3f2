"""Deployments out of pasted YAML: Helm values, custom resources, Kubernetes workloads, Compose services."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from exaserve_ops.serving.domain.container_import import read_container, read_gpu_type, read_variables
from exaserve_ops.serving.domain.launch_import import DraftReader
from exaserve_ops.serving.domain.launch_starts import engine_of_image, version_of_tag
from exaserve_ops.serving.domain.launch_words import PasteError, read_commands
from exaserve_ops.serving.domain.pasted_secrets import names_secret
from workers.protocol.engines.vllm import VLLM

_DEEPEST = 24
_DEEPEST_FLOW = 64
_MOST_DRAFTS = 20
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_STORAGE = re.compile(r"^(pvc|shm|storage|volume|extraVolume)", re.IGNORECASE)
_CONFIGS = ("vllmConfig", "engineConfig", "sglangConfig")
_PLAIN = {"modelURL": "model", "modelUrl": "model", "servedModelName": "served_name", "name": "name"}
_OTHER = ("env", "requestGPUType", "limitGPUType")
_COUNTS = {"replicaCount": "replicas", "replicas": "replicas", "requestGPU": "accelerators"}
_CALLED = {"enable_tool": "enable_auto_tool_choice"}
"""Settings that have another name than the option that they become."""
_LMCACHE = {"cpuOffloadingBufferSize": "lmcache_cpu_gb", "kvRole": "kv_role"}
_PLACED = "placed by accelerators and their memory"
_NEEDLESS = {
    "tag": "the version that a node has counts",
    "repository": "the engine that a node has counts",
    "limitGPU": "the same as what is asked for",
    "requestCPU": _PLACED,
    "requestMemory": _PLACED,
    "limitCPU": _PLACED,
    "limitMemory": _PLACED,
    "deploymentStrategy": "rollouts have a policy of their own",
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the text something stands."""

    depth: int = 0
    replicas: object = None
    """That the workload around it asks for."""
    nodes: object = None
    """The same, of a group of pods that are one replica."""


def read_values(text: str) -> tuple[DraftReader, ...]:
    """Every deployment that pasted YAML describes. Raises `PasteError`."""
    found: list[DraftReader] = []
    left: list[str] = []
    for document in _load(text):
        before = len(found)
        found += [reader for part in _parts(document, _Place()) if (reader := part()) is not None]
        if len(found) > _MOST_DRAFTS:
            raise PasteError(f"it describes more than {_MOST_DRAFTS} deployments: paste fewer at once")
        left += _left_out(document, used=len(found) > before)
    if not found:
        raise PasteError(
            "it is YAML, and nothing in it starts an engine: no modelSpec, vllmConfig, containers or services"
        )
    if left:
        note = f"not read, since no engine is described by it: {', '.join(dict.fromkeys(left))}"
        for reader in found:
            reader.notes.append(note)
    return tuple(found)


def _load(text: str) -> list[Any]:
    if _is_deep(text):
        raise PasteError(
            f"it is no YAML that anybody wrote: more than {_DEEPEST_FLOW} brackets are open at once"
        )
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise PasteError("it has aliases (*name): write out what they stand for")
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line + 1
        raise PasteError(f"it is no YAML: line {line}: {error.problem}") from error
    except RecursionError as error:
        raise PasteError("it is no YAML that anybody wrote: things lie in one another too deep") from error
    except (yaml.YAMLError, ValueError) as error:
        raise PasteError(f"it is no YAML: {str(error).splitlines()[0]}") from error


def _is_deep(text: str) -> bool:
    """Whether brackets lie in one another too deep for the parser, whose time grows with the depth."""
    depth = deepest = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        deepest = max(deepest, depth)
    return deepest > _DEEPEST_FLOW


def _left_out(document: object, *, used: bool) -> list[str]:
    """Parts at the top in which no deployment is; of a workload, which is one thing, none."""
    if not isinstance(document, Mapping):
        return []
    if not used:
        return [str(document.get("kind") or next(iter(document), ""))]
    if "apiVersion" in document or "services" in document or any(name in document for name in _CONFIGS):
        return []
    return [str(name) for name, value in document.items() if not any(_parts(value, _Place(1)))]


def _parts(node: Any, place: _Place) -> Iterator[Callable[[], DraftReader | None]]:  # noqa: ANN401 - YAML
    """Readers of the parts that may describe one deployment each."""
    if place.depth > _DEEPEST or not isinstance(node, Mapping | list):
        return
    if isinstance(node, list):
        for item in node:
            yield from _parts(item, replace(place, depth=place.depth + 1))
        return
    described = _described(node, place)
    if described is not None:
        yield from described
        return
    inside = _Place(
        place.depth + 1,
        node.get("replicas", place.replicas),
        node.get("size", place.nodes) if "workerTemplate" in node else place.nodes,
    )
    for value in node.values():
        yield from _parts(value, inside)


def _described(node: Mapping[str, Any], place: _Place) -> Iterator[Callable[[], DraftReader | None]] | None:
    """Readers of what a part describes itself; `None` where only what lies in it may describe something."""
    if any(isinstance(node.get(name), Mapping) for name in _CONFIGS) or "modelURL" in node:
        return iter((_spec_reader(node),))
    specs, containers, services = node.get("modelSpec"), node.get("containers"), node.get("services")
    if isinstance(specs, list):  # one that lacks its model is said, not left out
        return (_spec_reader(item) for item in specs if isinstance(item, Mapping))
    items = containers if isinstance(containers, list) else None
    if items is None and isinstance(services, Mapping):
        items = list(services.values())
    if items is None:
        return None
    return (_reader_of(item, place) for item in items if isinstance(item, Mapping))


def _spec_reader(spec: Mapping[str, Any]) -> Callable[[], DraftReader]:
    return lambda: _read_spec(spec)


def _reader_of(item: Mapping[str, Any], place: _Place) -> Callable[[], DraftReader | None]:
    return lambda: _read_workload(item, place)


def _read_workload(item: Mapping[str, Any], place: _Place) -> DraftReader | None:
    reader = read_container(item)
    if reader is None:
        return None
    for name, count in (("replicas", place.replicas), ("nodes", place.nodes)):
        if count is not None and name not in reader.counts:
            reader.take_count(name, count, said=f"{'size' if name == 'nodes' else name}: {count}")
    return reader


# -- model specs of Helm values and custom resources -----------------------------------------------
def _read_spec(spec: Mapping[str, Any]) -> DraftReader:
    repository = str(spec.get("repository", ""))
    reader = DraftReader(engine_of_image(repository) or VLLM, version_of_tag(str(spec.get("tag", ""))))
    for name, value in spec.items():
        _take_entry(reader, str(name), value)
    return reader


def _take_entry(reader: DraftReader, name: str, value: Any) -> None:  # noqa: ANN401 - YAML
    if value in ("", None, [], {}):
        return  # an empty value means that it is not set
    said = _said(name, value)
    if name in _CONFIGS and isinstance(value, Mapping):
        for key, inner in value.items():
            _take_setting(reader, str(key), inner)
    elif name in _PLAIN or name in _COUNTS or name in _OTHER:
        _take_fact(reader, name, value, said)
    elif why := _needless(name):
        reader.tell(said, f"nothing: {why}")
    elif name == "lmcacheConfig" and isinstance(value, Mapping):
        _take_lmcache(reader, value)
    else:
        _take_setting(reader, name, value)


def _take_lmcache(reader: DraftReader, found: Mapping[str, Any]) -> None:
    """What has LMCache keep KV in host memory; its other settings are files and servers elsewhere."""
    if not found.get("enabled"):
        reader.tell("lmcacheConfig", "nothing: it is not enabled")
        return
    options = reader.table.by_name
    connector = options.get("kv_connector")
    if connector is None:
        reader.take_option(options["enable_lmcache"], "true", said="lmcacheConfig: enabled")
    else:
        reader.take_option(connector, "LMCacheConnectorV1", said="lmcacheConfig: enabled")
    for name, value in found.items():
        option, said = options.get(_LMCACHE.get(name, "")), _said(f"lmcacheConfig: {name}", value)
        if option is not None:
            reader.take_option(option, _text(value), said=said)
        elif name != "enabled":
            reader.refuse(said, "not known here: say it by variables that begin with LMCACHE_")


def _take_fact(reader: DraftReader, name: str, value: Any, said: str) -> None:  # noqa: ANN401 - YAML
    """What is said of the deployment and not of the engine."""
    if name in _PLAIN:
        reader.take_named(_PLAIN[name], str(value), said=said)
    elif name in _COUNTS:
        reader.take_count(_COUNTS[name], value, said=said)
    elif name == "env":
        read_variables(reader, value)
    else:
        read_gpu_type(reader, str(value), said=said)


def _needless(name: str) -> str:
    return (
        "weights are brought to each node's disk by the fleet"
        if _STORAGE.match(name)
        else _NEEDLESS.get(name, "")
    )


def _take_setting(reader: DraftReader, name: str, value: Any) -> None:  # noqa: ANN401 - YAML
    said = _said(name, value)
    if value in ("", None, [], {}):
        return
    called = _CALLED.get(_snake(name), _snake(name))
    option = reader.table.by_name.get(called) or reader.table.find_flag("--" + called)
    if name == "extraArgs":
        reader.take_arguments(_arguments(value))
    elif name == "v1":
        reader.tell(said, "nothing: all versions of today have that engine")
    elif option is not None:
        reader.take_option(option, _text(value), said=said)
    elif names_secret(name):
        reader.hide(name, _leaves(value), "secrets are not kept with a deployment")
    elif isinstance(value, Mapping | list):
        reader.refuse(said, "not known here: say it by the engine's own options")
    else:
        reader.refuse(said, "no option of this engine is called so")


def _arguments(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    return [word for command in read_commands(str(value))[:1] for word in command.words]


def _said(name: str, value: object) -> str:
    """An entry in short; of what has parts the names, since values inside may be anybody's."""
    if isinstance(value, Mapping):
        return f"{name}: {{{', '.join(map(str, value))}}}"
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        return f"{name}: […]"
    return f"{name}: {value}"[:200]


def _text(value: object) -> str:
    """A value as an option has it: objects as JSON."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, default=str) if isinstance(value, Mapping | list) else str(value)


def _leaves(value: object) -> Sequence[str]:
    """All that may be a secret inside."""
    if isinstance(value, Mapping):
        return [leaf for inner in value.values() for leaf in _leaves(inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in _leaves(inner)]
    return [str(value)]


def _snake(name: str) -> str:
    return _HUMP.sub("_", name).lower().replace("-", "_")
