"""The thread that computes, when it fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import wait_until
from workers.engines.kv_blocks import BlockAllocator
from workers.engines.openai_server.metrics import EngineLoad, EngineMetrics
from workers.engines.openai_server.port import GenerationTask
from workers.engines.openai_server.stream import GenerationStream
from workers.engines.torch_engine.batch import BatchBuilder, StepBatch
from workers.engines.torch_engine.engine_loop import EngineLoop
from workers.engines.torch_engine.model import Decoder
from workers.engines.torch_engine.scheduler import Chunk, Scheduler, SchedulerLimits
from workers.engines.torch_engine.tokenizer import ModelTokenizer


class BrokenDecoder(Decoder):
    """A decoder whose device gives out at the third step."""

    def __init__(self) -> None:
        self.steps = 0

    def lay_out(self, chunks: Sequence[Chunk]) -> StepBatch:
        builder = BatchBuilder(device=torch.device("cpu"), dtype=torch.float32, shared_heads=1)
        return builder.build(chunks)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the device fell off the bus")
        return torch.zeros(len(batch.sampled_rows), 100)


@pytest.mark.asyncio
async def test_dying_loop_fails_every_open_and_later_request(
    demo_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = BlockAllocator(32)
    metrics = EngineMetrics(EngineLoad)
    scheduler = Scheduler(allocator, SchedulerLimits(2, 16))
    tokenizer = ModelTokenizer(demo_model)
    loop = EngineLoop(BrokenDecoder(), tokenizer, allocator, scheduler, metrics, eos_token_ids=frozenset())

    def submit(name: str) -> GenerationStream:
        stream = GenerationStream(loop=asyncio.get_running_loop(), metrics=metrics, prompt_tokens=3)
        loop.submit(GenerationTask(name, (40, 41, 42), max_tokens=50), stream)
        return stream

    streams = [submit(f"r{number}") for number in range(4)]  # two of them have to wait
    thread = threading.Thread(target=loop.run)
    thread.start()
    for stream in streams:
        assert await last_finish(stream) == "error"
    wait_until(lambda: not thread.is_alive())
    assert loop.failed
    assert await last_finish(submit("late")) == "error"
    assert "the device fell off the bus" in caplog.text
    assert b'exaserve_engine_requests_total{outcome="error"} 5.0' in metrics.page()


async def last_finish(stream: GenerationStream) -> str:
    while True:
        delta = await asyncio.wait_for(stream.next_delta(), timeout=10)
        if delta.finish is not None:
            return delta.finish
