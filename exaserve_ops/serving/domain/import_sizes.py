"""How many nodes and accelerators a pasted launch comes to."""

from __future__ import annotations

from dataclasses import dataclass

from workers.protocol.engines.option import Options
from workers.protocol.engines.tables import accelerators_of, parallel_words, span_obstacle

_USUAL_ON_NODE = 8
"""Accelerators that a node has at most, but for rare ones."""


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
