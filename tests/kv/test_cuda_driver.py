"""The code for CUDA's driver over a FAKE driver library: what is refused and how it is told, and no leaks.

No device is needed, and none is proven: `tests/cuda` does that where there is one.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading

import pytest

from tests.fakes.cuda_library import GARBAGE, PAGE_BYTES, FakeCudaLibrary
from workers.kv import cuda_driver
from workers.kv.cuda_driver import (
    AccessDescription,
    AllocationProperties,
    CudaDriver,
    CudaError,
    CudaUnavailableError,
)
from workers.kv.cuda_memory import CudaMemory


def memory_over(library: FakeCudaLibrary) -> CudaMemory:
    return CudaMemory(CudaDriver(library))


def test_structures_have_the_sizes_of_cuda_h() -> None:
    assert ctypes.sizeof(AllocationProperties) == 32
    assert AllocationProperties.windows.offset == 16
    assert ctypes.sizeof(AccessDescription) == 12


def test_piece_goes_from_one_process_to_another_and_nothing_is_left() -> None:
    """Two libraries stand for two processes: they share descriptors and nothing else."""
    owner_library, user_library = FakeCudaLibrary(), FakeCudaLibrary()
    owner, user = memory_over(owner_library), memory_over(user_library)
    piece = owner.allocate(2 * PAGE_BYTES)
    address = owner.reserve(piece.size_bytes)
    owner.map(address, piece, writable=True)
    assert ctypes.string_at(address, 4) == bytes([GARBAGE]) * 4, "the fake shows who forgets to wipe"
    owner.wipe(address, piece.size_bytes)
    ctypes.memset(address, 0x42, 3)

    theirs = user.adopt(owner.export(piece), piece.size_bytes)
    at = user.reserve(8 * PAGE_BYTES)
    user.map(at + 4 * PAGE_BYTES, theirs, writable=True)
    assert ctypes.string_at(at + 4 * PAGE_BYTES, 5) == b"\x42\x42\x42\0\0"
    owner.unmap(address, piece.size_bytes)
    owner.release(piece)
    assert ctypes.string_at(at + 4 * PAGE_BYTES, 3) == b"\x42\x42\x42", "who has mapped it keeps it"
    user.settle()
    user.unmap(at + 4 * PAGE_BYTES, theirs.size_bytes)
    user.release(theirs)
    user.unreserve(at, 8 * PAGE_BYTES)
    owner.unreserve(address, piece.size_bytes)
    assert (owner_library.leaks(), user_library.leaks()) == ({}, {})


def test_memory_that_is_used_up_is_an_error_like_any_other_machines() -> None:
    memory = memory_over(FakeCudaLibrary(limit_bytes=PAGE_BYTES))
    with pytest.raises(OSError, match="CUDA_ERROR_OUT_OF_MEMORY") as error:
        memory.allocate(2 * PAGE_BYTES)
    assert error.value.errno == errno.ENOMEM
    assert isinstance(error.value, CudaError)
    assert error.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert "cuMemCreate" in str(error.value)
    assert "give replicas less" in str(error.value)


def test_error_without_a_name_has_its_number() -> None:
    assert "CUDA error 12345" in str(CudaError("cuMemMap", 12345, "CUDA error 12345"))
    driver = CudaDriver(FakeCudaLibrary())
    with pytest.raises(CudaError, match="cuMemRelease: CUDA_ERROR_INVALID_HANDLE"):
        driver.release(77)


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (FakeCudaLibrary(version=11010), "supports CUDA 11.1, and sharing memory needs 11.2"),
        (
            FakeCudaLibrary(attributes={102: 0, 103: 1}),
            "does not support managing addresses and memory apart",
        ),
        (FakeCudaLibrary(attributes={102: 1}), "does not support handing memory to other processes"),
    ],
)
def test_device_that_cannot_share_is_refused_in_plain_words(library: FakeCudaLibrary, reason: str) -> None:
    with pytest.raises(CudaUnavailableError, match=reason):
        memory_over(library)
    assert library.contexts == 0, "a device that is of no use is not opened"


def test_machine_without_a_device_says_where_to_look() -> None:
    with pytest.raises(CudaError, match=r"cuInit: CUDA_ERROR_NO_DEVICE .*nvidia-smi"):
        CudaDriver(FakeCudaLibrary(devices=0))
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE"):
        CudaMemory(CudaDriver(FakeCudaLibrary()), ordinal=1)


def test_driver_that_lacks_a_function_is_too_old() -> None:
    library = FakeCudaLibrary()
    del library.cuMemSetAccess
    with pytest.raises(CudaUnavailableError, match=r"no cuMemSetAccess: version 11\.2 or newer"):
        CudaDriver(library)


def test_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(CudaUnavailableError, match="there is no NVIDIA driver here: libcuda-that-is-not"):
        CudaDriver()


def test_every_thread_may_use_it() -> None:
    """A thread starts without a context, and the fake, as the driver, does nothing without one."""
    memory = memory_over(FakeCudaLibrary())
    failures: list[BaseException] = []

    def use() -> None:
        try:
            piece = memory.allocate(PAGE_BYTES)
            address = memory.reserve(PAGE_BYTES)
            memory.map(address, piece, writable=True)
            memory.wipe(address, PAGE_BYTES)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert failures == []


def test_reader_cannot_write_where_the_driver_enforces_it() -> None:
    library = FakeCudaLibrary()
    memory = memory_over(library)
    piece, address = memory.allocate(PAGE_BYTES), memory.reserve(PAGE_BYTES)
    memory.map(address, piece, writable=False)
    assert library.mappings[address] == (PAGE_BYTES, False)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*replace the process"):
        memory.wipe(address, PAGE_BYTES)


def test_reader_reads_all_the_same_where_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeCudaLibrary(knows_read_only=False)
    memory = memory_over(library)
    for _ in range(2):
        piece, address = memory.allocate(PAGE_BYTES), memory.reserve(PAGE_BYTES)
        memory.map(address, piece, writable=False)
        assert library.mappings[address] == (PAGE_BYTES, True)
    assert caplog.text.count("weights are not protected") == 1


def test_failed_mapping_leaves_nothing_mapped() -> None:
    library = FakeCudaLibrary()
    memory = memory_over(library)
    piece, address = memory.allocate(PAGE_BYTES), memory.reserve(2 * PAGE_BYTES)
    memory.map(address, piece, writable=True)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        memory.map(address, piece, writable=True)
    assert len(library.mappings) == 1
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        memory.map(address + 2 * PAGE_BYTES, piece, writable=True)
    assert len(library.mappings) == 1
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        memory.allocate(PAGE_BYTES + mmap.PAGESIZE)
