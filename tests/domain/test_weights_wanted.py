"""What a node is told of weights that several owners want there."""

from __future__ import annotations

from exaserve_ops.weights.domain.held import FAILED, FETCHING, READY, HeldWeights, mark_of
from exaserve_ops.weights.domain.wanted import (
    PERSON,
    PREWARM,
    REPLICA,
    Claim,
    Origin,
    Revision,
    WantedWeights,
    combine_claims,
    digest_of,
)

ONE = Revision("sha256:1", "sha256:m1", 100, "one", (Origin("folder", "file:///one"),))
TWO = Revision("sha256:2", "sha256:m2", 200, "two", (Origin("folder", "file:///two"),))
KNOWN = {ONE.digest: ONE, TWO.digest: TWO}


def wanted(*claims: Claim) -> tuple[WantedWeights, ...]:
    return combine_claims(claims, KNOWN)


def test_a_revision_that_several_want_is_told_once_with_the_most_urgent_priority() -> None:
    (one,) = wanted(Claim(ONE.digest, PREWARM), Claim(ONE.digest, REPLICA), Claim(ONE.digest, "rollout:7"))
    assert (one.revision, one.priority) == (ONE, 100)


def test_it_is_paused_only_where_every_owner_paused_it() -> None:
    assert wanted(Claim(ONE.digest, PREWARM, paused=True))[0].paused
    (one,) = wanted(Claim(ONE.digest, PREWARM, paused=True), Claim(ONE.digest, "rollout:7"))
    assert not one.paused
    assert one.priority == 50, "the one that is paused does not hurry the other"


def test_it_is_capped_only_where_every_owner_that_waits_capped_it() -> None:
    slow, slower = (
        Claim(ONE.digest, PREWARM, bytes_per_second=10),
        Claim(ONE.digest, PERSON, bytes_per_second=5),
    )
    assert wanted(slow, slower)[0].bytes_per_second == 10
    assert wanted(slow, slower, Claim(ONE.digest, REPLICA))[0].bytes_per_second == 0
    paused = Claim(ONE.digest, REPLICA, paused=True)
    assert wanted(slow, paused)[0].bytes_per_second == 10


def test_what_nobody_knows_any_more_is_left_out_and_the_order_does_not_matter() -> None:
    claims = (Claim(TWO.digest, PERSON), Claim(ONE.digest, PERSON), Claim("sha256:gone", PERSON))
    assert [w.revision for w in wanted(*claims)] == [ONE, TWO]
    assert digest_of(wanted(*claims)) == digest_of(wanted(*reversed(claims)))
    assert digest_of(wanted(claims[0])) != digest_of(wanted(claims[1]))


def test_speed_and_progress_are_no_news_but_states_and_damage_are() -> None:
    before = HeldWeights("r", FETCHING, 10 << 30, 1000, bytes_per_second=5.0, reason="at 5 B/s")
    assert mark_of(before) == mark_of(HeldWeights("r", FETCHING, 10 << 30, 2 << 30, 7.0, reason="at 7 B/s"))
    for other in (
        HeldWeights("r", READY, 10 << 30, 1000),
        HeldWeights("r", FAILED, 10 << 30, 1000, reason="full"),
        HeldWeights("r", FETCHING, 10 << 30, 1000, damaged_pieces=1),
    ):
        assert mark_of(other) != mark_of(before)
