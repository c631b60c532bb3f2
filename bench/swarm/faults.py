"""What goes wrong while the weights are on their way: all others finish, and no bad byte stays anywhere."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.swarm.contest import NodeProcess, Stage, Weights, give_keys, measure, staged
from bench.swarm.ours import Director

_RATIO_BEFORE = 0.4
"""So much of the weights has come when the fault happens."""
_CORRUPT_EVERY = 3
_VICTIM = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    name: str
    happen: Callable[[Stage], None]
    extra: Callable[[int], Sequence[str]] = lambda _: ()
    spared: Callable[[NodeProcess], bool] = lambda _: True
    """Nodes that must be whole in the end."""
    small_disk: bool = False


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What came of it."""

    finished: bool
    seconds: float
    ratio_to_bound: float
    origin_copies: float
    bad_bytes_on_whole_nodes: int
    """Files of nodes that are whole whose SHA-256 is not the manifest's."""
    said: str
    """By the node that it happened to, where it lives to say something."""


def run_faults(
    weights: Weights, nodes: int, megabits: float, folder: Path, seconds: float
) -> dict[str, dict[str, Any]]:
    """Run every fault on a network of its own."""
    outcomes = {}
    for fault in FAULTS:
        with ExitStack() as exits:
            place = folder / fault.name
            if fault.small_disk:
                exits.enter_context(_small_disk(place / f"n{_VICTIM:02d}", weights.total_bytes // 3))
            stage = exits.enter_context(staged(nodes, megabits, weights, place))
            outcomes[fault.name] = asdict(_run(fault, stage, megabits * 125_000, seconds))
        shutil.rmtree(place, ignore_errors=True)
    return outcomes


def _run(fault: Fault, stage: Stage, bytes_per_second: float, seconds: float) -> FaultOutcome:
    stage.start_origin()
    stage.start_nodes("bench.swarm.node", fault.extra)
    give_keys(stage)
    director = Director(stage, bytes_per_second, racks=lambda _: "")
    must = [node for node in stage.nodes if fault.spared(node)]
    total = stage.weights.total_bytes
    happened = False

    def whole() -> bool:
        nonlocal happened
        have = max(node.status.get("have", 0) for node in stage.nodes)
        if not happened and have > total * _RATIO_BEFORE:
            happened = True
            fault.happen(stage)
        return all(node.whole_at for node in must)

    try:
        outcome = measure(stage, director.start, whole, seconds)
    except TimeoutError as error:
        return FaultOutcome(
            finished=False,
            seconds=seconds,
            ratio_to_bound=0.0,
            origin_copies=0.0,
            bad_bytes_on_whole_nodes=_bad(stage.weights, must),
            said=str(error)[:300],
        )
    finally:
        director.stop()
    victim = stage.nodes[_VICTIM]
    return FaultOutcome(
        finished=True,
        seconds=outcome.seconds,
        ratio_to_bound=outcome.seconds / (total / bytes_per_second),
        origin_copies=outcome.origin_copies,
        bad_bytes_on_whole_nodes=_bad(stage.weights, must),
        said=victim.status.get("failure", "") if victim.alive else "killed",
    )


def _bad(weights: Weights, must: Sequence[NodeProcess]) -> int:
    right = {path.name: _sha256(path) for path in weights.folder.iterdir()}
    whole = [node for node in must if node.whole_at]
    return sum(_sha256(node.folder / name) != digest for node in whole for name, digest in right.items())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        unmount = ["umount", "-l", str(folder)]
        subprocess.run(unmount, check=False)


def _nothing(_: Stage) -> None:
    pass


def _kill_one(stage: Stage) -> None:
    stage.nodes[_VICTIM].process.kill()


def _restart_origin(stage: Stage) -> None:
    stage.stop_origin()
    stage.start_origin()


def _not_victim(node: NodeProcess) -> bool:
    return node.name != f"n{_VICTIM:02d}"


def _corrupting(number: int) -> Sequence[str]:
    return ("--corrupt-every", str(_CORRUPT_EVERY)) if number == _VICTIM else ()


FAULTS = (
    Fault("peer_killed", _kill_one, spared=_not_victim),
    Fault("corrupting_peer", _nothing, extra=_corrupting, spared=_not_victim),
    Fault("full_disk", _nothing, spared=_not_victim, small_disk=True),
    Fault("origin_restarted", _restart_origin),
)
