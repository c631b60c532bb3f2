"""Which token is drawn: the right chances, and nothing that depends on the rest of the batch."""

from __future__ import annotations

import pytest
import torch

from workers.engines.torch_engine.sampling import Sampler, sample_tokens

VOCABULARY = 1000
DRAWS = 20_000


def logits_of(*, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The chances that top-p leaves, worked out the slow way."""
    order = sorted(range(len(probabilities)), key=lambda token: -float(probabilities[token]))
    kept, mass = torch.zeros(len(probabilities), dtype=torch.float64), 0.0
    for token in order:
        if mass >= top_p:
            break
        kept[token] = probabilities[token].double()
        mass += float(probabilities[token])
    return kept / kept.sum()


@pytest.mark.parametrize("spread", [3.0, 0.5], ids=["narrow", "wider_than_what_is_looked_at_first"])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_as_often_as_they_should(spread: float, top_p: float, temperature: float) -> None:
    row = logits_of(spread=spread)
    expected = nucleus((row / temperature).softmax(dim=-1), top_p)
    sampler = Sampler.seeded(temperature, top_p, 7)
    drawn = sample_tokens(row.expand(DRAWS, -1), [sampler] * DRAWS)
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY).double()
    assert not counts[expected == 0].any()
    # Total variation of so many draws from so many tokens lies well below this, if the chances are right.
    likely = expected > 0
    limit = 1.5 * float((likely.sum() / (2 * torch.pi * DRAWS)).sqrt())
    assert 0.5 * (counts / DRAWS - expected).abs().sum() < limit


def test_row_draws_the_same_whatever_is_beside_it() -> None:
    rows = torch.stack([logits_of(seed=seed, spread=0.3 + seed) for seed in range(6)])
    shapes = [(1.0, 1.0), (0.7, 0.8), (0.0, 1.0), (1.3, 0.999), (0.2, 0.1), (2.0, 1.0)]

    def samplers() -> list[Sampler]:
        return [Sampler.seeded(t, p, seed) for seed, (t, p) in enumerate(shapes)]

    together = sample_tokens(rows, samplers())
    alone = [sample_tokens(rows[n : n + 1], [samplers()[n]])[0] for n in range(len(shapes))]
    backwards = sample_tokens(rows.flip(0), samplers()[::-1])[::-1]
    assert together == alone == backwards


def test_greedy_takes_the_best_and_draws_no_number() -> None:
    row = logits_of()
    sampler = Sampler.seeded(0.0, 0.5, 1)
    before = sampler.numbers.getstate()
    assert sample_tokens(row[None], [sampler]) == [int(row.argmax())]
    assert sampler.numbers.getstate() == before


@pytest.mark.parametrize("top_p", [1.0, 0.95])
@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_stay_in_the_vocabulary(temperature: float, top_p: float) -> None:
    row = logits_of(spread=50)
    row[3] = float("-inf")
    for seed in range(50):
        (token,) = sample_tokens(row[None], [Sampler.seeded(temperature, top_p, seed)])
        assert token != 3
        assert temperature > 1 or token == int(row.argmax())
