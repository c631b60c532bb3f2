"""The scrub reads what the disk has, and leaves the page cache to engines."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from tests.fakes.node import wait_for
from tests.fakes.weights import PIECE, weights_of
from workers.weights.checks import bad_pieces
from workers.weights.disk_io import DiskFile, yield_disk

CONTENT = os.urandom(20 * PIECE + 777)
FEW_PAGES = 8
"""Of 321: what a processor has just put into the cache may escape an order to drop it."""
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that is on the disk, and in the page cache, too."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(CONTENT)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        if _bytes_from_disk(lambda: _drop_and_read(opened.fileno())) < PIECE:
            pytest.skip("this file system does not tell what comes from its disk")
        os.pread(opened.fileno(), len(CONTENT), 0)
    return path


def _drop_and_read(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.pread(fd, len(CONTENT), 0)


def _bytes_from_disk(work) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001 - any callable
    def read_bytes() -> int:
        lines = Path("/proc/thread-self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])

    before = read_bytes()
    work()
    return read_bytes() - before


def _dropped(fd: int, path: Path) -> bool:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return _cached_pages(path) <= FEW_PAGES


def _cached_pages(path: Path) -> int:
    """Pages of a file that the kernel keeps in memory."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return sum(flag & 1 for flag in found)


@pytest.mark.parametrize("direct", [True, False])
def test_each_piece_comes_from_the_disk_although_the_cache_has_it(file: Path, *, direct: bool) -> None:
    def read_all() -> None:
        with DiskFile(file, PIECE, direct=direct) as disk:
            parts = [bytes(disk.read(offset, PIECE)) for offset in range(0, len(CONTENT), PIECE)]
        assert b"".join(parts) == CONTENT

    assert _bytes_from_disk(read_all) >= len(CONTENT)


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_read_does_not_stay_in_the_cache(file: Path, *, direct: bool) -> None:
    with file.open("rb") as opened:
        wait_for(lambda: _dropped(opened.fileno(), file), "the cache to let go of it")
    with DiskFile(file, PIECE, direct=direct) as disk:
        for offset in range(0, len(CONTENT), PIECE):
            disk.read(offset, PIECE)
    assert _cached_pages(file) <= FEW_PAGES


def test_pieces_that_changed_are_found_whatever_their_place(tmp_path: Path) -> None:
    weights = weights_of({"w": CONTENT})
    folder = weights.write_to(tmp_path)
    [listed] = weights.manifest.files
    assert bad_pieces(folder, listed, PIECE) == []
    with (folder / "w").open("r+b") as opened:
        for place in (0, 7 * PIECE + 5, len(CONTENT) - 1):
            opened.seek(place)
            byte = opened.read(1)
            opened.seek(place)
            opened.write(bytes([byte[0] ^ 1]))
    assert bad_pieces(folder, listed, PIECE) == [0, 7, 20]
    os.truncate(folder / "w", 20 * PIECE)
    assert bad_pieces(folder, listed, PIECE) == [0, 7, 20]


def test_the_disk_is_yielded_and_taken_back_by_this_thread() -> None:
    get = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)
    if get is None:
        pytest.skip("the number of the system call is not known here")

    def order() -> int:
        return int(LIBC.syscall(get, 1, 0)) >> 13

    if order() < 0:
        pytest.skip("this system forbids asking")
    yield_disk(to_everybody=True)
    assert order() == 3
    yield_disk(to_everybody=False)
    assert order() != 3
