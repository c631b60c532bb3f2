"""How many nodes and accelerators a pasted launch comes to, and what started it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.protocol.engines.option import Options
from workers.protocol.engines.tables import accelerators_of, parallel_words, span_obstacle

_USUAL_ON_NODE = 8
"""Accelerators that a node has at most, but for rare ones."""
_CONTAINERS = ("docker", "podman", "nerdctl", "apptainer", "singularity", "enroot")
_STARTERS = ("srun", "sbatch", "salloc", "mpirun", "mpiexec", "orterun", "prun", "torchrun", "pdsh", "ray")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one replica takes."""

    nodes: int
    accelerators: int
    """On each node."""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Why it would not start."""


def size_launch(engine: str, options: Options, *, nodes: int, told: int | None) -> Sizes:
    """Share the accelerators that options need among the nodes that were said.

    `told`: accelerators that are asked for on each node, `None` where nobody said it.
    """
    needed, words = accelerators_of(engine, options), parallel_words(engine, options)
    each = -(-needed // nodes)
    problems = []
    if needed % nodes:
        problems.append(
            f"{words} need {needed} accelerators, which {nodes} nodes cannot share evenly: make their "
            "product a multiple of the number of nodes, or take another number"
        )
    elif told is not None and told != each:
        asked = f"{told}" if nodes == 1 else f"{told} on each of {nodes} nodes"
        problems.append(f"{words} need {needed} accelerators, and {asked} are asked for")
    option, obstacle = span_obstacle(engine, options) if nodes > 1 else ("", "")
    if option:
        problems.append(f"{option} does not go with several nodes: {obstacle}")
    notes = () if each <= _USUAL_ON_NODE else (_of_size(words, each, nodes),)
    return Sizes(nodes, each, notes, tuple(problems))


def _of_size(words: str, each: int, nodes: int) -> str:
    advice = "give more nodes" if nodes > 1 else "nodes_per_replica (--nnodes) shares them among several"
    return (
        f"{words} need {each} accelerators on one node, and nodes with more than {_USUAL_ON_NODE} are rare: "
        f"{advice}"
    )


def describe_prefix(words: Sequence[str]) -> tuple[str, str]:
    """What stands before an engine's command, without variables, and what becomes of it; both may be empty.

    Variables of a container are read on their own, and interpreters are part of the command.
    """
    said: list[str] = []
    for place, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name.startswith("python"):
            break
        is_variable = word in ("-e", "--env") or (place > 0 and words[place - 1] in ("-e", "--env"))
        if not is_variable:
            said.append(word)
    if not said:
        return "", ""
    return " ".join(said), f"nothing: {_why_not(said[0].rpartition('/')[2])}"


def _why_not(starter: str) -> str:
    if starter in _STARTERS:
        return (
            "the fleet starts the ranks of a replica together; on how many nodes, nodes_per_replica says "
            "(--nnodes)"
        )
    if starter in _CONTAINERS:
        return "engines run in an environment of their node, not in a container"
    return "a node's agent starts the engine itself"
