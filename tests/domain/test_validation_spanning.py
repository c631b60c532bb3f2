"""A replica over several nodes that can never run is refused before anything is started."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.validation.domain.spanning import Candidate, find_obstacle

PROCESSORS = [Candidate("s1", has_cards=False)] * 2
CARDS = [Candidate("s1", has_cards=False), Candidate("s1", has_cards=True)]


@pytest.mark.parametrize(
    ("engine", "options", "candidates", "field"),
    [
        ("torch", {"pipeline_stages": 2}, PROCESSORS, ""),
        ("vllm", {"tensor_parallel_size": 2}, PROCESSORS, ""),
        ("vllm", {"pipeline_parallel_size": 2}, CARDS, ""),
        ("vllm", {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}, PROCESSORS, ""),
        ("vllm", {"pipeline_parallel_size": 2}, PROCESSORS, "engine_options.pipeline_parallel_size"),
        ("torch", {"pipeline_stages": 2}, PROCESSORS[:1], "nodes_per_replica"),
        (
            "torch",
            {"pipeline_stages": 2},
            [*PROCESSORS[:1], Candidate("s2", has_cards=False)],
            "nodes_per_replica",
        ),
        ("torch", {"pipeline_stages": 2}, [Candidate("", has_cards=True)] * 4, "nodes_per_replica"),
        ("vllm", {"pipeline_parallel_size": 2}, [], "nodes_per_replica"),
    ],
)
def test_what_stands_against_several_nodes_is_said_with_its_field(
    engine: str, options: dict[str, object], candidates: list[Candidate], field: str
) -> None:
    obstacle = find_obstacle(engine, options, 2, candidates)
    assert (obstacle.field if obstacle is not None else "") == field


def test_nodes_whose_supernode_is_not_known_are_to_be_labelled() -> None:
    obstacle = find_obstacle("torch", {}, 3, [Candidate("", has_cards=True)] * 4 + CARDS)
    assert obstacle is not None
    assert obstacle.why == (
        "3 nodes of one supernode are needed; of those with torch that may be used, no supernode has more"
        " than 2, and of 4 the supernode is not known: label them `supernode`"
    )


nodes = st.lists(st.builds(Candidate, st.sampled_from(["", "s1", "s2"]), st.booleans()), max_size=12)


@given(nodes, st.integers(1, 6))
def test_it_is_refused_exactly_where_no_supernode_is_large_enough(found: list[Candidate], count: int) -> None:
    largest = max(sum(one.supernode == name for one in found) for name in ("s1", "s2"))
    assert (find_obstacle("torch", {}, count, found) is None) == (count == 1 or largest >= count)
