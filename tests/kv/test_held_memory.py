"""Extents that a holder lends to replicas, between real processes: wiped, out of others' reach, and freed.

Each test runs over the host's memory, and over the code for CUDA with a FAKE driver library, which stands
where NVIDIA's would (`tests/fakes/cuda_library.py`). `tests/cuda` has what needs a device.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.conftest import wait_until
from tests.fakes.cuda_library import PAGE_BYTES
from tests.fakes.kv_tenant import LAYOUT, Tenant, content, fill, held_arenas, patient_link
from workers.kv.holder_link import HolderLink, is_holder_there, socket_of
from workers.kv.holder_wire import (
    AskStatus,
    Done,
    GiveBack,
    Hello,
    Lend,
    Lent,
    Status,
    close_all,
    send,
    short_path,
)
from workers.kv.lease import PoolMember, Terms, Use, join
from workers.kv.pool import NodePools
from workers.kv.table import Extent, Table

ROOT = Path(__file__).parents[2]
SHAPE = replace(LAYOUT, kind="GPU-1", page_bytes=PAGE_BYTES)
SIZE = SHAPE.extent_blocks
StartTenant = Callable[..., Tenant]


class HolderProcess:
    """A holder, started as the agent does, but over the fake driver where it is to be CUDA."""

    def __init__(self, kind: str, folder: Path, *, limit_bytes: int | None = None) -> None:
        self.kind = kind
        self.socket = socket_of(folder, "GPU-1")
        limit = () if limit_bytes is None else (f"--limit-bytes={limit_bytes}",)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.fakes.cuda_library", f"--memory={kind}"),
                *("--accelerator=GPU-1", f"--socket={self.socket}", f"--pools={folder}"),
                *("--linger-seconds=0", "--idle-seconds=600", *limit),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: is_holder_there(self.socket) and self.answers(), seconds=60)

    def answers(self) -> bool:
        """Whether it is this one that listens, and not its predecessor any more."""
        link = patient_link(self.socket)
        link.close()
        return link.hello.pid == self.process.pid

    def status(self) -> Status:
        link = patient_link(self.socket)
        status, _ = link.ask(AskStatus(), Status)
        link.close()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture(params=["host", "cuda"])
def holder(request: pytest.FixtureRequest, folder: Path) -> Iterator[HolderProcess]:
    holder = HolderProcess(request.param, folder)
    yield holder
    holder.kill()


@pytest.fixture
def start(folder: Path, holder: HolderProcess) -> Iterator[StartTenant]:
    started: list[Tenant] = []

    def start(replica_id: str, *, brought: int = 8 * SIZE) -> Tenant:
        started.append(Tenant(folder, replica_id, brought=brought, layout=SHAPE, holder=holder.socket))
        return started[-1]

    yield start
    for tenant in started:
        tenant.close()


@pytest.fixture
def member(folder: Path, holder: HolderProcess) -> Iterator[PoolMember]:
    """A replica in this process."""
    member = join(folder, SHAPE, "here", 1, Terms(8 * SIZE), arenas=held_arenas(holder.socket))
    yield member
    member.close()


def test_extent_is_wiped_before_it_is_lent_and_as_it_is_returned(
    member: PoolMember, start: StartTenant, holder: HolderProcess
) -> None:
    held = member.take(3, Use(needed=3 * SIZE))
    assert [content(member, extent) for extent in held] == [{0}] * 3
    fill(member, held[0], 0xAB)
    assert holder.status().lent_bytes == 3 * SHAPE.extent_bytes
    member.give(held, Use())
    assert holder.status().lent_extents == 0
    other = start("other")
    taken = other.ask("take", count=16, needed=16 * SIZE)
    assert set(held) <= set(taken)
    assert other.ask("content", extents=taken) == [0]


def test_what_a_replica_writes_stays_and_nobody_else_reaches_it(start: StartTenant) -> None:
    victim, reader, writer = start("victim"), start("reader"), start("writer")
    held = victim.ask("take", count=2, needed=2 * SIZE)
    victim.ask("fill", extents=held, value=0x11)
    assert reader.ask("content", extents=held) is None
    assert writer.ask("fill", extents=held, value=0x99) is None
    assert (reader.process.wait(60), writer.process.wait(60)) == (-signal.SIGSEGV, -signal.SIGSEGV)
    assert victim.ask("content", extents=held) == [0x11]


def test_extent_cannot_be_touched_after_it_was_given_back(start: StartTenant) -> None:
    tenant = start("late")
    held = tenant.ask("take", count=1, needed=SIZE)
    tenant.ask("give", extents=held)
    assert tenant.ask("fill", extents=held, value=1) is None
    assert tenant.process.wait(60) == -signal.SIGSEGV


def test_replica_killed_while_it_writes_leaves_nothing(
    member: PoolMember, start: StartTenant, holder: HolderProcess
) -> None:
    victim = start("victim")
    held = victim.ask("take", count=8, needed=8 * SIZE)
    assert victim.ask("write_for_ever", extents=held, value=0x5A)
    victim.kill()
    taken = member.take(16, Use(needed=16 * SIZE))
    assert set(held) <= set(taken)
    assert {value for extent in taken for value in content(member, extent)} == {0}
    assert holder.status().lent_extents == 16


def test_memory_of_the_dead_is_freed_when_the_agent_reclaims_it(
    folder: Path, member: PoolMember, start: StartTenant, holder: HolderProcess
) -> None:
    member.take(1, Use(needed=SIZE))
    victim = start("victim")
    victim.ask("take", count=5, needed=5 * SIZE)
    victim.kill()
    assert NodePools(folder).sweep({"here"}) == 5
    wait_until(lambda: holder.status().lent_extents == 1, seconds=60)


def test_only_what_the_table_lends_to_a_process_is_handed_to_it(
    member: PoolMember, start: StartTenant, holder: HolderProcess
) -> None:
    other = start("other")
    theirs = other.ask("take", count=1, needed=SIZE)
    link = patient_link(holder.socket)
    (free,) = {0, 1} - set(theirs)
    for extents in (theirs, [free], [10**6]):
        for request, kind in (
            (Lend(SHAPE.pool_id, tuple(extents)), Lent),
            (GiveBack(SHAPE.pool_id, tuple(extents)), Done),
        ):
            with pytest.raises(OSError, match=r"not lent to process|has no extent") as refused:
                link.ask(request, kind)
            assert refused.value.errno == errno.EACCES
    with pytest.raises(OSError, match="hexadecimal"):
        link.ask(Lend("../x", (0,)), Lent)
    own = member.take(1, Use(needed=SIZE))
    _, descriptors = link.ask(Lend(SHAPE.pool_id, tuple(own)), Lent)
    close_all(descriptors)
    link.close()


def test_fenced_replica_neither_sees_nor_harms_the_next_owner(
    folder: Path, member: PoolMember, start: StartTenant
) -> None:
    held = member.take(1, Use(needed=SIZE))
    fill(member, held[0], 0x33)
    table = Table(folder / SHAPE.pool_id)
    with table.transaction():
        before = table.read_extent(held[0])
        table.write_extent(held[0], Extent(generation=before.generation + 1))
    table.close()
    heir = start("heir")
    assert held[0] in heir.ask("take", count=16, needed=16 * SIZE)
    assert heir.ask("content", extents=held) == [0]
    fill(member, held[0], 0x77)  # it has not looked yet
    assert heir.ask("content", extents=held) == [0]
    heir.ask("fill", extents=held, value=0x44)
    assert content(member, held[0]) == {0x77}


def test_holders_death_takes_nothing_away_and_its_successor_lends(
    folder: Path, member: PoolMember, holder: HolderProcess
) -> None:
    held = member.take(2, Use(needed=2 * SIZE))
    fill(member, held[0], 0x21)
    holder.kill()
    assert member.take(1, Use(live=2 * SIZE, needed=3 * SIZE)) == []
    assert "the machine has no memory for 1 extents" in member.refusal
    assert content(member, held[0]) == {0x21}
    member.give(held[:1], Use(live=SIZE))
    successor = HolderProcess(holder.kind, folder)
    try:
        wait_until(lambda: len(member.take(1, Use(live=SIZE, needed=2 * SIZE))) == 1, seconds=60)
        fill(member, held[1], 0x22)
        assert content(member, held[1]) == {0x22}
        member.give(member.extents, Use())
        assert successor.status().lent_extents == 0
    finally:
        successor.kill()


def test_device_that_is_full_refuses_and_nothing_is_lost(folder: Path, holder: HolderProcess) -> None:
    holder.kill()
    small = HolderProcess(holder.kind, folder, limit_bytes=4 * SHAPE.extent_bytes)
    try:
        first = join(folder, SHAPE, "a", 1, Terms(8 * SIZE), arenas=held_arenas(small.socket))
        assert first.take(5, Use(needed=5 * SIZE)) == []
        assert "no memory for 5 extents" in first.refusal
        assert small.status().lent_extents == 0
        held = first.take(4, Use(needed=5 * SIZE))
        assert len(held) == 4
        first.give(held[:2], Use(live=2 * SIZE))
        assert len(first.take(2, Use(live=2 * SIZE, needed=4 * SIZE))) == 2
        first.close()
    finally:
        small.kill()


def test_pool_that_was_removed_is_let_go(folder: Path, start: StartTenant, holder: HolderProcess) -> None:
    tenant = start("gone")
    tenant.ask("take", count=4, needed=4 * SIZE)
    tenant.kill()
    NodePools(folder).sweep(set())
    assert not (folder / SHAPE.pool_id).exists()
    wait_until(lambda: holder.status().lent_extents == 0, seconds=60)


def test_holder_ends_when_the_nodes_pools_are_taken_down(
    folder: Path, start: StartTenant, holder: HolderProcess
) -> None:
    tenant = start("last")
    tenant.ask("take", count=2, needed=2 * SIZE)
    tenant.kill()
    NodePools(folder).remove_all()
    assert holder.process.wait(60) == 0


def test_new_holder_takes_the_place_of_an_old_one(folder: Path, holder: HolderProcess) -> None:
    second = HolderProcess(holder.kind, folder)
    try:
        assert second.answers()
        assert holder.process.wait(60) == 0, "a holder that is replaced and holds nothing ends"
        assert second.answers(), "and leaves its successor's socket alone"
    finally:
        second.kill()


def test_holder_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    """One that is stopped, say: it is asked once, and then not for a while."""
    path, now = tmp_path / "socket", 100.0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with short_path(path) as address:
            listener.bind(address)
        listener.listen()
        pending: list[socket.socket] = []

        def greet() -> None:
            channel, _ = listener.accept()
            send(channel, Hello("GPU-1", "host", 4096, "", 1))
            pending.append(channel)

        greeter = threading.Thread(target=greet)
        greeter.start()
        link = HolderLink(path, clock=lambda: now)
        greeter.join(10)
        with pytest.raises(TimeoutError):
            link.ask(AskStatus(), Status, seconds=0.05)
        with pytest.raises(ConnectionRefusedError, match="did not answer a moment ago"):
            link.ask(AskStatus(), Status, seconds=0.05)
        for channel in pending:
            channel.close()
