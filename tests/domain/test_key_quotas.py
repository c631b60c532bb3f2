"""Token rates of keys: nothing above the rate over time, no request cut off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.access.domain.limits import KeyLimits
from exaserve_ops.routing.domain.quotas import Bucket, charge, refill, settle


def test_new_bucket_is_full_and_fills_no_further() -> None:
    assert refill(None, 600, 5.0) == Bucket(600, 5.0)
    assert refill(Bucket(600, 5.0), 600, 500.0).tokens == 600
    assert refill(Bucket(0, 5.0), 600, 6.0).tokens == pytest.approx(10)


def test_overdrawn_bucket_says_when_to_come_again() -> None:
    bucket, wait = charge(None, 600, 1000, 0.0)
    assert (bucket.tokens, wait) == (-400, 0.0), "one request may overdraw"
    refused, wait = charge(bucket, 600, 1, 1.0)
    assert refused.tokens == pytest.approx(-390), "what is refused costs nothing"
    later, again = charge(bucket, 600, 1, 1.0 + wait)
    assert again == 0.0
    assert later.tokens >= -1


def test_prompt_that_was_overestimated_is_given_back() -> None:
    bucket, _ = charge(None, 600, 500, 0.0)
    assert settle(bucket, 600, -300, 0.0).tokens == 400
    assert settle(bucket, 600, -9000, 0.0).tokens == 600


@given(
    st.integers(1, 100_000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5_000), st.integers(0, 5_000)), max_size=60),
)
def test_use_over_time_is_bounded_by_the_rate_a_burst_and_one_request(
    rate: int, requests: list[tuple[float, int, int]]
) -> None:
    bucket: Bucket | None = None
    now, used, largest = 0.0, 0, 0
    for pause, prompt, completion in requests:
        now += pause
        bucket, wait = charge(bucket, rate, prompt, now)
        if not wait:
            bucket = settle(bucket, rate, completion, now)
            used += prompt + completion
            largest = max(largest, prompt + completion)
        assert bucket.tokens <= rate
    assert used <= rate * (1 + now / 60) + largest + 1e-6


def test_clock_that_goes_back_gives_and_takes_nothing() -> None:
    assert refill(Bucket(10, 100.0), 600, 50.0).tokens == 10


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (KeyLimits(), "no limits; interactive"),
        (KeyLimits(4, 60_000, "batch"), "4 requests at once, 60,000 tokens a minute; batch"),
    ],
)
def test_limits_are_said_in_words(limits: KeyLimits, said: str) -> None:
    assert limits.sentence() == said
    assert limits.problem() is None
