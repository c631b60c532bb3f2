"""Weights that oneDNN packed, written as bytes, are the same weights again, or nothing at all."""

from __future__ import annotations

import pytest
import torch

from workers.engines.torch_engine import packing
from workers.engines.torch_engine.linear import Linear
from workers.engines.torch_engine.packing import PackedWeight, PackingError

ROWS = [1, 2, 5, 16, 100]
SHAPES = [(48, 32), (7, 5), (100, 64), (640, 96)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_memory(content: bytes | memoryview, *, spare_bytes: int = 0) -> torch.Tensor:
    """The bytes at an address that oneDNN takes, as the mapping of a file has them."""
    memory = torch.zeros(len(content) + spare_bytes + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][: len(content) + spare_bytes]
    memory[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return memory


def test_this_torch_takes_packed_weights_from_bytes() -> None:
    assert packing.packs_to_bytes(torch.float32) == ""


def test_type_that_onednn_does_not_multiply_is_named() -> None:
    assert "float64" in packing.packs_to_bytes(torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_weight_from_bytes_multiplies_bit_for_bit_alike(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if packing.packs_to_bytes(dtype):
        pytest.skip("not on this processor")
    weight, bias = drawn(shape, dtype), drawn((shape[0],), dtype, seed=2)
    packed = packing.pack(weight)
    memory = as_memory(packed.content, spare_bytes=100)
    again = packing.unpack_from(memory, shape, dtype, packed.layout)
    for rows in ROWS:
        inputs = drawn((rows, shape[1]), dtype, seed=rows)
        assert torch.equal(Linear(packed, bias)(inputs), Linear(again, bias)(inputs))


def test_product_is_that_of_the_plain_weight() -> None:
    weight = drawn((100, 64), torch.float32)
    inputs = drawn((9, 64), torch.float32, seed=3)
    torch.testing.assert_close(Linear(packing.pack(weight))(inputs), inputs @ weight.T)


def test_bytes_lie_where_the_weight_reads_them() -> None:
    """No copy is made: a change of the bytes is a change of the weight."""
    weight = drawn((48, 32), torch.float32)
    packed = packing.pack(weight)
    memory = as_memory(packed.content)
    again = packing.unpack_from(memory, (48, 32), torch.float32, packed.layout)
    memory.zero_()
    assert not Linear(again)(torch.ones(1, 32)).any()


def test_weight_outlives_the_names_of_its_bytes() -> None:
    def make() -> PackedWeight:
        packed = packing.pack(drawn((640, 96), torch.float32))
        return packing.unpack_from(as_memory(packed.content), (640, 96), torch.float32, packed.layout)

    linear = Linear(make())
    expected = Linear(packing.pack(drawn((640, 96), torch.float32)))
    noise = [torch.full((640, 96), float("nan")) for _ in range(8)]
    inputs = drawn((4, 96), torch.float32)
    assert torch.equal(linear(inputs), expected(inputs))
    assert len(noise) == 8


def test_layout_is_known_before_there_is_a_weight() -> None:
    packed = packing.pack(drawn((100, 64), torch.float32))
    assert packing.describe_packed((100, 64), torch.float32) == (packed.layout, packed.nbytes)


def test_bytes_of_another_shape_or_type_are_refused() -> None:
    packed = packing.pack(drawn((48, 32), torch.float32))
    memory = as_memory(packed.content)
    with pytest.raises(PackingError, match="not that of"):
        packing.unpack_from(memory, (32, 48), torch.float32, packed.layout)
    with pytest.raises(PackingError, match="not that of"):
        packing.unpack_from(memory[:-64], (48, 32), torch.float32, packed.layout)
    with pytest.raises(PackingError, match="no packed weights of"):
        packing.unpack_from(memory, (48, 32), torch.float64, packed.layout)


def test_bytes_at_an_odd_address_are_refused() -> None:
    packed = packing.pack(drawn((48, 32), torch.float32))
    memory = as_memory(b"\0" * 4 + bytes(packed.content))[4:]
    with pytest.raises(PackingError, match="multiple of 64"):
        packing.unpack_from(memory, (48, 32), torch.float32, packed.layout)


def test_key_is_that_of_type_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    key = packing.layout_key(torch.float32)
    assert packing.layout_key(torch.float32) == key
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert packing.layout_key(torch.float32) != key
