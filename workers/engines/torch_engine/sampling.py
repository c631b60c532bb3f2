"""From logits to tokens: greedy rows by maximum, others by inverse transform."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one request samples. Its random numbers are its own, whatever else is in the batch."""

    temperature: float
    top_p: float
    numbers: random.Random = field(default_factory=random.Random)

    @staticmethod
    def seeded(temperature: float, top_p: float, seed: int | None) -> Sampler:
        """Make a sampler; the same seed draws the same numbers, no seed draws fresh ones."""
        return Sampler(temperature, top_p, random.Random(seed))  # noqa: S311 - sampling, no secret


@torch.inference_mode()
def sample_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Choose a token for each row of `logits` (`[rows, vocabulary]`, float32)."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [row for row, sampler in enumerate(samplers) if sampler.temperature > 0]
    if not drawn:
        return tokens
    chosen = [samplers[row] for row in drawn]
    device = logits.device
    temperatures = torch.tensor([sampler.temperature for sampler in chosen], device=device)
    bounds = torch.tensor([sampler.top_p for sampler in chosen], device=device)
    draws = torch.tensor([sampler.numbers.random() for sampler in chosen], device=device)
    # Dividing by a tiny temperature may overflow; the difference to the maximum cannot go over 0.
    rows = logits[drawn]
    rows = (rows - rows.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    ordered, order = rows.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    sums = ordered.cumsum(dim=-1)
    # The nucleus is the shortest head that reaches top_p: what lies wholly beyond it is left out.
    kept = (sums - ordered < bounds[:, None]).sum(dim=-1)
    mass = sums.gather(1, (kept - 1)[:, None])
    places = torch.searchsorted(sums, draws[:, None] * mass, right=True).squeeze(1)
    places = torch.minimum(places, kept - 1)
    picked: list[int] = order.gather(1, places[:, None]).squeeze(1).tolist()
    for row, token in zip(drawn, picked, strict=True):
        tokens[row] = token
    return tokens
