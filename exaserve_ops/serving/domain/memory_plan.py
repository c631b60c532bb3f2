"""Whether a model fits on an accelerator, how many sequences it then holds, and what would make it fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from exaserve_ops.lib.units import size_text
from exaserve_ops.serving.domain.config_fields import find_text_model
from exaserve_ops.serving.domain.context_length import ContextLength, context_length, merge_overrides
from exaserve_ops.serving.domain.engine_claims import Claim, ClaimFacts, claim_of
from exaserve_ops.serving.domain.engine_launch import TORCH, EngineLaunch
from exaserve_ops.serving.domain.kv_bytes import KvBytes, KvShare, KvTerm, kv_bytes
from exaserve_ops.serving.domain.kv_config import read_layout
from exaserve_ops.serving.domain.kv_dtypes import BFLOAT16, FLOAT32, ElementType, element_type
from exaserve_ops.serving.domain.kv_layout import KvLayout, UnknownLayout
from exaserve_ops.serving.domain.memory_overhead import Estimate, overhead
from exaserve_ops.serving.domain.reservation import margin_bytes
from exaserve_ops.serving.domain.stage_weights import stage_weights

FITS, TIGHT, NOT = "fits", "tight", "does not fit"
TIGHT_RATIO = 0.03
"""Part of the accelerator that must be left over for a plain yes: runs differ by that much."""
SHARD_RATIO = 0.02
"""What each accelerator holds of the weights beyond its share: norms, routers, padding."""
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What is known of a model."""

    name: str
    config: Mapping[str, Any]
    weights_bytes: int
    """Of its files; 0: not known, and nothing is planned with it."""
    measured_kv_bytes_per_token: int | None = None
    """By an engine's own report after a launch: stands in for a layout that is not known."""
    accepts_upper_bound: bool = False
    """Plan with the upper bound where the layout is not known."""


@dataclass(frozen=True, slots=True)
class AcceleratorMemory:
    """One accelerator."""

    total_bytes: int
    kind: str = ""
    held_bytes: int = 0
    """Held by others when the replica starts."""
    shares_memory: bool = False
    """Replicas with the same weights hold them on it once; on a CPU they do anyway."""

    @property
    def shares_weights(self) -> bool:
        """Whether replicas of the built-in engine hold one copy of the weights on it."""
        return self.shares_memory or self.kind == CPU

    @property
    def band_bytes(self) -> int:
        """What must be left over for a plain yes."""
        return int(TIGHT_RATIO * self.total_bytes)


@dataclass(frozen=True, slots=True)
class SequenceMix:
    """What is asked of a replica."""

    mean_tokens: int
    """Of a sequence, prompt and answer."""
    sequences: int = 1
    """To be held at once, of mean length."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The answer for one accelerator of one replica."""

    verdict: str
    why: str
    weights_bytes: int
    """On this accelerator."""
    sequence_at_limit_bytes: int
    sequence_at_mean_bytes: int
    overhead: tuple[Estimate, ...]
    needed_low_bytes: int
    """Least that it must have: weights, one longest sequence, and overhead at its lowest."""
    needed_bytes: int
    """The same with overhead at its highest."""
    wanted_bytes: int
    """With the sequences that were asked for, overhead at its highest."""
    wanted_kv_bytes: int
    """KV memory of these, or of one longest sequence if that is more."""
    claim: Claim
    sequences_at_mean: int
    """Held at once in the KV memory that there is at least, and no more than the engine runs."""
    sequences_at_limit: int
    most_tokens: int
    """Longest sequence that this memory holds."""
    limit_tokens: int
    mean_tokens: int
    length: ContextLength
    kv: KvBytes
    layout: KvLayout | None
    assumptions: tuple[str, ...]
    problems: tuple[str, ...]
    """Why the engine may not start, whatever the memory."""

    @property
    def overhead_low_bytes(self) -> int:
        """What is neither weights nor KV, at its lowest."""
        return sum(part.low_bytes for part in self.overhead)

    @property
    def overhead_bytes(self) -> int:
        """The same at its highest."""
        return sum(part.high_bytes for part in self.overhead)

    @property
    def private_bytes(self) -> int:
        """What a further replica takes beside weights that it shares."""
        return self.wanted_bytes - self.weights_bytes


@dataclass(frozen=True, slots=True)
class PlanUnknown:
    """There is no plan, and automatic placement must not make one."""

    reason: str
    upper_bound_bytes_per_token: int | None = None


