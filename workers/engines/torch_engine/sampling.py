"""From logits to tokens: greedy rows by maximum, others by inverse transform."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

_NUCLEUS_TOKENS = 256
"""Tokens among which a nucleus nearly always ends; finding them is far cheaper than sorting all."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one request samples. Its random numbers are its own, whatever else is in the batch."""

    temperature: float
    top_p: float
    numbers: random.Random = field(default_factory=random.Random)

    @staticmethod
    def seeded(temperature: float, top_p: float, seed: int | None, *, drawn: int = 0) -> Sampler:
        """Make a sampler; the same seed draws the same numbers, no seed draws fresh ones.

        `drawn` of a seed's numbers, one for each token, have been used already.
        """
        numbers = random.Random(seed)  # noqa: S311 - sampling, no secret
        if seed is not None and temperature > 0:
            for _ in range(drawn):
                numbers.random()
        return Sampler(temperature, top_p, numbers)

    def next_choice(self) -> Choice:
        """How the next token is to be chosen: takes one of the numbers, if any is needed."""
        return Choice(self.temperature, self.top_p, self.numbers.random() if self.temperature > 0 else 0.0)


class Choice(NamedTuple):
    """How one token is chosen: all that is needed of a sampler, wherever the logits are."""

    temperature: float
    top_p: float
    draw: float
    """From 0 up to 1; of no meaning where the likeliest is taken."""


def sample_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Choose a token for each row of `logits` (`[rows, vocabulary]`, float32)."""
    return choose_tokens(logits, [sampler.next_choice() for sampler in samplers])


@torch.inference_mode()
def choose_tokens(logits: Tensor, choices: Sequence[Choice]) -> list[int]:
    """Choose a token for each row of `logits` (`[rows, vocabulary]`, float32).

    Which one depends on the row's logits and its choice alone, never on the rows beside it.
    """
    tokens = _best(logits)
    drawn = [row for row, choice in enumerate(choices) if choice.temperature > 0]
    if drawn:
        chosen = [choices[row] for row in drawn]
        tokens[drawn] = _draw(_probabilities(logits[drawn], chosen), chosen)
    result: list[int] = tokens.tolist()
    return result


def _best(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row, the first of equals."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # Ten times as fast as torch's own on a CPU, which goes number by number.
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _probabilities(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    temperatures = torch.tensor([choice.temperature for choice in choices], device=logits.device)
    # Dividing by a tiny temperature may overflow; the difference to the maximum cannot go over 0.
    lowered = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    return lowered.softmax(dim=-1)


def _draw(probabilities: Tensor, choices: Sequence[Choice]) -> Tensor:
    device = probabilities.device
    draws = torch.tensor([choice.draw for choice in choices], device=device)
    bounds = torch.tensor([choice.top_p for choice in choices], device=device)
    tokens = torch.empty(len(choices), dtype=torch.long, device=device)
    whole = [row for row, choice in enumerate(choices) if choice.top_p >= 1]
    if whole:
        # Nothing is cut off, so no order is needed: any order of the tokens gives the same chances.
        tokens[whole] = _invert(probabilities[whole].cumsum(dim=-1), draws[whole])
    cut = [row for row, choice in enumerate(choices) if choice.top_p < 1]
    if cut:
        tokens[cut] = _draw_from_nucleus(probabilities[cut], bounds[cut], draws[cut])
    return tokens


def _draw_from_nucleus(probabilities: Tensor, bounds: Tensor, draws: Tensor) -> Tensor:
    """Draw from the likeliest tokens whose sum reaches the bound; all are sorted only if it must be."""
    count = min(_NUCLEUS_TOKENS, probabilities.shape[-1])
    ordered, order = probabilities.topk(count, dim=-1)
    tokens = _draw_from_head(ordered, order, bounds, draws)
    wide = (ordered.sum(dim=-1) < bounds).nonzero().flatten()
    if len(wide) and count < probabilities.shape[-1]:
        ordered, order = probabilities[wide].sort(dim=-1, descending=True, stable=True)
        tokens[wide] = _draw_from_head(ordered, order, bounds[wide], draws[wide])
    return tokens


def _draw_from_head(ordered: Tensor, order: Tensor, bounds: Tensor, draws: Tensor) -> Tensor:
    sums = ordered.cumsum(dim=-1)
    # The nucleus is the shortest head that reaches top_p: what lies wholly beyond it is left out.
    kept = (sums - ordered < bounds[:, None]).sum(dim=-1, keepdim=True)
    mass = sums.gather(1, kept - 1)
    places = torch.searchsorted(sums, draws[:, None] * mass, right=True)
    return order.gather(1, torch.minimum(places, kept - 1)).squeeze(1)


def _invert(sums: Tensor, draws: Tensor) -> Tensor:
    """Return where each row of running sums passes its draw, as a part of the row's last sum."""
    mass = sums[:, -1:].contiguous()
    places = torch.searchsorted(sums, draws[:, None] * mass, right=True)
    # A draw next to 1 may be rounded up to the whole sum, which the last token that adds to it reaches.
    return torch.minimum(places, torch.searchsorted(sums, mass)).squeeze(1)
