"""How a replica counts where it is placed: what it shares, and what its engine claims. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from exaserve_ops.serving.domain.accelerator_wish import MpsShare
from exaserve_ops.serving.domain.engine_claims import default_share
from exaserve_ops.serving.domain.engine_launch import (
    SGLANG,
    SHARE_OPTION,
    EngineLaunch,
    LaunchError,
    known_engine,
    read_launch,
)
from exaserve_ops.serving.domain.reservation import MARGIN_RATIO, Terms

_MILLION = 1_000_000
_BESIDE_SGLANG_RATIO = 0.10
"""What SGLang takes beyond its share, which is weights and KV alone: activations and graphs."""
_TYPE_BYTES = {"": 4, "auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of one parameter on a CPU, where `auto` computes in float32."""


def terms_of(
    engine: str,
    options: Mapping[str, object],
    *,
    digest: str,
    parameter_count: int | None,
    needed_bytes: int,
    mps: MpsShare | None = None,
) -> Terms:
    """Return how a replica of such a deployment counts. `needed_bytes`: of each of its accelerators."""
    launch = _launch(engine, options)
    if launch is None:
        return Terms(mps=mps)
    if engine in SHARE_OPTION:
        return Terms(claimed_millionths=_claimed_millionths(launch), mps=mps)
    size = _TYPE_BYTES.get(launch.kv.model_dtype)
    if not (launch.shares_weights and size and digest and parameter_count):
        return Terms(mps=mps)
    copy_bytes = parameter_count * size
    if copy_bytes >= needed_bytes:
        return Terms(mps=mps)  # too small for its weights: counted whole, rather than as nothing beside them
    return Terms(f"{digest}/{size}", copy_bytes, mps=mps)


def _launch(engine: str, options: Mapping[str, object]) -> EngineLaunch | None:
    """What the options say; of options that make no sense what the engine does without any."""
    if not known_engine(engine):
        return None
    try:
        return read_launch(engine, options)
    except LaunchError:
        return read_launch(engine, {})


def _claimed_millionths(launch: EngineLaunch) -> int:
    """Share of an accelerator that the engine takes; none where its KV memory is told by number."""
    if launch.kv_bytes is not None or launch.kv_blocks is not None:
        return 0
    ratio = launch.share_ratio or default_share(launch)
    if launch.engine == SGLANG:
        ratio = min(ratio + _BESIDE_SGLANG_RATIO, max(ratio, 1 - MARGIN_RATIO))
    return round(ratio * _MILLION)
