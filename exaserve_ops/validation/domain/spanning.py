"""Whether a replica over several nodes can be tried at all, before anything is started. Pure.

Room that is taken now may become free; what is said here does not change by waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exaserve_ops.serving.domain.engine_launch import VLLM

_PIPELINE = "pipeline_parallel_size"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that offers the engine and may be used."""

    supernode: str
    """Empty where none is known."""
    has_cards: bool
    """It computes on more than its processors."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What it fails at."""

    field: str
    """Of the wish."""
    why: str


def find_obstacle(
    engine: str, options: Mapping[str, Any], nodes: int, candidates: Sequence[Candidate]
) -> Obstacle | None:
    """Why no replica of an engine can run on so many nodes at once; `None`: nothing stands against it."""
    if nodes < 2:  # noqa: PLR2004 - one node is not several
        return None
    stages = options.get(_PIPELINE, 1)
    if engine == VLLM and stages != 1 and candidates and not any(one.has_cards for one in candidates):
        return Obstacle(
            f"engine_options.{_PIPELINE}",
            "vLLM's pipeline stages do not work on processors, which is all that these nodes have: it would "
            f"become ready and die at its first request. Give tensor_parallel_size and no {_PIPELINE}",
        )
    sizes = Counter(one.supernode for one in candidates if one.supernode)
    largest = max(sizes.values(), default=0)
    if largest >= nodes:
        return None
    apart = sum(not one.supernode for one in candidates)
    told = f"of those with {engine} that may be used, no supernode has more than {largest}"
    unknown = f", and of {apart} the supernode is not known: label them `supernode`" if apart else ""
    return Obstacle("nodes_per_replica", f"{nodes} nodes of one supernode are needed; {told}{unknown}")
