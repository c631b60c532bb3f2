"""Keys and values as 8-bit floats: how exact, how small, the same under any schedule, and where refused."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engines.conftest import engine_starter
from tests.engines.reference import CPU, Bench, Prompt
from workers.engines.torch_engine.config import ModelConfig, read_model_config
from workers.engines.torch_engine.kv_pool import allocate_pool, block_bytes, layout_of
from workers.engines.torch_engine.kv_types import (
    FP8,
    DeviceTraits,
    KvTypeError,
    choose_kv_dtype,
    dequantize,
    quantize,
)
from workers.engines.torch_engine.model import Decoder
from workers.engines.torch_engine.scheduler import Chunk, SchedulerLimits, Sequence
from workers.engines.torch_engine.weights import load_weights
from workers.kv.pool import NodePools, pools_folder

HOPPER = DeviceTraits("cuda", (9, 0))
ROOMY = SchedulerLimits(max_sequences=16, max_batched_tokens=512)


@pytest.fixture(scope="module")
def config(demo_model: Path) -> ModelConfig:
    return read_model_config(demo_model)


@pytest.fixture(scope="module")
def bench(demo_model: Path) -> Bench:
    return Bench(demo_model, kv_dtype=FP8)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("magnitude", [1e-20, 1e-6, 1.0, 300.0, 1e6])
def test_each_element_comes_back_within_a_sixteenth(magnitude: float) -> None:
    vectors = noise(500, 2, 64) * magnitude
    back = dequantize(*quantize(vectors), torch.float32)
    largest = vectors.abs().amax(dim=-1, keepdim=True)
    # Half a step of the smallest codes, which are 1/512 apart with 448 as the largest.
    bound = (vectors.abs() / 16).maximum(largest / 448 / 1000) * 1.02
    assert ((back - vectors).abs() <= bound).all()


def test_zeros_and_outliers_spoil_nothing() -> None:
    vectors = noise(3, 8)
    vectors[1] = 0
    vectors[2, 3] = 1e5
    back = dequantize(*quantize(vectors), torch.float32)
    assert back[1].abs().max() == 0
    assert torch.isfinite(back).all()
    assert back[2, 3] == pytest.approx(1e5, rel=0.01)
    assert torch.allclose(back[0], vectors[0], rtol=0.07, atol=1e-3), "a vector has a scale of its own"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 200.0])
def test_short_floats_come_back_as_exactly(dtype: torch.dtype, magnitude: float) -> None:
    vectors = (noise(100, 64) * magnitude).to(dtype)
    vectors[7] = 0
    back = dequantize(*quantize(vectors), dtype).float()
    largest = vectors.float().abs().amax(dim=-1, keepdim=True)
    bound = (vectors.float().abs() / 15).maximum(largest / 448 / 100)
    assert torch.isfinite(back).all()
    # float16 has no more digits than steps of 6e-8 for what is near zero.
    assert ((back - vectors.float()).abs() <= bound + 6e-8).all()


def test_all_codes_are_read_on_a_cpu_as_torch_reads_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)[None]
    is_number = torch.isfinite(codes.float())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = dequantize(codes, torch.ones(1, dtype=torch.bfloat16), dtype)
        assert torch.equal(ours[is_number], codes.to(dtype)[is_number])


def test_block_takes_about_half_of_bfloat16(config: ModelConfig) -> None:
    small, large = block_bytes(config, FP8), block_bytes(config, torch.bfloat16)
    assert small * 1.9 < large < small * 2
    pool = allocate_pool(config, 3, dtype=FP8, device=CPU)
    assert pool.blocks.shape == (3, small)


def test_pools_of_different_types_never_mix(config: ModelConfig) -> None:
    layouts = [layout_of(config, dtype) for dtype in (FP8, torch.bfloat16, torch.float16, torch.float32)]
    assert len({layout.pool_id for layout in layouts}) == 4
    for layout, dtype in zip(layouts, (FP8, torch.bfloat16, torch.float16, torch.float32), strict=True):
        assert layout.block_bytes == block_bytes(config, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_what_is_written_is_what_is_gathered_and_what_moves_with_its_block(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    compute = torch.float32 if dtype == FP8 else dtype
    pool = allocate_pool(config, 5, dtype=dtype, device=CPU, compute_dtype=compute)
    slots = (torch.tensor([3, 3, 1]), torch.tensor([0, 15, 7]))
    rows = (3, config.kv_heads, config.head_size)
    layer = config.layers - 1
    stored = pool.write(layer, slots, noise(*rows).to(compute), noise(*rows, seed=2).to(compute))
    pool.copy_block(3, 0)
    pool.import_block(4, bytes(pool.export_block(3)))
    for block in (3, 0, 4):
        for part, kept in zip(pool.gather(layer, torch.tensor([block])), stored, strict=True):
            assert torch.equal(part[0, [0, 15]], kept[:2])
            assert part[0, 1:15].abs().max() == 0
    assert pool.gather(layer, torch.tensor([2]))[0].abs().max() == 0
    assert pool.gather(0, torch.tensor([3]))[0].abs().max() == 0, "another layer was written"


def logits_of(model: Path, dtype: torch.dtype, prompt: list[int]) -> Tensor:
    """Logits after each token of a prompt, each computed from keys and values in blocks."""
    config = read_model_config(model)
    weights = load_weights(model, config, device=CPU, dtype=torch.float32, on_progress=lambda _: None)
    pool = allocate_pool(config, 16, dtype=dtype, device=CPU, compute_dtype=torch.float32)
    decoder = Decoder(config, weights, pool)
    rows = []
    for end in range(1, len(prompt) + 1):
        sequence = Sequence("s", prompt[:end], blocks=list(range(16)))
        rows.append(decoder.forward(decoder.lay_out([Chunk(sequence, end - 1, 1)])))
    return torch.cat(rows)


def test_logits_stay_within_the_stated_bound(demo_model: Path, config: ModelConfig) -> None:
    """docs/memory.md states it: on average a logit moves by less than 2% of how far logits spread."""
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(config.vocabulary_size, (150,), generator=generator).tolist()
    exact, rounded = logits_of(demo_model, torch.float32, prompt), logits_of(demo_model, FP8, prompt)
    moved = (rounded - exact).abs().mean() / exact.std(dim=-1).mean()
    assert 0 < moved < 0.02
    divergence = torch.nn.functional.kl_div(
        rounded.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < 0.01


def test_prefix_hits_preemption_and_chunks_change_no_token(bench: Bench, config: ModelConfig) -> None:
    generator = torch.Generator().manual_seed(9)
    tokens = tuple(torch.randint(config.vocabulary_size, (50,), generator=generator).tolist())
    prompts = [Prompt(tokens, 30), Prompt(tokens, 30, arrives_at_step=4), Prompt(tokens[:20], 40)]
    alone = [bench.run([Prompt(p.tokens, p.max_tokens)], ROOMY).generated[0] for p in prompts]
    outcome = bench.run(prompts, SchedulerLimits(3, 24), blocks=9)
    assert outcome.preemptions > 0
    assert outcome.generated == alone


@pytest.mark.parametrize(
    ("wanted", "traits", "expected"),
    [
        ("auto", HOPPER, torch.bfloat16),
        ("model", HOPPER, torch.bfloat16),
        ("fp8_e4m3", HOPPER, FP8),
        ("fp8_e4m3", DeviceTraits("cuda", (8, 9)), FP8),
        ("fp8_e4m3", DeviceTraits("cpu"), FP8),
    ],
)
def test_type_that_is_chosen(wanted: str, traits: DeviceTraits, expected: torch.dtype) -> None:
    assert choose_kv_dtype(wanted, torch.bfloat16, traits) == expected


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (DeviceTraits("cuda", (8, 6)), "needs compute capability 8.9 or newer and this device has 8.6"),
        (DeviceTraits("cuda", (9, 4), is_rocm=True), "of another kind"),
        (DeviceTraits("mps"), "not known to work on mps"),
    ],
)
def test_device_without_such_floats_is_refused(traits: DeviceTraits, reason: str) -> None:
    with pytest.raises(KvTypeError, match=reason):
        choose_kv_dtype("fp8_e4m3", torch.bfloat16, traits)


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Path]:
    folder = pools_folder(f"test-{uuid.uuid4().hex}", tmp_path)
    yield folder
    NodePools(folder).remove_all()


def test_replica_keeps_8_bit_floats_in_the_nodes_pool_and_says_so(
    demo_model: Path, config: ModelConfig, pools: Path, tmp_path: Path
) -> None:
    with engine_starter(tmp_path, kv_pool_dir=pools) as start:
        engine = start("torch", demo_model, num_blocks=64, kv_dtype="fp8_e4m3")
        engine.wait_ready()
        body = {"model": "demo", "prompt": "all that is gold", "max_tokens": 4, "ignore_eos": True}
        with engine.client() as client:
            assert client.post("/v1/completions", json=body).status_code == 200
            page = client.get(engine.adapter.metrics_path).text
        (line,) = [line for line in page.splitlines() if line.startswith("exaserve_engine_kv_info{")]
        (status,) = NodePools(pools).status()
    assert 'dtype="float8_e4m3fn"' in line
    assert 'attention="grouped"' in line
    assert 'pool="node"' in line
    assert status.block_bytes == block_bytes(config, FP8)
