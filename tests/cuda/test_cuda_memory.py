"""Memory of a device that a holder lends: wiped, kept, returned, out of others' reach, and freed at death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.cuda.conftest import Device, HolderProcess
from tests.cuda.tenant import BROUGHT_EXTENTS, DeviceTenant, TenantProcess
from tests.engines.conftest import wait_until
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.holder_place import open_place
from workers.engines.torch_engine.holder_weights import hold_weights
from workers.engines.torch_engine.weights import load_weights
from workers.kv.pool import NodePools

StartTenant = Callable[[str], TenantProcess]


@pytest.fixture
def here(device: Device, folder: Path, holder: HolderProcess) -> Iterator[DeviceTenant]:
    """A replica in this process."""
    tenant = DeviceTenant(folder, holder.socket, device.device, "here")
    yield tenant
    tenant.member.close()


@pytest.fixture
def start(device: Device, folder: Path, holder: HolderProcess) -> Iterator[StartTenant]:
    started: list[TenantProcess] = []

    def start(replica_id: str) -> TenantProcess:
        started.append(TenantProcess(folder, holder.socket, device.device, replica_id))
        return started[-1]

    yield start
    for tenant in started:
        tenant.close()


def test_extents_are_wiped_written_and_returned(
    here: DeviceTenant, start: StartTenant, holder: HolderProcess
) -> None:
    held = here.take(BROUGHT_EXTENTS)
    assert len(held) == BROUGHT_EXTENTS
    assert here.content(held) == [0]
    here.fill(held, 0xAB)
    assert here.content(held) == [0xAB]
    assert holder.status().lent_bytes == BROUGHT_EXTENTS * here.layout.extent_bytes
    here.give(held)
    assert holder.status().lent_extents == 0
    other = start("other")
    taken = other.ask("take", 2 * BROUGHT_EXTENTS)
    assert set(held) <= set(taken)
    assert other.ask("content", taken) == [0]


def test_touching_what_is_not_leased_ends_the_toucher_alone(here: DeviceTenant, start: StartTenant) -> None:
    held = here.take(2)
    here.fill(held, 0x11)
    wild = start("wild")
    wild.ask("take", 1)
    assert wild.ask("fill", held, 0x99) is None
    assert wild.process.wait(60) != 0
    assert here.content(held) == [0x11]
    here.fill(held, 0x12)
    assert here.content(held) == [0x12], "this process still computes"


def test_what_a_killed_replica_had_is_wiped_and_lent_again(
    here: DeviceTenant, start: StartTenant, folder: Path, holder: HolderProcess
) -> None:
    victim = start("victim")
    held = victim.ask("take", BROUGHT_EXTENTS)
    victim.ask("fill", held, 0x5A)
    victim.kill()
    assert NodePools(folder).sweep({"here", "victim"}) == BROUGHT_EXTENTS
    wait_until(lambda: holder.status().lent_extents == 0)
    taken = here.take(2 * BROUGHT_EXTENTS)
    assert set(held) <= set(taken)
    assert here.content(taken) == [0]


def test_holders_death_takes_nothing_away(
    device: Device, folder: Path, here: DeviceTenant, holder: HolderProcess
) -> None:
    held = here.take(2)
    here.fill(held, 0x21)
    holder.kill()
    assert here.content(held) == [0x21]
    assert here.take(1) == []
    here.give(held[:1])
    successor = HolderProcess(device.memory, folder)
    try:
        wait_until(lambda: len(here.take(1)) == 1)
        assert here.content(held[1:]) == [0x21]
    finally:
        successor.kill()


def test_weights_are_on_the_device_once_and_gone_with_the_last_user(
    device: Device, holder: HolderProcess, demo_model: Path
) -> None:
    config = read_model_config(demo_model)
    places = [open_place(holder.socket, device.device) for _ in range(2)]
    copies = [
        hold_weights(
            place, demo_model, config, dtype=torch.float32, model_digest="m", on_progress=lambda _: None
        )
        for place in places
    ]
    own = load_weights(
        demo_model, config, device=device.device, dtype=torch.float32, on_progress=lambda _: None
    )
    for copy in copies:
        assert torch.equal(copy.embedding, own.embedding)
        assert torch.equal(copy.layers[-1].mlp_norm, own.layers[-1].mlp_norm)
    (held,) = holder.status().weights
    assert (held.users, held.state) == (2, "ready")
    for place in places:
        place.link.close()
    wait_until(lambda: holder.status().weights == ())
