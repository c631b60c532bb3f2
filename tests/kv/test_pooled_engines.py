"""Real torch engines on one pool: the same answers as alone, whatever happens to a neighbour."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import torch

from tests.engines.conftest import EngineProcess, engine_starter, wait_until
from tests.fakes.kv_tenant import Tenant
from workers.engines.demo_model import make_demo_model
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.kv_pool import layout_of
from workers.kv.layout import KvLayout
from workers.kv.pool import NodePools, PoolStatus

BLOCKS = 64
PROMPT = "All that is gold does not glitter, not all those who wander are lost; "
StartPooled = Callable[[], EngineProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    make_demo_model(folder)
    return folder


@pytest.fixture
def layout(model: Path) -> KvLayout:
    return layout_of(read_model_config(model), torch.float32)


@pytest.fixture
def start(model: Path, folder: Path, tmp_path: Path) -> Iterator[StartPooled]:
    with ExitStack() as stack:
        begin = stack.enter_context(engine_starter(tmp_path, kv_pool_dir=folder))
        yield lambda: begin("torch", model, num_blocks=BLOCKS)


def complete(engine: EngineProcess, prompt: str, tokens: int = 24) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with engine.client() as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


def status_of(folder: Path) -> PoolStatus:
    (status,) = NodePools(folder).status()
    return status


def test_neighbours_death_and_scribbling_change_no_answer(
    start: StartPooled, folder: Path, layout: KvLayout
) -> None:
    doomed, neighbour = start(), start()
    doomed.wait_ready()
    neighbour.wait_ready()
    expected = complete(neighbour, PROMPT)
    assert complete(doomed, PROMPT) == expected

    wild = Tenant(folder, "wild", brought=layout.extent_blocks, layout=layout)
    for extent in range(4):
        if wild.ask("fill", extents=[extent], value=0xFF) is None:
            break
    assert wild.process.wait(10) == -signal.SIGSEGV
    wild.close()
    assert complete(neighbour, PROMPT) == expected

    writers = [threading.Thread(target=_try, args=(doomed, f"{n} {PROMPT * 4}")) for n in range(3)]
    for writer in writers:
        writer.start()
    wait_until(lambda: doomed.sample().requests_running)
    doomed.process.kill()
    for writer in writers:
        writer.join(20)
    NodePools(folder).sweep({"r0", "r1"})
    rows = {row.replica_id: row for row in status_of(folder).members}
    assert rows["r0"].leased_blocks == 0
    assert status_of(folder).reclaimed_extents > 0
    # More than the neighbour brought: it runs on in what the dead one held.
    long = [complete(neighbour, f"{n} {PROMPT * 6}", 8) for n in range(6)]
    after = {row.replica_id: row for row in status_of(folder).members}
    assert rows["r1"].leased_blocks < after["r1"].leased_blocks
    assert [complete(neighbour, f"{n} {PROMPT * 6}", 8) for n in range(6)] == long
    assert complete(neighbour, PROMPT) == expected


def _try(engine: EngineProcess, prompt: str) -> None:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
    # The engine is killed under it, which is the point.
    with engine.client() as client, suppress(httpx.TransportError):
        client.post("/v1/completions", json=body)
