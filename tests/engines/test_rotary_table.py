"""A table of rotary positions that grows gives what a whole one gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.engines.torch_engine.config import ModelConfig, read_model_config
from workers.engines.torch_engine.rotary import RotaryTable, rotary_frequencies, rotate

CPU = torch.device("cpu")


@pytest.fixture
def config(demo_model: Path) -> ModelConfig:
    return read_model_config(demo_model)


def table(config: ModelConfig) -> RotaryTable:
    return RotaryTable(config, device=CPU, dtype=torch.float32)


def test_table_grows_to_what_is_asked_for_and_no_further(config: ModelConfig) -> None:
    assert config.max_position_tokens > 1024
    grown = table(config)
    begun = grown.positions
    grown.rows(torch.tensor([begun - 1]))
    assert grown.positions == begun
    grown.rows(torch.tensor([3, begun]))
    assert grown.positions == 2 * begun
    grown.rows(torch.tensor([config.max_position_tokens - 1]))
    assert grown.positions == config.max_position_tokens
    assert grown.rows(torch.tensor([], dtype=torch.long))[0].shape[0] == 0


def test_rows_are_the_same_before_and_after_growing(config: ModelConfig) -> None:
    grown, places = table(config), torch.tensor([0, 1, 17, 500])
    before = [part.clone() for part in grown.rows(places)]
    grown.rows(torch.tensor([config.max_position_tokens - 1]))
    assert all(map(torch.equal, grown.rows(places), before))


def test_pairs_are_turned_by_their_angle(config: ModelConfig) -> None:
    half = config.head_size // 2
    rows = torch.randn(2, 3, config.head_size, generator=torch.Generator().manual_seed(1))
    places = torch.tensor([0, 700])
    turned = rotate(rows, table(config).rows(places))
    assert torch.equal(turned[0], rows[0])
    pairs = torch.complex(rows[1, :, :half], rows[1, :, half:])
    angles = 700 * rotary_frequencies(config.rope, config.head_size)
    expected = pairs * torch.polar(torch.ones(half), angles)
    torch.testing.assert_close(turned[1], torch.cat((expected.real, expected.imag), dim=-1))
