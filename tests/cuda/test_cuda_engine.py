"""The engine on a device: attention and 8-bit floats as they should be, replicas on one pool and one copy."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cuda.conftest import DRY_RUN, START_SECONDS, Device, HolderProcess
from tests.engines.conftest import MODEL_NAME, EngineProcess, free_port, wait_until
from workers.engines.base import LaunchContext
from workers.engines.registry import ENGINES
from workers.engines.torch_engine.attention_choice import AttentionError, choose_attention
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.kv_pool import allocate_pool
from workers.engines.torch_engine.kv_types import FP8, choose_kv_dtype, dequantize, quantize, read_traits
from workers.kv.pool import NodePools
from workers.protocol import names

PROMPT = "All that is gold does not glitter, not all those who wander are lost; "


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv", ["model", "fp8_e4m3"])
@pytest.mark.parametrize("wanted", ["varlen", "flex", "auto"])
def test_attention_proves_right_or_says_why_not(
    device: Device, demo_model: Path, wanted: str, kv: str, compute_dtype: torch.dtype
) -> None:
    """Each trial compares with grouped attention; what is refused is named with its reason."""
    try:
        kv_dtype = choose_kv_dtype(kv, compute_dtype, read_traits(device.device))
    except ValueError as error:
        pytest.skip(str(error))
    config = replace(read_model_config(demo_model), layer_windows=(None, 5, 33, 16))
    pool = allocate_pool(config, 2, dtype=kv_dtype, device=device.device, compute_dtype=compute_dtype)
    chosen, refusal = "", ""
    try:
        chosen = choose_attention(wanted, config, pool, compute_dtype=compute_dtype).name
    except AttentionError as error:
        refusal = str(error)
    if refusal and wanted == "varlen":
        by_rule = DRY_RUN or compute_dtype == torch.float32 or "8.0 or newer" in refusal
        assert by_rule, refusal
        pytest.skip(refusal)
    assert not refusal
    if device.is_real and wanted == "auto":
        assert chosen != "grouped", "nothing better proved right; the log says why"


def test_8_bit_floats_are_the_same_as_on_the_cpu(device: Device) -> None:
    try:
        choose_kv_dtype("fp8_e4m3", torch.float32, read_traits(device.device))
    except ValueError as error:
        pytest.skip(str(error))
    vectors = torch.randn(2000, 2, 128, generator=torch.Generator().manual_seed(3))
    codes, scales = quantize(vectors.to(device.device))
    expected_codes, expected_scales = quantize(vectors)
    assert torch.equal(scales.cpu(), expected_scales)
    differing = (codes.cpu().view(torch.uint8) != expected_codes.view(torch.uint8)).float().mean()
    assert differing < 1e-3, "divisions may round otherwise, and seldom so that a code changes"
    assert codes.dtype == FP8
    back = dequantize(codes, scales, torch.float32).cpu()
    assert torch.allclose(back, dequantize(codes.cpu(), scales.cpu(), torch.float32), rtol=1e-6)


StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start(
    device: Device, folder: Path, holder: HolderProcess, demo_model: Path, tmp_path: Path
) -> Iterator[StartEngine]:
    """Start engines on the device as the agent does: with the holder and the folder of the pools."""
    started: list[EngineProcess] = []

    def start(replica_id: str, **options: object) -> EngineProcess:
        runtime = tmp_path / replica_id
        runtime.mkdir()
        context = LaunchContext(
            replica_id=replica_id,
            attempt=1,
            served_model_name=MODEL_NAME,
            model_dir=demo_model,
            host="127.0.0.1",
            ports=(free_port(),),
            api_key=secrets.token_hex(8),
            runtime_dir=runtime,
            accelerator_kind="cuda",
            accelerator_uuids=("0",),
            holder=holder.socket,
            kv_pool_dir=folder,
        )
        whole = {"num_blocks": 256, "device": device.device.type, "dtype": "float32", **options}
        launch = ENGINES["torch"].build_launch(whole, context)  # type: ignore[arg-type]  # options are the test's
        log_path = tmp_path / f"{replica_id}.log"
        label = {names.ENV_REPLICA: replica_id, names.ENV_ATTEMPT: "1"}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                launch.argv, env={**launch.env, **label}, stdout=log, stderr=log, cwd=runtime
            )
        address = f"127.0.0.1:{context.ports[0]}"
        started.append(EngineProcess(ENGINES["torch"], process, address, context.api_key, log_path))
        return started[-1]

    yield start
    for running in started:
        with contextlib.suppress(ProcessLookupError):
            running.end()


def wait_ready(engine: EngineProcess) -> None:
    def is_ready() -> bool:
        assert engine.process.poll() is None, engine.log()
        answer = engine.health()
        return answer is not None and answer.status_code == 200

    wait_until(is_ready, seconds=START_SECONDS)


def complete(engine: EngineProcess, prompt: str = PROMPT) -> str:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with engine.client() as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


def test_replicas_share_the_device_and_survive_one_another(
    start: StartEngine, folder: Path, holder: HolderProcess
) -> None:
    doomed, neighbour = start("doomed"), start("neighbour")
    wait_ready(doomed)
    wait_ready(neighbour)
    (status,) = NodePools(folder).status()
    assert {row.replica_id for row in status.members} == {"doomed", "neighbour"}
    (weights,) = holder.status().weights
    assert weights.users == 2
    expected = complete(neighbour)
    assert complete(doomed) == expected
    doomed.process.kill()
    doomed.process.wait(30)
    NodePools(folder).sweep({"doomed", "neighbour"})
    assert complete(neighbour) == expected
    rebuilt = start("rebuilt")
    wait_ready(rebuilt)
    assert complete(rebuilt) == expected
    assert complete(neighbour, PROMPT * 8) == complete(rebuilt, PROMPT * 8)


@pytest.mark.parametrize(
    "options", [{"kv_dtype": "fp8_e4m3"}, {"attention": "grouped"}, {"kv_pool": "private"}]
)
def test_options_that_change_the_memory_serve(
    device: Device, start: StartEngine, options: dict[str, str]
) -> None:
    if options.get("kv_dtype"):
        try:
            choose_kv_dtype("fp8_e4m3", torch.float32, read_traits(device.device))
        except ValueError as error:
            pytest.skip(str(error))
    engine = start("r0", **options)
    wait_ready(engine)
    assert complete(engine) == complete(engine)
    with engine.client() as client:
        page = client.get(engine.adapter.metrics_path).text
    assert f'pool="{"private" if "kv_pool" in options else "node"}"' in page
