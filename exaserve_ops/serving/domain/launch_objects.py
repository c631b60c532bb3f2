"""Options that engines take inside of one JSON object: KV transfer and KV events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from workers.protocol.engines.kinds import EngineOptionError, JsonOption

_TRANSFER = "--kv-transfer-config"
_EVENTS = "--kv-events-config"
OBJECT_FLAGS = (_TRANSFER, _EVENTS)
_LEASED = "its agent decides addresses, ports and ranks"
_FLEETS = ("kv_ip", "kv_port", "kv_rank", "kv_parallel_size", "engine_id")


@dataclass(frozen=True, slots=True)
class Part:
    """One entry of such an object."""

    name: str
    said: str
    option: str = ""
    """Name of the option that it becomes; empty: none."""
    text: str = ""
    """The option's value."""
    became: str = ""
    """Where it becomes no option, why."""


def read_object(flag: str, text: str) -> tuple[Part, ...]:
    """Take such a flag's object apart. Raises `EngineOptionError` if it is none."""
    found = JsonOption.read(flag, text)
    return tuple(_transfer(found) if flag == _TRANSFER else _events(found))


def _transfer(found: dict[str, object]) -> Iterator[Part]:
    for name, value in found.items():
        text = value if isinstance(value, str) else json.dumps(value)
        said = f"{_TRANSFER} {name} {text}"
        if name in _FLEETS:
            yield Part(name, said, became=f"nothing: {_LEASED}")
        else:
            yield Part(name, said, option=name, text=text)


def _events(found: dict[str, object]) -> Iterator[Part]:
    """Events go to the node's agent, or nowhere; how, it decides."""
    publisher = found.get("publisher")
    if publisher not in ("zmq", "null", None):
        raise EngineOptionError(f"events are read over zmq, not over '{str(publisher)[:40]}'")
    is_on = publisher != "null" and found.get("enable_kv_cache_events", publisher == "zmq") is True
    yield Part("", _EVENTS, option="kv_events", text=str(is_on).lower())
    rest = ", ".join(name for name in found if name not in ("publisher", "enable_kv_cache_events"))
    if rest:
        yield Part("", f"{_EVENTS} {rest}", became=f"nothing: {_LEASED}")