def plan_memory(
    model: ModelFigures,
    launch: EngineLaunch,
    accelerator: AcceleratorMemory,
    mix: SequenceMix,
    *,
    budget_bytes: int | None = None,
) -> MemoryPlan | PlanUnknown:
    """Plan one replica. `budget_bytes`: what a deployment sets aside on this accelerator, if it says so."""
    if model.weights_bytes <= 0:
        return PlanUnknown("the size of the weights is unknown: not placed automatically until it is known")
    config = merge_overrides(model.config, launch.overrides)
    layout = read_layout(config)
    kv = _kv(model, layout, launch, accelerator.kind)
    if isinstance(kv, UnknownLayout):
        return PlanUnknown(kv.summary(), kv.upper_bound_bytes_per_token)
    known = layout if isinstance(layout, KvLayout) else None
    length = context_length(config, asked_tokens=launch.length_tokens, engine=launch.engine)
    if length.tokens is None:
        return PlanUnknown("neither config.json nor the launch says how long a sequence may be")
    limit = _limit(find_text_model(config).config, launch, length)
    parts = _Parts(
        weights_bytes=_weights_each(model, known, launch, accelerator.kind),
        overhead=overhead(launch, known, kind=accelerator.kind, length_tokens=limit),
        kv=kv,
        length=length,
        limit_tokens=limit,
        layout=known,
        assumptions=kv.assumptions,
    )
    return _judge(parts, launch, accelerator, mix, budget_bytes)


