"""Fault scripts: what goes wrong, where and when. Typed, validated, and fully decided by a seed.

A script is TOML or JSON with a list `fault`; a single fault can also be said in one word, as in
`node-death@30s`, `partition@30s+60s:share=0.1` or `rack-loss@1m:racks=rack-03`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_WORD = re.compile(r"(?P<kind>[a-z-]+)@(?P<at>[^+:]+)(?:\+(?P<span>[^:]+))?(?::(?P<options>.*))?")


class FaultScriptError(ValueError):
    """A fault script that cannot be read; the text says what is wrong with it."""


class _Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and when. Without a target the seed chooses one node."""

    at_seconds: float = 0.0
    """After the start of the simulation."""
    for_seconds: float | None = None
    """`None`: until the end."""
    nodes: tuple[str, ...] = ()
    """Names of nodes."""
    racks: tuple[str, ...] = ()
    share: float = 0.0
    """Of all nodes, 0-1; which ones is the seed's choice."""

    def __post_init__(self) -> None:
        if self.at_seconds < 0 or (self.for_seconds is not None and self.for_seconds <= 0):
            raise ValueError("times must not be negative")
        _check_ratio("share", self.share)


class _PowerLoss(_Fault, frozen=True, kw_only=True):
    manner: Literal["refused", "mute"] = "refused"
    """Whether connections to it break at once, or stay open and without an answer, new ones too."""


class NodeDeath(_PowerLoss, frozen=True, kw_only=True, tag_field="kind", tag="node-death"):
    """The machine is off; where it comes back, it boots, and its replicas start anew."""


class RackLoss(_PowerLoss, frozen=True, kw_only=True, tag_field="kind", tag="rack-loss"):
    """Every machine of a rack is off at once; without `racks` the seed chooses one."""


class Partition(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="partition"):
    """Neither reports nor commands arrive; replicas go on."""


class MassSilence(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="mass-silence"):
    """A partition of most of the fleet: the observer's fault more likely than the nodes'."""


class Flapping(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="flapping"):
    """A partition that comes and goes."""

    down_seconds: float = 5.0
    up_seconds: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.down_seconds <= 0 or self.up_seconds <= 0:
            raise ValueError("down_seconds and up_seconds must be positive")


class SlowNode(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="slow-node"):
    """Reports leave late and engines are slow: a grey failure."""

    delay_seconds: float = 0.8
    latency_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay_seconds < 0 or self.latency_factor < 1:
            raise ValueError("delay_seconds must not be negative, latency_factor at least 1")


class ClockJump(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="clock-jump"):
    """The node's wall clock is off."""

    offset_seconds: float = 600.0


class ReportLoss(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="report-loss"):
    """Some reports never arrive."""

    loss_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ratio("loss_ratio", self.loss_ratio)


class Jitter(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="jitter"):
    """Reports leave up to this share of an interval late."""

    jitter_ratio: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ratio("jitter_ratio", self.jitter_ratio)


class ReplicaCrash(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="replica-crash"):
    """Engines of the node are killed by SIGKILL; the agent starts them again."""

    replicas: int = 1
    """How many of each node."""


class AgentRestart(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="agent-restart"):
    """The agent process ends and starts again; replicas go on."""


class DiskFull(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="disk-full"):
    """Nothing more can be stored on the node's disk; what is there stays usable."""


class CorruptWeights(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="corrupt-weights"):
    """Weights on the disk have changed, which a scrub finds; or what it gives to others is damaged."""

    where: Literal["disk", "given"] = "disk"
    pieces: int = 3
    """Of each revision on the disk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pieces < 1:
            raise ValueError("pieces must be at least 1")


class SlowLink(_Fault, frozen=True, kw_only=True, tag_field="kind", tag="slow-link"):
    """The node's link carries weights so many times slower."""

    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ValueError("factor must be at least 1")


Fault: TypeAlias = (
    NodeDeath
    | RackLoss
    | Partition
    | MassSilence
    | Flapping
    | SlowNode
    | ClockJump
    | ReportLoss
    | Jitter
    | ReplicaCrash
    | AgentRestart
    | DiskFull
    | CorruptWeights
    | SlowLink
)

_WHOLE_FLEET = (MassSilence, ReportLoss, Jitter)
"""Kinds that mean every node where no target is named."""


class _Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: tuple[Fault, ...] = ()


class Place(msgspec.Struct, frozen=True):
    """A node as a fault's target."""

    name: str
    rack: str


def read_script(path: Path) -> tuple[Fault, ...]:
    """Read a TOML or JSON script. Raises `FaultScriptError`."""
    try:
        data = path.read_bytes()
        decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
        return decode(data, type=_Script).fault
    except (OSError, msgspec.DecodeError) as error:
        raise FaultScriptError(f"{path}: {error}") from error


def parse_fault(word: str) -> Fault:
    """Read `kind@at[+for][:option=value,…]`. Raises `FaultScriptError`."""
    match = _WORD.fullmatch(word.strip())
    if match is None:
        raise FaultScriptError(
            f"{word!r} is no fault; write it as node-death@30s or partition@30s+1m:share=0.1"
        )
    fields: dict[str, Any] = {"kind": match["kind"], "at_seconds": _seconds(match["at"])}
    if match["span"]:
        fields["for_seconds"] = _seconds(match["span"])
    for option in filter(None, (match["options"] or "").split(",")):
        name, _, value = option.partition("=")
        fields[name] = value.split(";") if name in {"nodes", "racks"} else value
    try:
        fault: Fault = msgspec.convert(fields, Fault, strict=False)
    except msgspec.ValidationError as error:
        raise FaultScriptError(f"{word!r}: {error}") from error
    return fault


def kind_of(fault: Fault) -> str:
    """The word for it in scripts."""
    return str(fault.__struct_config__.tag)


def choose_targets(fault: Fault, places: Sequence[Place], rng: random.Random) -> tuple[str, ...]:
    """Names of the nodes that a fault strikes, ordered. Raises `FaultScriptError` for unknown ones."""
    _check_known(fault.nodes, {place.name for place in places}, "node")
    racks = set(fault.racks)
    _check_known(racks, {place.rack for place in places}, "rack")
    names = sorted(place.name for place in places)
    if not names:
        return ()
    if isinstance(fault, RackLoss) and not (racks or fault.nodes or fault.share):
        racks = {rng.choice(sorted({place.rack for place in places}))}
    chosen = set(fault.nodes) | {place.name for place in places if place.rack in racks}
    if fault.share:
        chosen |= set(rng.sample(names, max(1, round(fault.share * len(names)))))
    if not chosen:
        chosen = set(names) if isinstance(fault, _WHOLE_FLEET) else {rng.choice(names)}
    return tuple(sorted(chosen))


def _check_known(wanted: Iterable[str], known: set[str], what: str) -> None:
    unknown = sorted(set(wanted) - known)
    if unknown:
        raise FaultScriptError(f"no such {what}: {', '.join(unknown)}")


def _check_ratio(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1")


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise FaultScriptError(f"{text!r} is no duration; write it as 30s, 500ms or 2m")
    return float(match[1]) * _UNIT_SECONDS[match[2]]
