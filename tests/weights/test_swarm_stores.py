"""Stores of several nodes in one swarm: they give and take by orders, before and after they are whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.node import wait_for
from tests.fakes.weights import PIECE, BadSource, Store, Weights, folder_source, made_weights, running_store
from workers.protocol.weights import SwarmOrder, SwarmParent, WeightsSource, WeightsState

KEY = "5c" * 32
ORIGIN = SwarmParent(node_id="origin")


@pytest.fixture
def weights() -> Weights:
    return made_weights(shard_bytes=20 * PIECE + 5)


@pytest.fixture
def stores(tmp_path: Path, weights: Weights) -> Iterator[list[Store]]:
    with ExitStack() as exits:
        made = [exits.enter_context(running_store(tmp_path / f"n{n}", node_id=f"n{n}")) for n in range(3)]
        for store in made:
            store.know(weights)
            store.want(weights.wanted(paused=True, swarm=order()))
        wait_for(lambda: all(store.keeper.report().piece_port for store in made), "ports")
        yield made


def parent(stores: list[Store], number: int) -> SwarmParent:
    port = wait_for(lambda: stores[number].keeper.report().piece_port, "its port")
    return SwarmParent(node_id=f"n{number}", host="127.0.0.1", port=port)


def order(*stripes: tuple[SwarmParent, ...], key: str = KEY) -> SwarmOrder:
    return SwarmOrder(epoch=1, key=key, valid_seconds=600.0, stripes=stripes)


def counting(weights: Weights, store: Store) -> tuple[BadSource, WeightsSource]:
    source = BadSource(weights.contents)
    return source, store.give("the-origin", source)


def test_a_revision_goes_from_store_to_store_and_the_origin_gives_one_copy(
    stores: list[Store], weights: Weights, tmp_path: Path
) -> None:
    origin = folder_source(weights.write_to(tmp_path / "origin"))
    wishes = [
        order((ORIGIN,), (parent(stores, 2),)),
        order((parent(stores, 0),), (parent(stores, 2), parent(stores, 0))),
        order((parent(stores, 1),), (ORIGIN,)),
    ]
    for store, wish in zip(stores, wishes, strict=True):
        store.want(weights.wanted(origin, swarm=wish))
    for store in stores:
        store.wait_state(weights, WeightsState.READY)
        assert store.is_right(weights)
    came = [{s.kind: 0 for s in held.sources} for s in stores if (held := s.held(weights))]
    assert len(came) == 3
    from_origin = sum(s.bytes for store in stores for s in told(store, weights) if s.kind == "folder")
    from_peers = sum(s.bytes for store in stores for s in told(store, weights) if s.kind == "peer")
    assert from_origin == weights.total_bytes
    assert from_peers == 2 * weights.total_bytes


def told(store: Store, weights: Weights) -> tuple[object, ...]:
    held = store.held(weights)
    assert held is not None
    return held.sources


def test_without_orders_for_its_stripes_a_store_waits_and_asks_no_origin(
    stores: list[Store], weights: Weights
) -> None:
    origin, named = counting(weights, stores[0])
    stores[0].want(weights.wanted(named, swarm=order()))
    held = stores[0].wait_state(weights, WeightsState.FETCHING)
    wait_for(lambda: "waits to be told" in reason(stores[0], weights), "the reason")
    assert held.have_bytes == 0
    assert origin.asked == []
    stores[0].want(weights.wanted(named, swarm=order((ORIGIN,))))
    stores[0].wait_state(weights, WeightsState.READY)


def reason(store: Store, weights: Weights) -> str:
    held = store.held(weights)
    return "" if held is None else held.reason


def test_a_store_that_was_whole_before_gives_to_whoever_joins_later(
    stores: list[Store], weights: Weights, tmp_path: Path
) -> None:
    folder = weights.write_to(tmp_path / "origin")
    stores[0].want(weights.wanted(folder_source(folder)))
    stores[0].wait_state(weights, WeightsState.READY)
    shutil.rmtree(folder)
    stores[0].want(weights.wanted(folder_source(folder), swarm=order()))
    stores[1].want(weights.wanted(folder_source(folder), swarm=order((parent(stores, 0),))))
    stores[1].wait_state(weights, WeightsState.READY)
    assert stores[1].is_right(weights)


def test_what_comes_from_a_damaged_seed_is_refused_and_told(
    stores: list[Store], weights: Weights, tmp_path: Path
) -> None:
    folder = weights.write_to(tmp_path / "origin")
    for number in (0, 1):
        stores[number].want(weights.wanted(folder_source(folder), swarm=order((ORIGIN,))))
        stores[number].wait_state(weights, WeightsState.READY)
    shard = stores[0].folder(weights) / "model-00001-of-00002.safetensors"
    shard.chmod(0o600)
    with shard.open("r+b") as file:
        file.seek(PIECE * 3)
        file.write(b"\xff\x00" * 8)
    wish = order((parent(stores, 0), parent(stores, 1)))
    stores[2].want(weights.wanted(folder_source(folder), swarm=wish))
    held = stores[2].wait_state(weights, WeightsState.READY)
    assert stores[2].is_right(weights)
    assert held.swarm is not None
    assert [c.parent for c in held.swarm.complaints if c.bad_pieces] == ["n0"]


def test_a_store_listens_only_while_it_is_in_a_swarm(stores: list[Store], weights: Weights) -> None:
    for store in stores:
        store.want(weights.wanted(paused=True))
    wait_for(lambda: not any(store.keeper.report().piece_port for store in stores), "closed ports")
    assert all(store.keeper.report().in_swarms for store in stores)


def test_a_store_with_another_key_gets_nothing(stores: list[Store], weights: Weights, tmp_path: Path) -> None:
    folder = folder_source(weights.write_to(tmp_path / "origin"))
    stores[0].want(weights.wanted(folder, swarm=order((ORIGIN,))))
    stores[0].wait_state(weights, WeightsState.READY)
    stores[1].want(weights.wanted(folder, swarm=order((parent(stores, 0),), key="ab" * 32)))
    wait_for(lambda: "403" in reason(stores[1], weights), "the refusal")
    held = stores[1].held(weights)
    assert held is not None
    assert held.have_bytes == 0


def test_a_store_that_leaves_a_swarm_fetches_as_if_there_were_none(
    stores: list[Store], weights: Weights, tmp_path: Path
) -> None:
    folder = folder_source(weights.write_to(tmp_path / "origin"))
    stores[0].want(weights.wanted(folder, swarm=order()))
    stores[0].wait_state(weights, WeightsState.FETCHING)
    stores[0].want(weights.wanted(folder))
    held = stores[0].wait_state(weights, WeightsState.READY)
    assert {source.kind for source in held.sources} == {"folder"}
    assert held.swarm is None
