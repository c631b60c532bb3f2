"""What engines claim of an accelerator, whose weights are shared, and which wishes are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from exaserve_ops.serving.domain.accelerator_wish import (
    ANYTHING,
    MpsShare,
    WishError,
    check_size,
    read_wish,
)
from exaserve_ops.serving.domain.placement import (
    AcceleratorRoom,
    Placement,
    PlacementBoard,
    PlacementRequest,
)
from exaserve_ops.serving.domain.reservation import AcceleratorSize, Holding, Terms, margin_bytes, tally
from exaserve_ops.serving.domain.terms import terms_of
from tests.fakes.accelerator_rooms import GIB, card, node


# -- what engines claim --------------------------------------------------------------------------
def claims(engine: str, options: dict[str, object]) -> float:
    found = terms_of(engine, options, digest="d", parameter_count=10, weights_bytes=20, needed_bytes=100)
    return found.claimed_millionths / 1_000_000


@pytest.mark.parametrize(
    ("engine", "options", "ratio"),
    [
        ("vllm", {}, 0.92),
        ("vllm", {"gpu_memory_utilization": 0.45}, 0.45),
        ("vllm", {"extra_arguments": "--gpu-memory-utilization 0.85"}, 0.85),
        ("vllm", {"extra_arguments": "--gpu_memory_utilization=0.5"}, 0.5),
        ("vllm", {"gpu_memory_utilization": "much"}, 0.92),
        ("vllm", {"kv_cache_memory_bytes": 1 << 30}, 0.0),
        ("sglang", {"mem_fraction_static": 0.5}, 0.6),
        ("sglang", {"mem_fraction_static": 0.93}, 0.98),
        ("torch", {}, 0.0),
        ("simulated", {}, 0.0),
    ],
)
def test_engines_claim_by_their_own_rules(engine: str, options: dict[str, object], ratio: float) -> None:
    assert claims(engine, options) == pytest.approx(ratio)


def torch_terms(options: dict[str, object], **changes: Any) -> Terms:
    facts: dict[str, Any] = {"digest": "a", "parameter_count": 10, "weights_bytes": 20, "needed_bytes": 100}
    return terms_of("torch", options, **(facts | changes))


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_card"),
    [
        ({}, 40, 20),
        ({"dtype": "bfloat16"}, 20, 20),
        ({"dtype": "float32"}, 40, 40),
        ({"weights": "private"}, 0, 0),
        ({"dtype": "int4"}, 0, 0),
    ],
)
def test_torch_shares_weights_in_the_type_it_computes_in(
    options: dict[str, object], on_cpu: int, on_card: int
) -> None:
    found = torch_terms(options)
    assert found.copy_on(AcceleratorSize("cpu", 1000))[1] == on_cpu
    assert found.copy_on(AcceleratorSize("cuda", 1000, shares_memory=True))[1] == on_card
    assert found.copy_on(AcceleratorSize("cuda", 1000)) == ("", 0), "a card whose memory nobody shares"


def test_copies_of_other_content_or_type_are_not_shared() -> None:
    names = {
        torch_terms({"dtype": dtype}, digest=digest).copy for digest in "ab" for dtype in ("auto", "bfloat16")
    }
    assert len(names) == 4
    assert torch_terms({}).copy == torch_terms({"dtype": "float32"}).copy
    assert torch_terms({}, parameter_count=None).copy == ""
    assert torch_terms({}, accelerators=2) == Terms()
    assert torch_terms({}, needed_bytes=40).copy == "", "too small for its weights: it counts whole"


def test_card_whose_memory_is_shared_holds_weights_once_but_not_for_clients_of_mps() -> None:
    terms = Terms(card_copy="model", card_copy_bytes=20 * GIB)
    request = PlacementRequest("torch", 24 * GIB, terms=terms)

    def count(room: AcceleratorRoom, request: PlacementRequest) -> int:
        board = PlacementBoard(request, [node("n", room)])
        return sum(isinstance(board.place(standby=False), Placement) for _ in range(30))

    apart, together = card("GPU-1"), card("GPU-1", shares_memory=True)
    assert count(apart, request) == 3
    assert count(together, request) == (80 * GIB - margin_bytes(80 * GIB) - 20 * GIB) // (4 * GIB) == 14
    mps = replace(request, wish=read_wish(mps_thread_percent=1), terms=replace(terms, mps=MpsShare(1)))
    assert count(together, mps) == 3


# -- what may be asked for -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("any", "any"),
        ("whole", "whole"),
        ("slice", "slice"),
        (" Slice:3G.40GB ", "slice:3g.40gb"),
        ("slice:1g.10gb+me", "slice:1g.10gb+me"),
        ("nvidia.com/mig-4g.71gb", "slice:4g.71gb"),
    ],
)
def test_accelerators_are_asked_for_in_words(asked: str, text: str) -> None:
    assert read_wish(asked).text == text


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"accelerator": "gpu"}, "accelerator"),
        ({"accelerator": "whole:3g.40gb"}, "accelerator"),
        ({"accelerator": "slice:"}, "accelerator"),
        ({"accelerator": "slice:3g"}, "accelerator"),
        ({"slice_memory_bytes": 1}, "slice_memory_bytes"),
        ({"mps_thread_percent": 101}, "mps_thread_percent"),
        ({"mps_memory_bytes": -1}, "mps_memory_bytes"),
        ({"spill": True, "spill_reason": "x"}, "spill"),
        ({"accelerator": "slice", "spill": True, "spill_reason": "  "}, "spill_reason"),
        ({"accelerator": "slice", "spill_reason": "x"}, "spill"),
    ],
)
def test_wishes_that_make_no_sense_are_refused_by_field(wish: dict[str, object], field: str) -> None:
    with pytest.raises(WishError) as caught:
        read_wish(**wish)  # type: ignore[arg-type]  # as people would send it
    assert caught.value.field == field


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(WishError, match="one slice only"):
        check_size(read_wish("slice"), memory_bytes=1, accelerators=2)
    with pytest.raises(WishError, match="below what a replica needs"):
        check_size(read_wish(mps_memory_bytes=5), memory_bytes=12, accelerators=2)
    check_size(read_wish(mps_memory_bytes=6), memory_bytes=12, accelerators=2)
    check_size(ANYTHING, memory_bytes=0, accelerators=8)


def test_host_memory_for_kv_counts_on_a_cpu_whose_memory_it_is_and_not_on_a_card() -> None:
    terms = terms_of(
        "torch",
        {"kv_host_bytes": 3 * GIB},
        digest="model",
        parameter_count=GIB // 4,
        weights_bytes=GIB,
        needed_bytes=2 * GIB,
    )
    sizes = {"CPU": AcceleratorSize("cpu", 64 * GIB), "GPU": AcceleratorSize("cuda", 80 * GIB)}
    held = [Holding(uuid, 2 * GIB, terms) for uuid in ("CPU", "CPU", "GPU")]
    promised = tally(held, sizes)
    assert promised["CPU"].reserved_bytes == GIB + 2 * (GIB + 3 * GIB), "weights once, the rest for each"
    assert promised["GPU"].reserved_bytes == 2 * GIB
    assert (
        terms_of(
            "vllm", {"kv_host_bytes": GIB}, digest="m", parameter_count=1, weights_bytes=1, needed_bytes=1
        ).host_bytes
        == 0
    )
