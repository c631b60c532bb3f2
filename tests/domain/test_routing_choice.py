"""Two levels of choice, hashing that all gateways share, and marks that never lock all out."""

from __future__ import annotations

import collections
import dataclasses
import random
from dataclasses import dataclass, field

import pytest

from exaserve_ops.routing.domain import hashing, markdown, policy


@dataclass(frozen=True)
class Replica:
    name: str
    in_flight: int = 0
    reported_requests: int | None = None
    kv_used_ratio: float | None = None
    failed_at_seconds: float = 0.0
    capacity: float = 1.0


@dataclass(frozen=True)
class Node:
    name: str
    replicas: list[Replica] = field(default_factory=list)
    in_flight: int = 0
    reported_requests: int | None = None
    kv_used_ratio: float | None = None

    @property
    def capacity(self) -> int:
        return len(self.replicas)


def fleet(nodes: int, replicas: int) -> list[Node]:
    return [
        Node(f"n{node}", [Replica(f"n{node}r{number}") for number in range(replicas)])
        for node in range(nodes)
    ]


def homes(nodes: list[Node], sessions: int = 1000) -> dict[str, str]:
    chosen = {}
    for number in range(sessions):
        choice = policy.choose_by_hash(f"s{number}", nodes, lambda _: True)
        assert choice is not None
        chosen[f"s{number}"] = choice.replica.name
    return chosen


def test_unknown_facts_take_no_part() -> None:
    busy = Replica("a", in_flight=1, reported_requests=50)
    unknown = Replica("b", in_flight=2)
    assert policy.is_lighter(busy, unknown)  # by what is known of both, not as if 50 > 0
    assert not policy.is_lighter(unknown, busy)
    assert policy.is_lighter(Replica("c", reported_requests=3), busy)


def test_load_is_judged_for_the_size() -> None:
    large = Node("l", [Replica("a")] * 4, in_flight=6)
    small = Node("s", [Replica("a")], in_flight=2)
    assert policy.is_lighter(large, small)


def test_new_work_follows_weights_and_passes_over_the_ejected() -> None:
    replicas = [Replica("well"), Replica("half", capacity=0.5), Replica("out", capacity=0.0)]
    loads = dict.fromkeys(("well", "half", "out"), 0)
    draw = random.Random(5).randrange  # noqa: S311 - chance for routing, no secret
    for _ in range(3000):
        busy = [dataclasses.replace(r, in_flight=loads[r.name]) for r in replicas]
        loads[policy.choose_replica(busy, draw).name] += 1
    assert loads["out"] == 0
    assert loads["well"] / loads["half"] == pytest.approx(2.0, rel=0.05)


def test_two_choices_find_the_idle_replicas() -> None:
    nodes = [Node("n0", [Replica("idle"), Replica("busy", in_flight=9)])]
    draw = random.Random(1).randrange  # noqa: S311 - chance for routing, no secret
    seen = {policy.choose(nodes, draw, lambda _: True).replica.name for _ in range(50)}  # type: ignore[union-attr] # there is a choice
    assert seen == {"idle"}


def test_unusable_replicas_are_never_chosen_and_a_failed_node_is_avoided() -> None:
    nodes = fleet(3, 3)
    draw = random.Random(2).randrange  # noqa: S311 - chance for routing, no secret
    for _ in range(200):
        choice = policy.choose(nodes, draw, lambda replica: replica.name.endswith("r1"), avoid_node="n0")
        assert choice is not None
        assert choice.replica.name in {"n1r1", "n2r1"}
    assert policy.choose(nodes, draw, lambda _: False) is None
    only = policy.choose(nodes, draw, lambda replica: replica.name == "n0r2", avoid_node="n0")
    assert only is not None  # avoided, but better than nothing
    assert only.replica.name == "n0r2"


