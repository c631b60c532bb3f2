"""From settings to a loop that is ready to step: device, weights, pool, limits."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from workers.engines.openai_server.metrics import EngineMetrics
from workers.engines.torch_engine.attention_choice import choose_attention
from workers.engines.torch_engine.config import ModelConfig, stage_config
from workers.engines.torch_engine.engine_loop import EngineLoop, KvMemoryOfSessions
from workers.engines.torch_engine.holder_place import open_place
from workers.engines.torch_engine.holder_weights import hold_weights
from workers.engines.torch_engine.kv_memory import KvKind, open_kv_memory
from workers.engines.torch_engine.kv_pool import (
    KvPool,
    allocate_pool,
    block_bytes,
    choose_pool_blocks,
    layout_of,
)
from workers.engines.torch_engine.kv_types import choose_kv_dtype, read_traits, type_name
from workers.engines.torch_engine.model import Decoder, StepModel
from workers.engines.torch_engine.packing import PackingError, packs_to_bytes
from workers.engines.torch_engine.scheduler import Scheduler, SchedulerLimits
from workers.engines.torch_engine.session_moves import SessionMoves
from workers.engines.torch_engine.settings import EngineSettings
from workers.engines.torch_engine.shared_weights import CopyKind, map_weights
from workers.engines.torch_engine.stage_company import Company
from workers.engines.torch_engine.stage_facts import StageFacts, name_model
from workers.engines.torch_engine.stage_meeting import connect_group, settle_blocks
from workers.engines.torch_engine.staged_model import FirstStage, LaterStage, choose_split
from workers.engines.torch_engine.tier_memory import open_tiers
from workers.engines.torch_engine.tokenizer import ModelTokenizer
from workers.engines.torch_engine.weights import ModelWeights, load_weights
from workers.kv.layout import KvLayout
from workers.kv.tiers.heat import Heat
from workers.kv.tiers.sessions import SessionTable

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STEP_TOKENS = {"cuda": 4096, "cpu": 512}
"""Token budget of a step: on a CPU a long one would stall all that decode."""


class DeviceError(RuntimeError):
    """The wanted device is not there."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loop ready to run and the length limit that its pool allows."""

    loop: EngineLoop
    max_model_tokens: int
    moves: SessionMoves
    """Only for the thread that runs the loop."""
    kv_shape: bytes
    """Names weights, element type and block shape: KV of another shape is of no use here."""
    kv_block_bytes: int
    kv_described: str
    """The same as `kv_shape`, for people."""
    kv_arena: bytes
    """Names the memory that replicas of this node draw on; empty: it is this one's alone."""
    close: Callable[[], None]
    """Gives back what lower tiers of KV blocks take on disk, once the loop has ended."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a process computes with, before it has KV memory."""

    config: ModelConfig
    """Of its layers."""
    model: str
    """Names the whole model, for stages that have different parts of it."""
    weights: ModelWeights
    kind: KvKind
    blocks: int
    """KV blocks that there is room for."""

    @property
    def block_bytes(self) -> int:
        """One block of these layers."""
        return block_bytes(self.config, self.kind.dtype)


