"""Mass silence never becomes mass death by itself; one death, or a few, never wait for the guard."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.health.domain.blast_radius import (
    GuardSettings,
    HeldSuspicion,
    Reach,
    WatchedNode,
    is_confirmed_by_gateways,
    rule,
    suspect_observer,
)

SETTINGS = GuardSettings()
node_counts = st.integers(1, 300)


def fleet(count: int, racks: int) -> list[WatchedNode]:
    return [WatchedNode(f"n{i}", f"r{i % racks}", silent=False) for i in range(count)]


def silence(nodes: list[WatchedNode], chosen: set[int]) -> list[WatchedNode]:
    return [replace(node, silent=index in chosen) for index, node in enumerate(nodes)]


def hold(nodes: list[WatchedNode], now: float = 0.0) -> list[HeldSuspicion]:
    opened = rule(nodes, (), now, SETTINGS).opened
    return [HeldSuspicion(s.scope, s.scope, s.node_ids) for s in opened]


@given(node_counts, st.integers(1, 40), st.data())
def test_mass_silence_never_lets_a_death_through(count: int, racks: int, data: st.DataObject) -> None:
    least = max(SETTINGS.least_nodes, -(-count // 5))
    if least > count:
        return
    chosen = data.draw(st.sets(st.integers(0, count - 1), min_size=least))
    ruling = rule(silence(fleet(count, racks), chosen), (), 0.0, SETTINGS)
    assert ruling.withheld == {f"n{i}" for i in chosen}
    assert ruling.opened


@given(node_counts, st.integers(1, 40), st.data())
def test_single_and_few_deaths_never_wait(count: int, racks: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, count - 1), max_size=min(count, SETTINGS.least_nodes - 1)))
    ruling = rule(silence(fleet(count, racks), chosen), (), 0.0, SETTINGS)
    assert (ruling.withheld, ruling.opened) == (frozenset(), ())


@given(st.integers(20, 80), st.data())
@settings(max_examples=30, deadline=None)
def test_a_trickle_of_deaths_within_the_window_counts_as_one_silence(count: int, data: st.DataObject) -> None:
    """However verdicts are spread over rounds, the share is of what went since the window began."""
    order = data.draw(st.permutations(range(count)))
    nodes, dead = fleet(count, 1), 0
    for index in order:
        nodes[index] = replace(nodes[index], silent=True)
        if not rule(nodes, (), 0.0, SETTINGS).withheld:
            nodes[index] = replace(nodes[index], silent=False, dead=True)
            dead += 1
    assert dead < max(SETTINGS.least_nodes, -(-count // 5))


def test_a_rack_is_suspected_as_a_rack_and_others_may_die_meanwhile() -> None:
    nodes = silence(fleet(64, 8), {0, 8, 16, 24, 1})
    ruling = rule(nodes, (), 0.0, SETTINGS)
    assert [s.scope for s in ruling.opened] == ["rack r0"]
    assert ruling.withheld == {"n0", "n8", "n16", "n24"}


def test_most_of_a_fleet_is_one_suspicion_and_not_one_for_each_rack() -> None:
    ruling = rule(silence(fleet(64, 8), set(range(40))), (), 0.0, SETTINGS)
    assert [s.scope for s in ruling.opened] == ["fleet"]


def test_nodes_without_a_rack_are_no_domain() -> None:
    nodes = [WatchedNode(f"n{i}", "", silent=i < 5) for i in range(30)]
    assert suspect_observer(nodes, SETTINGS) == ()


def test_a_suspicion_ends_when_everybody_reports_again() -> None:
    nodes = fleet(10, 1)
    held = hold(silence(nodes, {0, 1, 2, 3, 4}))
    ruling = rule(nodes, held, 1.0, SETTINGS)
    assert ruling.standing == ()
    assert [ended.resolution for ended in ruling.ended] == ["all 5 nodes report again"]


def test_those_that_come_back_late_get_their_time_and_the_rest_is_then_judged_as_always() -> None:
    nodes = fleet(10, 1)
    held = hold(silence(nodes, set(range(8))))
    one_left = silence(nodes, {3})
    calm = rule(one_left, held, 100.0, SETTINGS)
    assert calm.withheld == {"n3"}
    waiting = rule(one_left, calm.standing, 100.0 + SETTINGS.settle_seconds - 0.1, SETTINGS)
    assert waiting.withheld == {"n3"}
    over = rule(one_left, waiting.standing, 100.0 + SETTINGS.settle_seconds, SETTINGS)
    assert over.withheld == frozenset()
    assert over.ended[0].resolution == "7 of 8 nodes report again; 1 do not"


def test_a_suspicion_stands_as_long_as_the_silence_and_takes_in_who_falls_silent_later() -> None:
    nodes = fleet(10, 1)
    held = hold(silence(nodes, {0, 1, 2}))
    later = rule(silence(nodes, {0, 1, 2, 3, 4}), held, 1e6, SETTINGS)
    assert later.opened == ()
    assert later.withheld == {"n0", "n1", "n2", "n3", "n4"}
    assert later.standing[0].node_ids == later.withheld


def test_a_rack_swallowed_by_a_larger_silence_stands_with_it() -> None:
    nodes = fleet(40, 10)
    held = hold(silence(nodes, {0, 10, 20}))
    assert [one.scope for one in held] == ["rack r0"]
    wider = silence(nodes, set(range(30)))
    ruling = rule(wider, held, 0.0, SETTINGS)
    ruling = rule(wider, [*ruling.standing, *hold(wider)], 1e6, SETTINGS)
    assert ruling.ended == ()
    assert len(ruling.withheld) == 30


GONE = frozenset({"a", "b", "c", "d"})


def reach(**seen: tuple[int, int]) -> dict[str, Reach]:
    return {name: Reach(*pair) for name, pair in seen.items()}


def test_gateways_that_reach_others_but_none_of_these_confirm() -> None:
    said = reach(a=(2, 2), b=(1, 1), e=(3, 0))
    assert "none of the 3 replicas on 2 of these nodes" in is_confirmed_by_gateways(GONE, said)


def test_gateways_confirm_nothing_while_they_reach_one_of_them_or_nobody_at_all() -> None:
    assert not is_confirmed_by_gateways(GONE, reach(a=(2, 2), b=(2, 1), e=(3, 0)))
    assert not is_confirmed_by_gateways(GONE, reach(a=(2, 2), b=(1, 1), e=(3, 3)))
    assert not is_confirmed_by_gateways(GONE, reach(e=(3, 0)))
    assert not is_confirmed_by_gateways(GONE, reach(a=(2, 2), e=(3, 0)))
