"""How a replica counts where it is placed: what it shares, and what its engine claims. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from exaserve_ops.serving.domain.accelerator_wish import MpsShare
from exaserve_ops.serving.domain.engine_claims import default_share
from exaserve_ops.serving.domain.engine_launch import (
    SGLANG,
    SHARE_OPTION,
    TORCH,
    EngineLaunch,
    LaunchError,
    known_engine,
    read_launch,
)
from exaserve_ops.serving.domain.reservation import MARGIN_RATIO, Terms

HOST_TIER_OPTION = "kv_host_bytes"
_MILLION = 1_000_000
_BESIDE_SGLANG_RATIO = 0.10
"""What SGLang takes beyond its share, which is weights and KV alone: activations and graphs."""
_TYPE_BYTES = {"": 4, "auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of one parameter on a CPU, where `auto` computes in float32."""
_AS_SAVED = frozenset({"", "auto"})
"""On a card, weights are loaded in the type that they were saved in."""


def terms_of(
    engine: str,
    options: Mapping[str, object],
    *,
    digest: str,
    parameter_count: int | None,
    weights_bytes: int,
    needed_bytes: int,
    accelerators: int = 1,
    mps: MpsShare | None = None,
) -> Terms:
    """Return how a replica of such a deployment counts. `needed_bytes`: of each of its accelerators.

    `weights_bytes`: of the model's files, in the type that they were saved in.
    """
    launch = _launch(engine, options)
    if launch is None:
        return Terms(mps=mps)
    host_bytes = _host_bytes(engine, options)
    if engine in SHARE_OPTION:
        return Terms(claimed_millionths=_claimed_millionths(launch), mps=mps)
    dtype = launch.kv.model_dtype
    if not (launch.shares_weights and digest and dtype in _TYPE_BYTES) or accelerators > 1:
        return Terms(mps=mps, host_bytes=host_bytes)
    parameters, size = parameter_count or 0, _TYPE_BYTES[dtype]
    on_card = weights_bytes if dtype in _AS_SAVED else parameters * size
    return Terms(
        *_copy(f"{digest}/{size}", parameters * size, needed_bytes),
        *_copy(f"{digest}/{dtype}", on_card, needed_bytes),
        mps=mps,
        host_bytes=host_bytes,
    )


def _host_bytes(engine: str, options: Mapping[str, object]) -> int:
    """Host memory that KV blocks go to when they have to leave, beside the replica's own budget."""
    told = options.get(HOST_TIER_OPTION) if engine == TORCH else None
    return told if isinstance(told, int) and told > 0 else 0


def _copy(name: str, copy_bytes: int, needed_bytes: int) -> tuple[str, int]:
    """A copy that can be counted on: of a known size, and less than all that its replica needs.

    What is too small for its weights counts whole, rather than as nothing beside them.
    """
    return (name, copy_bytes) if 0 < copy_bytes < needed_bytes else ("", 0)


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
