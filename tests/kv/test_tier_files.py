"""Blocks on disk: what comes back is what was written, or it is refused; nothing is left of the dead."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.conftest import wait_until
from workers.agent.kv_pools import KvPoolKeeper
from workers.kv.tiers.block_io import Done, IoThread, ReadJob, WriteJob
from workers.kv.tiers.heat import Heat
from workers.kv.tiers.slot_file import HEADER_BYTES, DamagedBlockError, SlotFile, remove_dead_files
from workers.kv.tiers.slots import Place, SlotIndex

BLOCK = 5000
DIGEST = b"d" * 16


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SlotFile]:
    file = SlotFile(tmp_path, "r1", slots=4, block_bytes=BLOCK)
    yield file
    file.close()


def content(seed: int) -> bytes:
    return bytes((seed + n) % 256 for n in range(BLOCK))


def test_each_slot_gives_back_what_was_written_to_it(file: SlotFile) -> None:
    for slot in range(4):
        file.write(slot, slot + 1, bytes([slot]) * 16, content(slot))
    for slot in range(4):
        assert file.read(slot, slot + 1, bytes([slot]) * 16) == content(slot)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, HEADER_BYTES + BLOCK - 1), bits=st.integers(1, 255))
def test_a_change_of_any_byte_is_seen(file: SlotFile, at: int, bits: int) -> None:
    file.write(1, 7, DIGEST, content(3))
    place = file.slot_bytes + at
    before = os.pread(file.descriptor, 1, place)
    os.pwrite(file.descriptor, bytes([before[0] ^ bits]), place)
    with pytest.raises(DamagedBlockError, match="slot 1"):
        file.read(1, 7, DIGEST)


def test_older_content_another_block_and_nothing_at_all_are_refused(file: SlotFile) -> None:
    file.write(0, 1, DIGEST, content(0))
    for slot, generation, digest in ((0, 2, DIGEST), (0, 1, b"e" * 16), (2, 1, DIGEST)):
        with pytest.raises(DamagedBlockError, match="another block"):
            file.read(slot, generation, digest)
    os.ftruncate(file.descriptor, file.slot_bytes // 2)
    with pytest.raises(DamagedBlockError, match="bytes can be read"):
        file.read(0, 1, DIGEST)


def test_a_slot_of_another_replicas_file_is_refused(file: SlotFile, tmp_path: Path) -> None:
    other = SlotFile(tmp_path, "r2", slots=1, block_bytes=BLOCK)
    other.write(0, 1, DIGEST, content(0))
    os.pwrite(file.descriptor, os.pread(other.descriptor, other.slot_bytes, 0), 0)
    other.close()
    with pytest.raises(DamagedBlockError, match="has changed"):
        file.read(0, 1, DIGEST)


@contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_is_cut_short_is_an_error(file: SlotFile) -> None:
    with files_end_at(3 * file.slot_bytes + 100), pytest.raises(OSError, match="only 100 of"):
        file.write(3, 1, DIGEST, content(0))


def test_a_file_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    with files_end_at(4096), pytest.raises(OSError, match="large"):
        SlotFile(tmp_path / "kv", "r1", slots=100, block_bytes=BLOCK)
    assert list((tmp_path / "kv").glob("*.slots")) == []


OWNER = """
import sys, time
from pathlib import Path
from workers.kv.tiers.slot_file import SlotFile
SlotFile(Path(sys.argv[1]), "dead", slots=2, block_bytes=100)
print("made", flush=True)
time.sleep(60)
"""


def test_files_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path.cwd())},
    )
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"made\n"
        first = SlotFile(tmp_path, "first", slots=1, block_bytes=100)
        assert len(list(tmp_path.glob("*.slots"))) == 2
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        owner.stdout.close()
    keeper = KvPoolKeeper(tmp_path / "pools", tmp_path)
    keeper.tend(set(), now=1000.0)
    assert list(tmp_path.glob("*.slots")) == [first.path]
    first.close()
    assert remove_dead_files(tmp_path) == 0
    assert remove_dead_files(tmp_path / "not there") == 0


def test_nothing_is_removed_while_somebody_makes_a_file(tmp_path: Path) -> None:
    (tmp_path / "gone-1.slots").touch()
    maker = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(maker, fcntl.LOCK_EX)
    assert remove_dead_files(tmp_path) == 0
    os.close(maker)
    assert remove_dead_files(tmp_path) == 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "drop", "touch", "heat", "cool"]), st.integers(0, 9)), max_size=80
)


@given(steps=STEPS, capacity=st.integers(0, 5))
def test_slots_have_one_owner_each_and_never_the_same_generation_twice(
    steps: list[tuple[str, int]], capacity: int
) -> None:
    heat = Heat()
    index = SlotIndex(capacity, heat)
    seen: set[tuple[int, int]] = set()
    for what, number in steps:
        digest = bytes([number])
        before = index.find(digest)
        if what == "put":
            place = index.put(digest)
            assert (place is None) == (capacity == 0)
            if place is not None and before is None:
                assert (place.slot, place.generation) not in seen
                seen.add((place.slot, place.generation))
        elif what == "heat":
            heat.warm((digest,))
        elif what == "cool" and heat.is_hot(digest):
            heat.cool((digest,), coldest=True)
        else:
            (index.drop if what == "drop" else index.touch)(digest)
        places = [place.slot for place in map(index.find, map(bytes, [[n] for n in range(10)])) if place]
        assert len(set(places)) == len(places) == len(index) <= capacity
        assert index.free == capacity - len(index)


def test_hot_content_leaves_last() -> None:
    heat = Heat()
    index = SlotIndex(2, heat)
    heat.warm((b"hot",))
    index.put(b"hot")
    for number in range(5):
        index.put(bytes([number]))
    assert b"hot" in index
    heat.cool((b"hot",), coldest=True)
    index.put(b"more")
    assert b"hot" not in index


def test_thread_reads_before_it_writes_and_gives_the_room_back(tmp_path: Path) -> None:
    file = SlotFile(tmp_path, "r1", slots=4, block_bytes=BLOCK)
    file.write(0, 1, DIGEST, content(9))
    reads = threading.Semaphore(0)
    io = IoThread(file, write_places=2)
    io.on_read = partial(reads.release, 1)
    io.submit(ReadJob(DIGEST, Place(0, 1), 5))
    assert reads.acquire(timeout=10)
    (read,) = io.collect()
    assert (read.content, read.damage, read.error) == (content(9), "", "")
    for slot in (1, 2):
        io.submit(WriteJob(DIGEST, Place(slot, 1), content(slot)))
    done: list[Done] = []

    def both_done() -> bool:
        done.extend(io.collect())
        return len(done) == 2

    wait_until(both_done)
    assert [job.error for job in done] == ["", ""]
    assert io.write_room == 2
    io.submit(ReadJob(DIGEST, Place(2, 1), 6))
    assert reads.acquire(timeout=10)
    assert io.collect()[0].content == content(2)
    io.close()
    io.join()
    assert list(tmp_path.glob("*.slots")) == []
