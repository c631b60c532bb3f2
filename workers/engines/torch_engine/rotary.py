"""Rotary positions: how far each pair of a head's numbers is turned at each position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.engines.torch_engine.config import ModelConfig, RopeConfig

_FIRST_POSITIONS = 512
"""Rows of a CPU's first table. A whole one may take more memory than all else of a replica."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of some rows, each `[rows, 1, head_size / 2]`; the middle axis is the heads."""


class RotaryTable:
    """Cosines and sines by position, as far as positions have been asked for."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        """Begin with a short table on a CPU, with all positions elsewhere: to look there for more costs."""
        self._rope = config.rope
        self._head_size = config.head_size
        self._most = config.max_position_tokens
        self._device = device
        self._dtype = dtype
        self._grows = device.type == "cpu"
        first = min(_FIRST_POSITIONS, self._most) if self._grows else self._most
        self._cosine, self._sine = self._compute(first)

    @property
    def positions(self) -> int:
        """Rows of the table as it is."""
        return len(self._cosine)

    def rows(self, positions: Tensor) -> Rotation:
        """Return the rotation of some rows by their positions, all below the model's most."""
        if self._grows and len(positions):
            needed = int(positions.max()) + 1
            if needed > self.positions:
                # By doubling, so that a growing sequence makes few tables.
                self._cosine, self._sine = self._compute(min(max(needed, 2 * self.positions), self._most))
        return self._cosine[positions].unsqueeze(1), self._sine[positions].unsqueeze(1)

    def _compute(self, positions: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(positions, dtype=torch.float32)
        angles = torch.outer(places, rotary_frequencies(self._rope, self._head_size))
        factor = self._rope.attention_factor
        cosine, sine = angles.cos() * factor, angles.sin() * factor
        return cosine.to(self._device, self._dtype), sine.to(self._device, self._dtype)


def rotate(rows: Tensor, rotation: Rotation) -> Tensor:
    """Turn all heads of `[rows, heads, head_size]`: a head's first half is paired with its second."""
    cosine, sine = rotation
    half = rows.shape[-1] // 2
    first, second = rows[..., :half], rows[..., half:]
    turned = torch.empty_like(rows)
    torch.mul(first, cosine, out=turned[..., :half]).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=turned[..., half:]).addcmul_(first, sine)
    return turned


def rotary_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Radians that each pair of a head's numbers is turned by from one position to the next."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position_tokens / rope.low_freq_factor
    shortest = rope.original_max_position_tokens / rope.high_freq_factor
    smooth = (rope.original_max_position_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, scaled)


def _yarn_frequencies(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """As with llama3, but the blend runs over dimensions, between two numbers of turns."""
    size = 2 * len(frequencies)

    def dimension_of(turns: float) -> float:
        around = rope.original_max_position_tokens / (turns * 2 * math.pi)
        return size * math.log(around) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step rather than a division by zero
    stretched = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies
