"""The engine model behaves like an engine: no figure is free, and equal seeds give equal figures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.protocol.observed import ReplicaTelemetry
from workers.simulation.engine import EngineModel, EngineShape, Request, Traffic


def engine(rate: float = 0.0, *, seed: int = 1, shape: EngineShape | None = None) -> EngineModel:
    traffic = Traffic(requests_per_second=rate)
    return EngineModel(shape or EngineShape(), traffic, random.Random(seed), 0.0)  # noqa: S311 - a model


def run(model: EngineModel, seconds: int) -> list[ReplicaTelemetry]:
    return [model.telemetry(float(second)) for second in range(1, seconds + 1)]


def ask(at: float, prompt: int = 160, answer: int = 10, session: str = "a") -> Request:
    return Request(at, prompt, answer, session)


def test_idle_engine_reports_no_latency_and_an_empty_pool() -> None:
    last = run(engine(), 30)[-1]
    assert (last.requests_running, last.requests_waiting, last.kv_used_ratio) == (0, 0, 0.0)
    assert last.ttft_p95_seconds is None
    assert last.prefix_hit_ratio is None


def test_first_token_takes_prefill_and_one_decode_step() -> None:
    shape = EngineShape(prefill_tokens_per_second=1000, decode_seconds=0.02)
    model, request = engine(shape=shape), ask(5.0, prompt=500)
    model.submit(request)
    assert request.first_token_at == pytest.approx(5.0 + 0.5 + 0.02)
    assert request.ends_at == pytest.approx(request.first_token_at + 9 * 0.02)


def test_second_turn_prefills_only_what_is_not_cached() -> None:
    model = engine()
    first = ask(0.0, prompt=320, answer=16)
    model.submit(first)
    second = ask(10.0, prompt=640)
    model.submit(second)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 336
    stranger = ask(20.0, prompt=640, session="b")
    model.submit(stranger)
    assert stranger.cached_tokens == 0


def test_full_batch_makes_requests_wait() -> None:
    model = engine(shape=EngineShape(batch_requests=2))
    requests = [ask(0.0, answer=50, session=str(n)) for n in range(5)]
    for request in requests:
        model.submit(request)
    seen = model.telemetry(0.1)
    assert (seen.requests_running, seen.requests_waiting) == (2, 3)
    assert not requests[4].first_token_at
    model.advance(60.0)
    assert requests[4].first_token_at > requests[0].ends_at
    assert model.active_requests == 0


def test_full_pool_makes_requests_wait_although_the_batch_has_room() -> None:
    model = engine(shape=EngineShape(kv_blocks=30))
    first, second = ask(0.0, prompt=300, session="a"), ask(0.0, prompt=300, session="b")
    model.submit(first)
    model.submit(second)
    assert model.telemetry(0.001).requests_waiting == 1
    model.advance(60.0)
    assert second.first_token_at > first.ends_at


def test_more_load_means_more_tokens_fuller_pool_and_slower_tokens() -> None:
    calm, busy = run(engine(0.3), 300)[-120:], run(engine(4.0), 300)[-120:]

    def mean(seen: list[ReplicaTelemetry], name: str) -> float:
        values = [value for value in (getattr(one, name) for one in seen) if value is not None]
        return sum(values) / len(values)

    for name in ("generation_tokens_per_second", "kv_used_ratio", "itl_p95_seconds"):
        assert mean(busy, name) > mean(calm, name)


def test_slow_engine_has_its_latencies_multiplied() -> None:
    usual, slow = engine(1.0), engine(1.0)
    slow.latency_factor = 4.0
    usual_itl = [t.itl_p50_seconds for t in run(usual, 120)][-1]
    slow_itl = [t.itl_p50_seconds for t in run(slow, 120)][-1]
    assert usual_itl is not None
    assert slow_itl is not None
    assert slow_itl > 3 * usual_itl


def test_equal_seeds_give_equal_figures_and_other_seeds_others() -> None:
    assert run(engine(1.0, seed=3), 200) == run(engine(1.0, seed=3), 200)
    assert run(engine(1.0, seed=3), 200) != run(engine(1.0, seed=4), 200)


def test_figures_do_not_depend_on_how_often_one_looks() -> None:
    often, once = engine(1.0), engine(1.0)
    for tenth in range(1, 3000):
        often.advance(tenth / 10)
    assert often.telemetry(300.0).requests_total == once.telemetry(300.0).requests_total


def test_draining_engine_takes_nothing_new_and_finishes_what_it_has() -> None:
    model = engine(5.0)
    model.advance(30.0)
    model.drain()
    total = model.telemetry(30.0).requests_total
    assert total is not None
    active = model.active_requests
    model.advance(600.0)
    assert model.active_requests == 0
    assert model.telemetry(600.0).requests_total == total + active


@settings(max_examples=40, deadline=None)
@given(rate=st.floats(0.01, 20), seed=st.integers(0, 10_000), batch=st.integers(1, 32))
def test_no_load_breaks_the_bounds(rate: float, seed: int, batch: int) -> None:
    shape = EngineShape(batch_requests=batch, kv_blocks=600)
    totals = 0.0
    for seen in run(engine(rate, seed=seed, shape=shape), 60):
        assert seen.requests_running is not None
        assert seen.kv_used_ratio is not None
        assert 0 <= seen.requests_running <= batch
        assert 0 <= seen.kv_used_ratio <= 1
        assert seen.prefix_hit_ratio is None or 0 <= seen.prefix_hit_ratio <= 1
        assert seen.generation_tokens_total is not None
        assert seen.generation_tokens_total >= totals
        totals = seen.generation_tokens_total