def test_hash_spreads_sessions_evenly() -> None:
    counts = collections.Counter(homes(fleet(4, 3), 3000).values())
    assert len(counts) == 12
    assert min(counts.values()) > 150


def test_hash_does_not_depend_on_order() -> None:
    nodes = fleet(5, 2)
    turned = [Node(node.name, node.replicas[::-1]) for node in reversed(nodes)]
    assert homes(nodes, 200) == homes(turned, 200)


def test_a_fifth_of_the_sessions_moves_when_a_fifth_node_comes() -> None:
    before, after = homes(fleet(4, 1)), homes(fleet(5, 1))
    moved = {session for session in before if before[session] != after[session]}
    assert 0.15 < len(moved) / len(before) < 0.25
    assert {after[session] for session in moved} == {"n4r0"}  # all to the new one, none between


def test_only_the_lost_replicas_sessions_move() -> None:
    nodes = fleet(4, 2)
    before = homes(nodes)
    for number in range(1000):
        choice = policy.choose_by_hash(f"s{number}", nodes, lambda replica: replica.name != "n2r1")
        assert choice is not None
        if before[f"s{number}"] != "n2r1":
            assert choice.replica.name == before[f"s{number}"]


def test_fail_over_order_visits_each_node_once_before_any_twice() -> None:
    nodes = fleet(3, 2)
    tried: list[str] = []
    for _ in range(6):
        choice = policy.choose_by_hash("s", nodes, lambda replica: replica.name not in tried)
        assert choice is not None
        tried.append(choice.replica.name)
    assert {name[:2] for name in tried[:3]} == {"n0", "n1", "n2"}
    assert len(set(tried)) == 6


def test_scores_are_the_same_on_every_machine() -> None:
    seed = hashing.key_seed("session")
    assert seed == 0xB5A5888DA19FF824
    assert hashing.score(seed, "replica") == 0x3EEDAFB1C83DAC68


def test_last_resort_is_the_failure_longest_ago() -> None:
    nodes = [Node("n", [Replica("a", failed_at_seconds=9.0), Replica("b", failed_at_seconds=5.0)])]
    choice = policy.choose_last_resort(nodes, lambda _: True)
    assert choice is not None
    assert choice.replica.name == "b"
    assert policy.choose_last_resort(nodes, lambda _: False) is None


def test_refused_connection_marks_at_once_and_longer_each_time() -> None:
    mark, now, pauses = markdown.CLEAR, 100.0, []
    for _ in range(8):
        mark = markdown.note_unreachable(mark, now)
        assert not markdown.is_open(mark, now)
        pauses.append(mark.until_seconds - now)
        now = mark.until_seconds
        assert markdown.is_open(mark, now)
        mark = markdown.note_attempt(mark, now)
        assert not markdown.is_open(mark, now)  # one probe, the others stay away
    assert pauses == sorted(pauses)
    assert pauses[0] == markdown.FIRST_PAUSE_SECONDS
    assert pauses[-1] == markdown.LONGEST_PAUSE_SECONDS


def test_ill_answers_mark_only_when_they_repeat() -> None:
    mark = markdown.CLEAR
    for _ in range(markdown.SOFT_FAILURES_TO_MARK - 1):
        mark = markdown.note_ill(mark, 10.0)
        assert markdown.is_open(mark, 10.0)
    assert not markdown.is_open(markdown.note_ill(mark, 10.0), 10.0)


def test_probe_whose_client_left_lets_the_next_one_try() -> None:
    mark = markdown.note_attempt(markdown.note_unreachable(markdown.CLEAR, 0.0), 5.0)
    assert markdown.is_open(markdown.note_abandoned(mark), 5.0)
    assert markdown.note_abandoned(markdown.CLEAR) is markdown.CLEAR


@pytest.mark.parametrize("name", ["", "a" * 300, "ä/ö"])
def test_any_name_can_be_ranked(name: str) -> None:
    assert hashing.rank(hashing.key_seed(name), [name, "b"], str)
