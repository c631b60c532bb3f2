"""What stages have to have in common before they compute together, and how many blocks all of them hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from workers.engines.torch_engine.stage_link import StageLostError


class StageFacts(msgspec.Struct, frozen=True):
    """What one stage has loaded."""

    number: int
    model: str
    """Names the whole model's shape, and its content where that has a name."""
    compute_dtype: str
    kv_dtype: str
    device_kind: str
    blocks: int
    """KV blocks that it has room for."""
    block_bytes: int
    """One block of its layers."""


class Agreement(msgspec.Struct, frozen=True):
    """What the first stage decided for all; with a refusal, that there is nothing to decide."""

    blocks: int = 0
    block_bytes: int = 0
    """One block over all stages."""
    refusal: str = ""


def agree(facts: Sequence[StageFacts]) -> Agreement:
    """Decide: all hold as many blocks as the one with least room, since a block is in all of them."""
    first, *others = facts
    for other in others:
        for name, words in _ALIKE.items():
            one, two = getattr(first, name), getattr(other, name)
            if one != two:
                return Agreement(refusal=f"stage {other.number} {words} {two}, and stage 0 {one}")
    return Agreement(
        blocks=min(stage.blocks for stage in facts), block_bytes=sum(stage.block_bytes for stage in facts)
    )


def name_model(shape: object, digest: str) -> str:
    """Name a model by its config and by the digest of its content, if it has one."""
    named = hashlib.blake2b(repr(shape).encode(), digest_size=8).hexdigest()
    return f"{digest.removeprefix('sha256:')[:12] or 'without a digest'} of shape {named}"


def read_facts(told: bytes) -> StageFacts:
    """Read what a stage told. Raises `StageLostError`."""
    try:
        return msgspec.msgpack.decode(told, type=StageFacts)
    except msgspec.MsgspecError as error:
        raise StageLostError(f"a stage's facts cannot be read: {error}") from error


def read_agreement(told: bytes) -> Agreement:
    """Read what the first stage decided. Raises `StageLostError`, also for a refusal."""
    try:
        agreement = msgspec.msgpack.decode(told, type=Agreement)
    except msgspec.MsgspecError as error:
        raise StageLostError(f"what stage 0 decided cannot be read: {error}") from error
    if agreement.refusal:
        raise StageLostError(agreement.refusal)
    return agreement


_ALIKE = {
    "model": "has model",
    "compute_dtype": "computes in",
    "kv_dtype": "keeps KV as",
    "device_kind": "runs on",
}
