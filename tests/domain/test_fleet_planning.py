"""How many nodes a load needs: memory first, then Little's law, and what is known of either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain.engine_launch import read_launch
from exaserve_ops.serving.domain.fleet_plan import (
    MEASURED,
    MEMORY,
    RATE,
    STATED,
    Load,
    NodeKind,
    Rates,
    Workload,
    WorkloadPlan,
    WorkloadRefusal,
    plan_fleet,
    plan_workload,
)
from exaserve_ops.serving.domain.memory_plan import AcceleratorMemory, ModelFigures
from exaserve_ops.serving.domain.reference_points import (
    LLAMA_8B,
    LLAMA_8B_BYTES,
    ReferencePoint,
    reference_points,
)

GIB = 1 << 30
SMALL = ModelFigures("8B", LLAMA_8B, LLAMA_8B_BYTES)
CARDS = NodeKind(AcceleratorMemory(80 * GIB, "card"), accelerators=4)
CHAT = Load(prompt_tokens=384, output_tokens=128, limit_tokens=4096, requests_per_second=1000)
SLOW = Rates(8.0, STATED)


def workload(**changes: Any) -> Workload:
    whole = Workload(SMALL, read_launch("vllm", {}), CHAT, SLOW, sequences=32)
    return replace(whole, **changes)


def planned(asked: Workload, kind: NodeKind = CARDS) -> WorkloadPlan:
    answer = plan_workload(asked, kind)
    assert isinstance(answer, WorkloadPlan), answer
    return answer


def refused(asked: Workload, kind: NodeKind = CARDS) -> WorkloadRefusal:
    answer = plan_workload(asked, kind)
    assert isinstance(answer, WorkloadRefusal), answer
    return answer


@pytest.mark.parametrize("point", reference_points(), ids=lambda point: point.name)
def test_fleets_that_operators_run_come_out_as_they_run_them(point: ReferencePoint) -> None:
    plan = plan_fleet([point.workload], point.kind)
    assert not plan.refusals
    assert (plan.nodes, plan.replicas) == (point.nodes, point.replicas)
    (only,) = plan.workloads
    assert only.decided_by == MEMORY
    assert only.per_group * point.kind.accelerators // only.ways == point.replicas_per_node


def test_requests_at_once_follow_from_rate_and_duration() -> None:
    plan = planned(workload())
    assert plan.concurrency == 8000
    assert plan.replicas == plan.replicas_for_memory == 250
    assert any("Little's law" in text and "8,000.0" in text for text in plan.assumptions)
    assert any("8 s (stated)" in text for text in plan.assumptions)


def test_what_is_stated_holds_where_it_is_more_than_what_follows() -> None:
    load = replace(CHAT, concurrency=10_000, sessions=20_000)
    assert planned(workload(load=load)).concurrency == 20_000


def test_slow_replicas_are_more_than_memory_asks_for() -> None:
    plan = planned(workload(rates=Rates(8.0, STATED, 400.0, MEASURED)))
    assert plan.replicas_for_rate == 320
    assert (plan.replicas, plan.decided_by) == (320, RATE)
    assert any("measured" in text for text in plan.assumptions)


def test_what_is_not_known_is_said() -> None:
    plan = planned(workload(rates=Rates()))
    assert plan.concurrency is None
    assert plan.replicas_for_memory is None
    assert plan.replicas == 1
    assert any("not known" in text for text in plan.assumptions)


def test_several_replicas_on_a_card_are_told_their_share_of_it() -> None:
    plan = planned(workload())
    assert plan.per_group == 3
    assert plan.share_hint == ("gpu_memory_utilization", "0.32")
    assert 3 * plan.memory.claim.bytes <= 80 * GIB
    launched = read_launch("vllm", {"gpu_memory_utilization": 0.32})
    assert planned(workload(launch=launched)).per_group == 3
    whole_card = read_launch("vllm", {"gpu_memory_utilization": 0.9})
    assert planned(workload(launch=whole_card)).per_group == 1


def test_replica_without_a_bound_has_its_accelerator_to_itself() -> None:
    plan = planned(workload(sequences=None))
    assert plan.per_group == 1
    assert plan.sequences_each == 256
    assert plan.share_hint is None


def test_replicas_that_share_weights_are_more_on_a_node() -> None:
    node = NodeKind(AcceleratorMemory(256 * GIB, "cpu"), accelerators=1)
    launch = read_launch("torch", {"dtype": "bfloat16"})
    shared = planned(workload(launch=launch), node)
    assert shared.shares_weights
    assert shared.per_group == shared.per_group_shared > 2 * shared.per_group_unshared
    private = planned(
        workload(launch=read_launch("torch", {"dtype": "bfloat16", "weights": "private"})), node
    )
    assert private.per_group == private.per_group_unshared == shared.per_group_unshared
    on_cards = planned(workload(launch=launch))
    assert on_cards.per_group == on_cards.per_group_unshared < on_cards.per_group_shared
    lending = replace(CARDS, accelerator=replace(CARDS.accelerator, shares_memory=True))
    assert planned(workload(launch=launch), lending).per_group == on_cards.per_group_shared


def test_spare_share_is_of_all_nodes() -> None:
    spare = replace(CARDS, spare_ratio=0.1)
    plan = plan_fleet([workload()], spare)
    assert plan.nodes_for_load == plan_fleet([workload()], CARDS).nodes == 21
    assert plan.nodes == 24
    assert plan.nodes_spare / plan.nodes >= 0.1


def test_models_of_different_sizes_share_nodes_and_large_ones_span_cards() -> None:
    split = workload(launch=read_launch("vllm", {"tensor_parallel_size": 2}), sequences=None)
    few = workload(load=replace(CHAT, requests_per_second=None, replicas=3), sequences=None)
    asked = replace(split, load=replace(CHAT, requests_per_second=None, replicas=1))
    assert plan_fleet([asked], CARDS).nodes == 1
    # Two cards for the split one and two of the three others beside it: the third opens a node.
    assert plan_fleet([asked, few], CARDS).nodes == 2


def test_replica_over_several_nodes_takes_whole_ones() -> None:
    launch = read_launch("vllm", {"tensor_parallel_size": 4, "pipeline_parallel_size": 4})
    load = replace(CHAT, requests_per_second=None, replicas=3)
    assert plan_fleet([workload(launch=launch, load=load, sequences=None)], CARDS).nodes == 12
    odd = read_launch("vllm", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    assert "whole nodes" in refused(workload(launch=odd)).reason


def test_model_that_cannot_be_planned_is_told_and_not_counted() -> None:
    unknown = workload(model=ModelFigures("model-v2", LLAMA_8B, 0))
    strange = workload(model=ModelFigures("v4", {**LLAMA_8B, "compress_ratios": [4]}, LLAMA_8B_BYTES))
    plan = plan_fleet([unknown, strange, workload()], CARDS)
    assert [refusal.name for refusal in plan.refusals] == ["model-v2", "v4"]
    assert plan.refusals[1].upper_bound_bytes_per_token == 131_072
    assert plan.nodes == plan_fleet([workload()], CARDS).nodes


def test_requests_that_are_longer_than_what_is_served_are_refused() -> None:
    launch = read_launch("vllm", {"max_model_len": 2048})
    assert "longer than the 2,048" in refused(workload(launch=launch)).reason
    beyond = workload(load=replace(CHAT, limit_tokens=200_000))
    assert "131,072" in refused(beyond).reason


def test_model_that_is_too_large_for_the_card_says_so() -> None:
    small_card = NodeKind(AcceleratorMemory(16 * GIB, "card"), accelerators=8)
    assert refused(workload(), small_card).reason


LOADS = st.builds(
    Load,
    prompt_tokens=st.integers(1, 2000),
    output_tokens=st.integers(1, 1000),
    limit_tokens=st.just(4096),
    requests_per_second=st.floats(0.01, 50_000),
)


@given(LOADS, st.floats(0.1, 60), st.floats(1, 5000), st.floats(1.0, 4.0))
def test_more_load_never_needs_fewer_nodes(load: Load, seconds: float, tokens: float, factor: float) -> None:
    rates = Rates(seconds, STATED, tokens, STATED)
    more = replace(load, requests_per_second=(load.requests_per_second or 0) * factor)
    one, other = (plan_fleet([workload(load=asked, rates=rates)], CARDS) for asked in (load, more))
    assert 1 <= one.nodes <= other.nodes
    for plan in (one, other):
        (only,) = plan.workloads
        assert only.replicas <= plan.nodes_for_load * CARDS.accelerators * only.per_group
        assert only.replicas * only.sequences_each >= (only.concurrency or 0)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 200)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8]),
)
def test_groups_always_find_room_on_the_nodes_that_are_counted(
    groups: list[tuple[int, int]], accelerators: int
) -> None:
    asked = []
    for ways, count in groups:
        launch = read_launch("sglang", {"tp_size": min(ways, 8), "pp_size": max(1, ways // 8)})
        load = Load(100, 100, 1000, replicas=count)
        asked.append(Workload(SMALL, launch, load))
    plan = plan_fleet(asked, NodeKind(AcceleratorMemory(80 * GIB, "card"), accelerators))
    assert not plan.refusals
    used = sum(ways * count for ways, count in groups)
    assert plan.nodes * accelerators >= used
    # Whole powers of two leave no gaps but on the last node.
    assert (plan.nodes - 1) * accelerators < used