def loaded_dtype(launch: EngineLaunch, checkpoint: str, kind: str) -> ElementType:
    """Type that an engine computes in: as launched, else by its own rule for the checkpoint's."""
    told = element_type(launch.kv.model_dtype)
    if told is not None:
        return told
    own = element_type(checkpoint or "float32") or BFLOAT16
    if launch.engine == TORCH:
        # float32 on a CPU whatever the weights are; elsewhere as they were saved.
        return FLOAT32 if kind == CPU else own
    # vLLM and SGLang load float32 in 16 bits, and compute in 16 what is stored in fewer.
    return own if own.bytes_each == BFLOAT16.bytes_each else BFLOAT16


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a plan is judged by."""

    weights_bytes: int
    overhead: tuple[Estimate, ...]
    kv: KvBytes
    length: ContextLength
    limit_tokens: int
    layout: KvLayout | None
    assumptions: tuple[str, ...]


def _kv(
    model: ModelFigures, layout: KvLayout | UnknownLayout, launch: EngineLaunch, kind: str
) -> KvBytes | UnknownLayout:
    """As computed; for a layout that is not known as measured, or its upper bound where that is accepted."""
    if isinstance(layout, KvLayout):
        options = replace(launch.kv, model_dtype=loaded_dtype(launch, layout.dtype, kind).name)
        computed = kv_bytes(layout, options)
        if isinstance(computed, KvBytes) or model.measured_kv_bytes_per_token is None:
            return computed
    if model.measured_kv_bytes_per_token is not None:
        return given_kv(model.measured_kv_bytes_per_token, "measured: as an engine reported it")
    if model.accepts_upper_bound and isinstance(layout, UnknownLayout):
        bound = layout.upper_bound_bytes_per_token
        if bound is not None:
            return given_kv(bound, f"an upper bound, since {layout.reason}")
    return layout if isinstance(layout, UnknownLayout) else UnknownLayout("the launch is refused")


def _limit(config: Mapping[str, Any], launch: EngineLaunch, length: ContextLength) -> int:
    """Longest sequence that is served."""
    limit = length.tokens or 0
    if launch.window_limits_length:
        window = config.get("sliding_window")
        if isinstance(window, int) and window > 0:
            return min(limit, window)
    return limit


def _weights_each(model: ModelFigures, layout: KvLayout | None, launch: EngineLaunch, kind: str) -> int:
    """Bytes of weights on the accelerator that holds most: as stored, or in the type that is computed in."""
    size = model.weights_bytes
    stored = element_type(layout.dtype) if layout is not None else None
    if layout is not None and stored is not None and not layout.is_quantised:
        loaded = loaded_dtype(launch, layout.dtype, kind)
        size = ceil(size * loaded.bytes_each / stored.bytes_each)
    ways = launch.ways
    if launch.engine == TORCH and layout is not None:
        # Its own stages are known to the layer.
        config = find_text_model(merge_overrides(model.config, launch.overrides)).config
        element = loaded_dtype(launch, layout.dtype, kind)
        return max(
            stage_weights(
                size,
                layers=len(layout.layers),
                embedding_bytes=ceil(layout.vocabulary * layout.hidden * element.bytes_each),
                is_tied=bool(config.get("tie_word_embeddings")),
                stages=ways,
            )
        )
    return size if ways == 1 else ceil(size / ways * (1 + SHARD_RATIO))


def _judge(
    parts: _Parts, launch: EngineLaunch, room: AcceleratorMemory, mix: SequenceMix, budget_bytes: int | None
) -> MemoryPlan:
    block, kv = launch.block_tokens, parts.kv
    low = sum(part.low_bytes for part in parts.overhead)
    high = sum(part.high_bytes for part in parts.overhead)
    claim = claim_of(
        launch,
        ClaimFacts(
            total_bytes=room.total_bytes,
            held_bytes=room.held_bytes,
            weights_bytes=parts.weights_bytes,
            other_low_bytes=low,
            other_high_bytes=high,
            block_bytes=block * kv.growth_bytes_each,
            budget_bytes=budget_bytes,
        ),
    )
    parts = _within_pool(parts, launch, claim)
    at_limit = kv.bytes_each(parts.limit_tokens, block_tokens=block)
    mean_tokens = min(mix.mean_tokens, parts.limit_tokens)
    at_mean = kv.bytes_each(mean_tokens, block_tokens=block)
    wanted_kv = max(at_limit, mix.sequences * at_mean)
    at_once = launch.sequences
    plan = MemoryPlan(
        verdict=FITS,
        why="",
        weights_bytes=parts.weights_bytes,
        sequence_at_limit_bytes=at_limit,
        sequence_at_mean_bytes=at_mean,
        overhead=parts.overhead,
        needed_low_bytes=parts.weights_bytes + low + at_limit,
        needed_bytes=parts.weights_bytes + high + at_limit,
        wanted_bytes=parts.weights_bytes + high + wanted_kv,
        wanted_kv_bytes=wanted_kv,
        claim=claim,
        sequences_at_mean=min(at_once, claim.pool_low_bytes // at_mean if at_mean else at_once),
        sequences_at_limit=min(at_once, claim.pool_low_bytes // at_limit if at_limit else at_once),
        most_tokens=kv.tokens_within(
            claim.pool_low_bytes, at_most=parts.length.model_tokens or parts.limit_tokens, block_tokens=block
        ),
        limit_tokens=parts.limit_tokens,
        mean_tokens=mean_tokens,
        length=parts.length,
        kv=kv,
        layout=parts.layout,
        assumptions=parts.assumptions,
        problems=tuple(text for text in (claim.problem, parts.length.problem) if text),
    )
    verdict, why = _verdict(plan, launch, room, mix)
    return replace(plan, verdict=verdict, why=why)


def _within_pool(parts: _Parts, launch: EngineLaunch, claim: Claim) -> _Parts:
    """The built-in engine does not refuse to start with less KV memory: it serves shorter sequences then."""
    if launch.engine != TORCH:
        return parts
    block = launch.block_tokens
    held = parts.kv.tokens_within(claim.pool_low_bytes, at_most=parts.limit_tokens, block_tokens=block)
    if not 0 < held < parts.limit_tokens:
        return parts
    told = f"its KV memory holds {held:,} tokens: longer requests are refused"
    return replace(parts, limit_tokens=held, assumptions=(*parts.assumptions, told))


def _verdict(
    plan: MemoryPlan, launch: EngineLaunch, room: AcceleratorMemory, mix: SequenceMix
) -> tuple[str, str]:
    """Yes only if it fits with all else at its highest and a band to spare; no if not even at its lowest."""
    claim = plan.claim
    obstacle = _obstacle(plan, launch, room, mix)
    if obstacle:
        return NOT, obstacle
    low, needed = size_text(claim.pool_low_bytes), size_text(plan.wanted_kv_bytes)
    spare = claim.pool_low_bytes - plan.wanted_kv_bytes
    if spare < room.band_bytes and not _is_told(launch):
        return TIGHT, (
            f"between {low} and {size_text(claim.pool_high_bytes)} are left for KV, and {needed} are needed: "
            "it depends on version, driver and load"
        )
    return FITS, f"at least {low} are left for KV, and {needed} are needed"


def _obstacle(plan: MemoryPlan, launch: EngineLaunch, room: AcceleratorMemory, mix: SequenceMix) -> str:
    """Why it does not fit even with all else at its lowest; empty if it may."""
    claim, limit = plan.claim, plan.sequence_at_limit_bytes
    free = room.total_bytes - room.held_bytes
    if claim.problem:
        return claim.problem
    if claim.bytes > free - margin_bytes(room.total_bytes):
        return f"it takes {size_text(claim.bytes)}, and {size_text(free)} are free, a margin included"
    if claim.pool_high_bytes < limit:
        text = f"one sequence of {plan.limit_tokens:,} tokens takes {size_text(limit)} of KV memory"
        return f"{text}, and at most {size_text(claim.pool_high_bytes)} are left"
    if claim.pool_high_bytes < plan.wanted_kv_bytes:
        needed, most = size_text(plan.wanted_kv_bytes), size_text(claim.pool_high_bytes)
        text = f"{mix.sequences:,} sequences of {plan.mean_tokens:,} tokens take {needed} of KV memory"
        return f"{text}, and at most {most} are left"
    if mix.sequences > launch.sequences:
        return f"{mix.sequences:,} sequences are asked for, and the engine runs {launch.sequences:,} at once"
    return ""


def _is_told(launch: EngineLaunch) -> bool:
    """Whether KV memory is given by number, or follows from a budget alone: there is no band then."""
    return launch.kv_bytes is not None or launch.kv_blocks is not None or launch.engine == TORCH


def given_kv(bytes_per_token: int, why: str) -> KvBytes:
    """KV memory by one figure that somebody gives, the same on each accelerator."""
    share = KvShare(bytes_per_token, (), 0)
    element = ElementType("as given", BFLOAT16.bytes_each, why)
    term = KvTerm(why, f"{bytes_per_token:,} B", bytes_per_token, "token")
    return KvBytes(element, share, (share,), (term,), (f"KV bytes a token are {why}",))
