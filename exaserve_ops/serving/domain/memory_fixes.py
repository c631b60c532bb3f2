"""What would make a model fit: each fix is tried in full before it is offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from exaserve_ops.serving.domain.engine_claims import default_share, torch_budget
from exaserve_ops.serving.domain.engine_launch import (
    LENGTH_OPTION,
    SEQUENCES_OPTION,
    SHARE_OPTION,
    TORCH,
    EngineLaunch,
)
from exaserve_ops.serving.domain.memory_plan import (
    FITS,
    NOT,
    AcceleratorMemory,
    MemoryPlan,
    ModelFigures,
    SequenceMix,
    plan_memory,
)

LENGTH_STEP_TOKENS = 256
"""Offered lengths are multiples of it."""
HIGHEST_SHARE = 0.95
"""More than this leaves too little for what engines do not count."""
MOST_WAYS = 16


@dataclass(frozen=True, slots=True)
class Fix:
    """One change, and what comes of it."""

    kind: str
    text: str
    options: tuple[tuple[str, str], ...]
    """Options to set."""
    verdict: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """What was planned, and did not fit."""

    model: ModelFigures
    launch: EngineLaunch
    accelerator: AcceleratorMemory
    mix: SequenceMix
    budget_bytes: int | None = None
    accelerators: int = 1
    """Accelerators on a node: more of them can hold one replica."""


def fixes(attempt: Attempt, plan: MemoryPlan) -> tuple[Fix, ...]:
    """Changes that make it fit, or at least tight where it did not fit, best first. None if it fits."""
    if plan.verdict == FITS:
        return ()
    found = [_tried(attempt, candidate) for candidate in _candidates(attempt, plan)]
    better = [fix for fix in found if fix is not None and fix.verdict != plan.verdict]
    return tuple(sorted(better, key=lambda fix: fix.verdict != FITS))


@dataclass(frozen=True, slots=True)
class _Candidate:
    kind: str
    text: str
    options: tuple[tuple[str, str], ...]
    attempt: Attempt


def _tried(attempt: Attempt, candidate: _Candidate) -> Fix | None:
    changed = candidate.attempt
    plan = plan_memory(
        changed.model, changed.launch, changed.accelerator, changed.mix, budget_bytes=changed.budget_bytes
    )
    if not isinstance(plan, MemoryPlan) or plan.verdict == NOT or changed == attempt:
        return None
    return Fix(candidate.kind, candidate.text, candidate.options, plan.verdict)


def _candidates(attempt: Attempt, plan: MemoryPlan) -> Iterator[_Candidate]:
    launch = attempt.launch
    yield from _shorter(attempt, plan)
    if plan.kv.element.bytes_each > 1 and launch.engine != TORCH:
        kv = replace(launch.kv, kv_dtype="fp8")
        yield _Candidate(
            "fp8_kv",
            "keep keys and values in fp8: half the bytes",
            (("kv_cache_dtype", "fp8"),),
            replace(attempt, launch=replace(launch, kv=kv)),
        )
    yield from _more_accelerators(attempt)
    yield from _fewer_sequences(attempt, plan)
    yield from _larger_share(attempt)
    if attempt.budget_bytes is not None:
        yield from _larger_budget(attempt, plan)


def _shorter(attempt: Attempt, plan: MemoryPlan) -> Iterator[_Candidate]:
    """The longest sequence that surely fits; never shorter than a mean one."""
    launch = attempt.launch
    room = plan.claim.pool_low_bytes - attempt.accelerator.band_bytes
    longest = plan.limit_tokens - 1
    tokens = plan.kv.tokens_within(room, at_most=longest, block_tokens=launch.block_tokens)
    if tokens > LENGTH_STEP_TOKENS:
        tokens -= tokens % LENGTH_STEP_TOKENS
    if tokens >= max(plan.mean_tokens, 1):
        yield _Candidate(
            "shorter_context",
            f"serve at most {tokens:,} tokens",
            ((LENGTH_OPTION[launch.engine], str(tokens)),),
            replace(attempt, launch=replace(launch, length_tokens=tokens)),
        )


def _more_accelerators(attempt: Attempt) -> Iterator[_Candidate]:
    launch = attempt.launch
    if launch.engine == TORCH:
        return
    ways = launch.kv.tensor_parallel * 2
    most = min(MOST_WAYS, attempt.accelerators // launch.kv.pipeline_parallel)
    while ways <= most:
        kv = replace(launch.kv, tensor_parallel=ways)
        option = "tp_size" if launch.engine == "sglang" else "tensor_parallel_size"
        candidate = _Candidate(
            "more_accelerators",
            f"split each replica over {ways} accelerators",
            ((option, str(ways)),),
            replace(attempt, launch=replace(launch, kv=kv)),
        )
        yield candidate
        fix = _tried(attempt, candidate)
        if fix is not None and fix.verdict == FITS:
            return
        ways *= 2


def _fewer_sequences(attempt: Attempt, plan: MemoryPlan) -> Iterator[_Candidate]:
    """As many as surely fit at once; the rest wait, or go to more replicas."""
    room = max(0, plan.claim.pool_low_bytes - attempt.accelerator.band_bytes)
    held = room // plan.sequence_at_mean_bytes if plan.sequence_at_mean_bytes else 0
    fewer = min(held, attempt.mix.sequences - 1, attempt.launch.sequences)
    if fewer >= 1:
        yield _Candidate(
            "fewer_sequences",
            f"hold {fewer:,} sequences a replica at once",
            ((SEQUENCES_OPTION[attempt.launch.engine], str(fewer)),),
            replace(attempt, mix=replace(attempt.mix, sequences=fewer)),
        )


def _larger_share(attempt: Attempt) -> Iterator[_Candidate]:
    launch = attempt.launch
    option = SHARE_OPTION.get(launch.engine)
    share = launch.share_ratio or default_share(launch)
    if option and share < HIGHEST_SHARE:
        yield _Candidate(
            "larger_share",
            f"let the engine take {HIGHEST_SHARE:.0%} of the accelerator",
            ((option, f"{HIGHEST_SHARE:g}"),),
            replace(attempt, launch=replace(launch, share_ratio=HIGHEST_SHARE)),
        )


def _larger_budget(attempt: Attempt, plan: MemoryPlan) -> Iterator[_Candidate]:
    """Memory per replica that the built-in engine needs: a fifth of it is not for weights and KV."""
    budget = torch_budget(plan.weights_bytes, plan.wanted_kv_bytes + attempt.accelerator.band_bytes)
    if attempt.budget_bytes is not None and budget > attempt.budget_bytes:
        yield _Candidate(
            "larger_budget",
            f"set aside {budget:,} bytes for each replica",
            (("replica_memory_bytes", str(budget)),),
            replace(attempt, budget_bytes=budget),
        )