def load_engine(
    settings: EngineSettings,
    config: ModelConfig,
    tokenizer: ModelTokenizer,
    metrics: EngineMetrics,
    on_progress: Callable[[float], None],
    *,
    company: Company | None = None,
) -> LoadedEngine:
    """Load everything; with `company`, the first stage, once all others are there.

    Raises `DeviceError`, `WeightsError` or `ValueError`, among them `KvTypeError`; `StageLostError`.
    """
    part = load_weights_and_room(settings, config, on_progress)
    config, blocks, whole_block_bytes = part.config, part.blocks, part.block_bytes
    if company is not None and settings.stage is not None:
        agreement = settle_blocks(company, settings.stage, facts_of(part))
        blocks, whole_block_bytes = agreement.blocks, agreement.block_bytes
    heat = Heat(settings.kv_eviction)
    memory = open_kv_memory(settings, config, blocks, part.kind, heat)
    tiers = open_tiers(settings, memory.pool, memory.allocator, heat)
    decoder = build_decoder(settings, part, memory.pool)
    metrics.describe_kv(
        dtype=type_name(part.kind.dtype),
        block_bytes=whole_block_bytes,
        attention=decoder.attention_name,
        pool="private" if memory.room.tend_seconds is None else "node",
    )
    store = tiers.store if tiers else None
    scheduler = Scheduler(
        memory.allocator,
        _step_limits(settings, part.kind.device),
        salt=settings.model_name.encode(),
        room=memory.room,
        tiers=store,
    )
    sessions = SessionTable(heat, hot_blocks=blocks + (tiers.blocks if tiers else 0))
    loop = EngineLoop(
        _lead(decoder, settings, company),
        tokenizer,
        memory.allocator,
        scheduler,
        metrics,
        eos_token_ids=config.eos_token_ids,
        memory=KvMemoryOfSessions(sessions, store),
    )
    if tiers is not None:
        tiers.wake(loop.nudge)
    _give_back_memory()
    layout = layout_of(config, part.kind.dtype)
    return LoadedEngine(
        loop,
        memory.max_model_tokens,
        SessionMoves(
            memory.allocator,
            scheduler,
            memory.pool,
            sessions,
            store=store,
            neighbours=memory.neighbours,
        ),
        kv_shape=kv_shape(settings, layout),
        kv_block_bytes=part.block_bytes,
        kv_described=_describe(settings, layout),
        kv_arena=b"" if memory.neighbours is None else memory.neighbours.arena_id,
        close=_nothing if tiers is None else tiers.close,
    )


def load_stage(settings: EngineSettings, config: ModelConfig, company: Company) -> LaterStage:
    """Load one of the stages behind the first, and meet the others. Raises as `load_engine`."""
    stage = settings.stage
    if stage is None:
        raise ValueError("the settings name no stage")
    part = load_weights_and_room(settings, config, _not_told)
    agreement = settle_blocks(company, stage, facts_of(part))
    pool = allocate_pool(
        part.config,
        agreement.blocks,
        dtype=part.kind.dtype,
        device=part.kind.device,
        compute_dtype=part.kind.compute_dtype,
    )
    decoder = build_decoder(settings, part, pool)
    _give_back_memory()
    log.info("%d KV blocks of %d bytes each for the layers here", agreement.blocks, part.block_bytes)
    return LaterStage(
        decoder,
        connect_group(company, stage),
        hidden_size=config.hidden_size,
        blocks=agreement.blocks,
        step_seconds=stage.step_seconds,
    )


