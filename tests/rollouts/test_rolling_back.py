"""Bad releases are halted at the canary and come back by themselves, however they are bad and asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rollouts.conftest import Spoiler
from tests.rollouts.rolling_fleet import DOES_NOT_START, NODES, PATIENT, QUICK, Json, RollingFleet, told

pytestmark = [pytest.mark.rollouts, pytest.mark.timeout(600)]


SHARP = QUICK | {"canary_soak_seconds": 20, "min_requests": 20, "max_ttft_ratio": 1, "max_itl_ratio": 1}
"""On a machine with much else to do, the old release's p95 is many times what it would be on an idle one."""


@contextmanager
def nobody_notices(fleet: RollingFleet, **shape: int) -> Iterator[None]:
    """Under load no request fails, and in the end everything is as it was."""
    before = {row["release_number"] for row in fleet.replicas()}
    with fleet.load(**shape) as load:
        yield
    fleet.until_whole()
    assert load.failed == []
    assert len(load.answered) > NODES
    assert {row["release_number"] for row in fleet.replicas()} == before
    assert fleet.deployment()["release_number"] in before


def assert_came_back_from_the_canary(rollout: Json, *reasons: str) -> None:
    assert rollout["status"] == "rolled_back", told(rollout)
    canary, *others = rollout["waves"]
    assert canary["status"] == "failed"
    assert any(reason in canary["why"] for reason in reasons), told(rollout)
    assert any(reason in rollout["why"] for reason in reasons), "the page says why, after the end too"
    assert {wave["status"] for wave in others} == {"waiting"}


def test_release_that_does_not_start(fleet: RollingFleet) -> None:
    with nobody_notices(fleet):
        rollout = fleet.end_of(fleet.by_rest(QUICK, **DOES_NOT_START))
    assert_came_back_from_the_canary(rollout, "given up", "was restarted")


def test_release_that_answers_slowly(fleet: RollingFleet) -> None:
    """It computes one token of all prompts and answers a step: right, and many times slower."""
    with nobody_notices(fleet, turns=4, words=250):
        rollout = fleet.end_of(fleet.by_page(SHARP, max_num_batched_tokens=1))
    assert_came_back_from_the_canary(rollout, "TTFT p95", "time between tokens p95")
    assert "may by chance" in rollout["why"], "and says what would have been"


def test_weights_of_which_the_source_gives_other_bytes(fleet: RollingFleet, spoiler: Spoiler) -> None:
    model, shard = spoiler.registered("demo-rotten", storage="node")
    flip_a_byte(shard)
    with nobody_notices(fleet):
        rollout = fleet.end_of(fleet.by_admin(PATIENT, model=model["id"]))
    assert_came_back_from_the_canary(rollout, "weights are spoilt")
    assert "damaged" in rollout["why"]


def test_weights_that_are_cut_off_at_the_source(fleet: RollingFleet, spoiler: Spoiler) -> None:
    model, shard = spoiler.registered("demo-cut-off", storage="node")
    os.truncate(shard, shard.stat().st_size // 2)
    with nobody_notices(fleet):
        rollout = fleet.end_of(fleet.by_rest(PATIENT, model=model["id"]))
    assert_came_back_from_the_canary(rollout, "weights are spoilt")


@pytest.mark.parametrize("spoil", ["flip_a_byte", "cut_off", "spoil_header"])
def test_weights_that_are_read_in_place_and_are_not_what_was_registered(
    fleet: RollingFleet, spoiler: Spoiler, spoil: str
) -> None:
    model, shard = spoiler.registered(f"demo-in-place-{spoil.replace('_', '-')}")
    {"flip_a_byte": flip_a_byte, "cut_off": cut_off, "spoil_header": spoil_header}[spoil](shard)
    with nobody_notices(fleet):
        rollout = fleet.end_of(fleet.by_admin(PATIENT, model=model["id"]))
    assert_came_back_from_the_canary(rollout, "given up")
    assert "model.safetensors" in rollout["why"]


def flip_a_byte(shard: Path) -> None:
    """In the middle of the weights: the file is as long, and can be loaded."""
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def cut_off(shard: Path) -> None:
    """Half of it is there."""
    os.truncate(shard, shard.stat().st_size // 2)


def spoil_header(shard: Path) -> None:
    """It says that its header is longer than the file."""
    with shard.open("r+b") as file:
        file.write((1 << 40).to_bytes(8, "little"))
