"""What the stages of the built-in engine's pipeline hold of a model's weights: not the same each."""

from __future__ import annotations

from math import ceil


def stage_weights(
    whole_bytes: int, *, layers: int, embedding_bytes: int, is_tied: bool, stages: int
) -> tuple[int, ...]:
    """Bytes of weights of each stage, in order.

    Layers are split evenly, what is left over goes to the first stages. The first has the embedding too and
    the last the head, which is as large; a tied head is the embedding once more.
    """
    if stages == 1 or layers < stages:
        return (whole_bytes,) * stages
    ends = embedding_bytes * (1 if is_tied else 2)
    each_layer = max(0, whole_bytes - ends) / layers
    share, more = divmod(layers, stages)
    sizes = [each_layer * (share + (number < more)) for number in range(stages)]
    sizes[0] += embedding_bytes
    sizes[-1] += embedding_bytes
    return tuple(map(ceil, sizes))