def load_weights_and_room(
    settings: EngineSettings, config: ModelConfig, on_progress: Callable[[float], None]
) -> LoadedWeights:
    """Load the weights of a model, or of this process's stage of it, and count what KV has room for.

    Raises `DeviceError`, `WeightsError` or `ValueError`, among them `KvTypeError` and `ModelConfigError`.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    model = name_model(config, settings.model_digest)
    if settings.stage is not None:
        config = stage_config(config, settings.stage.number, settings.stage.count)
        first = config.stage.first_layer
        log.info("layers %d to %d of this model", first, first + config.layers - 1)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, config, device)
    log.info("device %s, %s, %d threads", device, dtype, torch.get_num_threads())
    weights, shared = _load_weights(settings, config, device, dtype, on_progress)
    weights_bytes = weights.total_bytes
    if (
        shared
        and config.tied_embeddings
        and weights.head is not None
        and weights.embedding is not weights.head
    ):
        # The packed head lies on the node once, and each replica's budget has a whole model in it.
        weights_bytes -= weights.head.nbytes
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype, read_traits(device))
    blocks = choose_pool_blocks(config, kv_dtype, device, settings, weights_bytes=weights_bytes)
    return LoadedWeights(config, model, weights, KvKind(kv_dtype, dtype, device), blocks)


def build_decoder(settings: EngineSettings, part: LoadedWeights, pool: KvPool) -> Decoder:
    """Bind weights and pool, with the attention that proves right here. Raises `AttentionError`."""
    dtype = part.kind.compute_dtype
    attention = choose_attention(settings.attention, part.config, pool, compute_dtype=dtype)
    return Decoder(part.config, part.weights, pool, attention)


def facts_of(part: LoadedWeights) -> StageFacts:
    """What other stages have to know of this one."""
    return StageFacts(
        number=part.config.stage.number,
        model=part.model,
        compute_dtype=type_name(part.kind.compute_dtype),
        kv_dtype=type_name(part.kind.dtype),
        device_kind=part.kind.device.type,
        blocks=part.blocks,
        block_bytes=part.block_bytes,
    )


def _lead(decoder: Decoder, settings: EngineSettings, company: Company | None) -> StepModel:
    """Return what computes all layers: the decoder, or with it the stages behind it."""
    if company is None or settings.stage is None:
        return decoder
    group = connect_group(company, settings.stage)
    return FirstStage(
        decoder,
        group,
        step_seconds=settings.stage.step_seconds,
        split=choose_split(settings.stage.count, decoder.device.type),
    )


def _step_limits(settings: EngineSettings, device: torch.device) -> SchedulerLimits:
    budget = settings.max_num_batched_tokens or _STEP_TOKENS.get(device.type, 512)
    return SchedulerLimits(settings.max_num_seqs, max(budget, settings.max_num_seqs))


def kv_shape(settings: EngineSettings, layout: KvLayout) -> bytes:
    """Name weights, element type and block shape in 16 bytes.

    Without the device: KV that was computed on another kind of it is as good.
    """
    parts = (settings.model_name, settings.model_digest, replace(layout, kind="").digest)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _describe(settings: EngineSettings, layout: KvLayout) -> str:
    digest = settings.model_digest.removeprefix("sha256:")[:12]
    model = f"{settings.model_name} ({digest})" if digest else settings.model_name
    heads = f"{layout.kv_heads} KV heads of {layout.head_size}"
    return f"{model} as {layout.dtype}, {layout.layers} layers, {heads}, {layout.block_tokens} tokens a block"


def _nothing() -> None:
    """There are no tiers to close."""


def _not_told(_done_ratio: float) -> None:
    """Nobody asks a stage behind the first how far it is."""


def _give_back_memory() -> None:
    """Return to the machine what loading took and freed again; glibc would keep it for this process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _load_weights(
    settings: EngineSettings,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[float], None],
) -> tuple[ModelWeights, bool]:
    """Map the node's copy where that saves memory and there is one; else load a copy of our own.

    Returns the weights and whether they are the node's copy.
    """
    if settings.weights_holder is not None:
        try:
            held = hold_weights(
                open_place(settings.weights_holder, device),
                settings.model_dir,
                config,
                dtype=dtype,
                model_digest=settings.model_digest,
                on_progress=on_progress,
            )
        except OSError as error:
            log.warning("weights are not with the holder: %s", error)
        else:
            return held, True
    if settings.weights_cache is not None and device.type == "cpu":
        obstacle = packs_to_bytes(dtype)
        if obstacle:
            log.warning("shared weights are not packed: %s", obstacle)
        try:
            weights = map_weights(
                settings.weights_cache,
                settings.model_dir,
                config,
                CopyKind(dtype, packed=not obstacle),
                model_digest=settings.model_digest,
                on_progress=on_progress,
            )
        except (OSError, PackingError) as error:
            # A replica with weights of its own is dearer, but it serves.
            log.warning("weights are not shared: %s", error)
        else:
            return weights, True
    own = load_weights(
        settings.model_dir,
        config,
        device=device,
        dtype=dtype,
        on_progress=on_progress,
        pack_matrices=True,
    )
    return own, False


def choose_device(wanted: str) -> torch.device:
    """Return the device to use; `auto` takes CUDA where there is one. Raises `DeviceError`."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError("device cuda was asked for and this process sees none")
    return torch.device(wanted)


def choose_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return what to compute in; `auto` is the weights' own type, and float32 on a CPU."""
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else config.dtype
    return _DTYPES[wanted]
