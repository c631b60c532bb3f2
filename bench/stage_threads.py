"""Stages of the built-in engine as threads of one process, with gloo between them as between processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore

from workers.engines.torch_engine.config import ModelConfig, read_model_config, stage_config
from workers.engines.torch_engine.kv_pool import KvPool, allocate_pool
from workers.engines.torch_engine.model import Decoder, StepModel
from workers.engines.torch_engine.stage_group import StageGroup, StageGroupError
from workers.engines.torch_engine.staged_model import FirstStage, LaterStage, Split
from workers.engines.torch_engine.weights import load_weights

CPU = torch.device("cpu")
_STEP_SECONDS = 60.0
_SPLIT = Split(most_parts=4, least_rows=5)
"""So that small steps go in parts, too."""


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """One stage's layers, and the blocks of their keys and values."""

    config: ModelConfig
    decoder: Decoder
    pool: KvPool


def load_parts(model_dir: Path, *, stages: int, blocks: int) -> list[LoadedPart]:
    """Load a model in float32 on the CPU, split over stages."""
    whole = read_model_config(model_dir)
    parts = []
    for number in range(stages):
        config = stage_config(whole, number, stages)
        weights = load_weights(
            model_dir,
            config,
            device=CPU,
            dtype=torch.float32,
            on_progress=lambda _: None,
            pack_matrices=True,
        )
        pool = allocate_pool(config, blocks, dtype=torch.float32, device=CPU)
        parts.append(LoadedPart(config, Decoder(config, weights, pool), pool))
    return parts


def join_parts(parts: Sequence[LoadedPart]) -> StepModel:
    """Return what computes with all parts; those behind the first work in threads as long as it is kept."""
    if len(parts) == 1:
        return parts[0].decoder
    store, count = HashStore(), len(parts)

    def connect(number: int) -> StageGroup:
        return StageGroup(store, number, count, host="127.0.0.1", key=b"threads of one process")

    with ThreadPoolExecutor(count) as pool:
        first, *others = pool.map(connect, range(count))
    for part, group in zip(parts[1:], others, strict=True):
        stage = LaterStage(
            part.decoder,
            group,
            hidden_size=part.config.hidden_size,
            blocks=part.pool.total_blocks,
            step_seconds=_STEP_SECONDS,
        )
        threading.Thread(target=_serve, args=(stage,), daemon=True).start()
    return FirstStage(parts[0].decoder, first, step_seconds=_STEP_SECONDS, split=_SPLIT)


def _serve(stage: LaterStage) -> None:
    """Until the first stage is dropped, which closes its connections."""
    with suppress(StageGroupError):
        while True:
            stage.serve_step()
