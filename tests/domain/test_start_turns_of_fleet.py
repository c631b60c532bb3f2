"""Whose turn it is to start: limits hold at every moment, nobody waits for ever, and all start in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.starts import (
    Starter,
    StartFacts,
    StartLimits,
    StartNode,
    StartPlan,
    WeightsAtHand,
    cause_of,
    plan_starts,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FREE = StartLimits(per_node=0, per_fleet=0, from_origins=0, in_place=0, per_rack=0)


def starter(name: str, node: str = "n0", **changes: object) -> Starter:
    """A replica with a place, its weights on its node's disk, that waits for its turn."""
    one = Starter(
        id=name,
        name=name,
        deployment="chat",
        node_id=node,
        revision="w",
        status=states.PLACED,
        status_since=NOW,
        waits_since=NOW,
    )
    return replace(one, **changes)  # type: ignore[arg-type]  # the test's own names


def starting(name: str, node: str = "n0", **changes: object) -> Starter:
    told = {"waits_since": None, "allowed_at": NOW, "status": states.LOADING}
    return starter(name, node, **(told | changes))


def facts(
    starters: Iterable[Starter],
    limits: StartLimits = FREE,
    *,
    weights: WeightsAtHand | None = None,
    ready: Mapping[str, int] | None = None,
    racks: int = 2,
    swarms: bool = True,
) -> StartFacts:
    starters = tuple(starters)
    names = sorted({one.node_id for one in starters})
    at_hand = weights or WeightsAtHand(here=frozenset(one.source for one in starters))
    return StartFacts(
        starters=starters,
        nodes={n: StartNode(n, f"rack-{int(n[1:]) % racks}", swarms=swarms) for n in names},
        weights=at_hand,
        ready=ready or {},
        limits=limits,
    )


def reasons(plan: StartPlan) -> dict[str, str]:
    return {one.replica_id: one.why for one in plan.waits}


def test_single_replica_starts_at_once_on_a_quiet_fleet() -> None:
    plan = plan_starts(facts([starter("a")], StartLimits()), now=NOW)
    assert (plan.go, plan.waits) == (("a",), ())


def test_node_and_fleet_limits_say_who_is_in_the_way() -> None:
    two = [starter("a"), starter("b"), starting("x"), starting("y")]
    plan = plan_starts(facts(two, replace(FREE, per_node=2)), now=NOW)
    assert plan.go == ()
    assert reasons(plan) == dict.fromkeys("ab", "waits its turn: 2 of 2 start on n0")
    apart = [starter("a", "n1"), starter("b", "n2"), starting("x", "n3")]
    plan = plan_starts(facts(apart, replace(FREE, per_fleet=2)), now=NOW)
    assert plan.go == ("a",)
    assert reasons(plan) == {"b": "waits its turn: 2 of 2 start in the fleet"}


def test_one_that_finds_no_room_on_its_node_lets_those_behind_it_pass() -> None:
    plan = plan_starts(
        facts([starter("a"), starter("b", "n1"), starting("x")], replace(FREE, per_node=1)), now=NOW
    )
    assert plan.go == ("b",)


def test_nodes_that_pass_weights_on_fetch_together_and_count_once_at_the_origin() -> None:
    ones = [starter(f"r{n}", f"n{n}") for n in range(6)]
    plan = plan_starts(facts(ones, replace(FREE, from_origins=1), weights=WeightsAtHand()), now=NOW)
    assert len(plan.go) == 6
    other = starter("z", "n0", revision="other")
    plan = plan_starts(facts([*ones, other], replace(FREE, from_origins=1), weights=WeightsAtHand()), now=NOW)
    assert reasons(plan) == {
        "z": "waits for weights: 1 of 1 fetch from an origin; who has them seeds the next"
    }
    seeded = WeightsAtHand(seeded=frozenset({"other"}))
    plan = plan_starts(facts([*ones, other], replace(FREE, from_origins=1), weights=seeded), now=NOW)
    assert "z" in plan.go, "somebody has them and passes them on: no origin is asked"


def test_nodes_that_fetch_by_themselves_each_count_at_the_origin() -> None:
    ones = [starter(f"r{n}", f"n{n}") for n in range(6)]
    alone = facts(ones, replace(FREE, from_origins=2), weights=WeightsAtHand(), swarms=False)
    plan = plan_starts(alone, now=NOW)
    assert len(plan.go) == 2
    assert set(reasons(plan).values()) == {"waits for weights: 2 of 2 fetch from an origin"}


def test_replicas_of_a_node_share_one_fetch() -> None:
    ones = [starter(f"r{n}", "n0") for n in range(3)]
    plan = plan_starts(
        facts(ones, replace(FREE, from_origins=1), weights=WeightsAtHand(), swarms=False), now=NOW
    )
    assert len(plan.go) == 3


def test_what_others_fetch_already_counts_whoever_asked_for_it() -> None:
    busy = WeightsAtHand(fetching=frozenset({("n1", "other")}))
    ones = [starter("a", "n0"), starting("x", "n1", revision="w")]
    plan = plan_starts(facts(ones, replace(FREE, from_origins=2), weights=busy, swarms=False), now=NOW)
    assert reasons(plan) == {"a": "waits for weights: 2 of 2 fetch from an origin"}


def test_nodes_of_a_rack_that_fetch_and_nodes_that_read_in_place_are_bounded() -> None:
    ones = [starter(f"r{n}", f"n{2 * n}") for n in range(3)]  # all in rack-0
    plan = plan_starts(facts(ones, replace(FREE, per_rack=2), weights=WeightsAtHand()), now=NOW)
    assert reasons(plan) == {"r2": "waits for weights: 2 of 2 nodes of rack-0 fetch"}
    mounted = [replace(one, in_place=True) for one in ones]
    plan = plan_starts(facts(mounted, replace(FREE, in_place=2), weights=WeightsAtHand()), now=NOW)
    assert reasons(plan) == {"r2": "waits for weights: 2 of 2 nodes read theirs in place"}
    warm = WeightsAtHand(here=frozenset({("n4", "w")}))
    plan = plan_starts(facts(mounted, replace(FREE, in_place=2), weights=warm), now=NOW)
    assert len(plan.go) == 3, "a replica there has read them"


def test_each_reason_has_a_cause_that_others_share() -> None:
    limits = {
        "per_node": "others on their node to start",
        "per_fleet": "others in the fleet to start",
        "from_origins": "others to have fetched from an origin",
        "per_rack": "others in their rack to have fetched",
    }
    ones = [starter("a"), starting("x", revision="other"), starting("y", "n2", revision="other")]
    for name in ("per_node", "per_fleet", "from_origins"):
        plan = plan_starts(facts(ones, replace(FREE, **{name: 1}), weights=WeightsAtHand()), now=NOW)
        assert cause_of(reasons(plan)["a"]) == limits[name]
    rack = [starter("a"), starting("x", "n2")]
    plan = plan_starts(facts(rack, replace(FREE, per_rack=1), weights=WeightsAtHand()), now=NOW)
    assert cause_of(reasons(plan)["a"]) == limits["per_rack"]
    mounted = [replace(one, in_place=True) for one in rack]
    plan = plan_starts(facts(mounted, replace(FREE, in_place=1), weights=WeightsAtHand()), now=NOW)
    assert cause_of(reasons(plan)["a"]) == "other nodes to read weights in place"
    assert cause_of("n7 is offline") == "their node to come back"
    assert cause_of("on n7: it has most room") == "a decision, within a second or two"


def test_those_with_weights_go_before_those_without() -> None:
    ones = [starter("a", "n0"), starter("b", "n1")]
    here = WeightsAtHand(here=frozenset({("n1", "w")}))
    plan = plan_starts(facts(ones, replace(FREE, per_fleet=1), weights=here), now=NOW)
    assert plan.go == ("b",)


def test_standbys_come_last_and_who_takes_a_place_first() -> None:
    ones = [
        starter("a", standby=True, takes_over=True),
        starter("b"),
        starter("c", takes_over=True),
        starter("d", deployment="small", standby=True),
    ]
    order = []
    left = ones
    while left:
        [name] = plan_starts(facts(left, replace(FREE, per_fleet=1)), now=NOW).go
        order.append(name)
        left = [one for one in left if one.id != name]
    assert order == ["c", "b", "a", "d"]


def test_small_deployment_has_its_turn_beside_a_large_one() -> None:
    many = [starter(f"large-{n:04}", f"n{n}", waits_since=NOW - timedelta(seconds=60)) for n in range(1000)]
    few = [starter(f"small-{n}", f"n{n}", deployment="small") for n in range(2)]
    plan = plan_starts(facts([*many, *few], replace(FREE, per_fleet=6)), now=NOW)
    assert {"small-0", "small-1"} <= set(plan.go)
    served = plan_starts(facts([*many, *few], replace(FREE, per_fleet=2), ready={"small": 50}), now=NOW)
    assert all(name.startswith("large") for name in served.go), "it serves already, the other one does not"


def test_start_that_hangs_gives_its_place_back_when_its_time_is_up() -> None:
    hung = starting("x", start_seconds=100.0)
    limits = replace(FREE, per_node=1)
    before = plan_starts(facts([starter("a"), hung], limits), now=NOW + timedelta(seconds=100))
    after = plan_starts(facts([starter("a"), hung], limits), now=NOW + timedelta(seconds=131))
    assert (before.go, after.go) == ((), ("a",))


def test_fetch_holds_its_place_for_long_and_a_failed_one_does_not() -> None:
    limits = replace(FREE, per_node=1)
    later = NOW + timedelta(minutes=30)
    told = starting("x", status=states.PLACED, revision="big")
    ones = [starter("a"), told]
    fetching = WeightsAtHand(here=frozenset({("n0", "w")}), fetching=frozenset({told.source}))
    assert plan_starts(facts(ones, limits, weights=fetching), now=later).go == ()
    failed = WeightsAtHand(here=frozenset({("n0", "w")}), failed=frozenset({told.source}))
    assert plan_starts(facts(ones, limits, weights=failed), now=later).go == ("a",)
    assert plan_starts(facts(ones, limits, weights=fetching), now=NOW + timedelta(hours=2)).go == ("a",)


def test_what_is_offline_neither_starts_nor_holds_a_place() -> None:
    ones = [starter("a", "n0"), starter("b", "n1"), starting("x", "n1")]
    seen = facts(ones, replace(FREE, per_fleet=1))
    dark = replace(seen, nodes={**seen.nodes, "n1": replace(seen.nodes["n1"], offline=True)})
    plan = plan_starts(dark, now=NOW)
    assert plan.go == ("a",)
    assert reasons(plan) == {"b": "n1 is offline"}
    assert plan.held_up == 0, "it waits for its node and for nobody else"


def test_whoever_waits_too_long_goes_before_all_that_came_later() -> None:
    old = starter("old", standby=True, waits_since=NOW - timedelta(minutes=6))
    urgent = [starter(f"u{n}", takes_over=True) for n in range(5)]
    plan = plan_starts(facts([*urgent, old], replace(FREE, per_fleet=1)), now=NOW)
    assert plan.go == ("old",)


@dataclass
class World:
    """A fleet in virtual time: whoever may start gets its weights, loads, is ready; some hang for ever."""

    starters: dict[str, Starter]
    limits: StartLimits
    swarms: bool
    hangs: frozenset[str] = frozenset()
    fetch_seconds: int = 40
    load_seconds: int = 20
    now: datetime = NOW
    here: set[tuple[str, str]] = field(default_factory=set)
    fetching: dict[tuple[str, str], datetime] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)

    def step(self, seconds: int = 5) -> StartPlan:
        self._live()
        seen = self.facts()
        plan = plan_starts(seen, now=self.now)
        assert len(set(plan.go)) + len(plan.waits) == sum(
            one.waits_since is not None for one in seen.starters
        )
        for name in plan.go:
            self.starters[name] = replace(self.starters[name], waits_since=None, allowed_at=self.now)
        self.check(plan)
        self.now += timedelta(seconds=seconds)
        return plan

    def facts(self) -> StartFacts:
        left = [one for one in self.starters.values() if one.id not in self.ready]
        counts = Counter(self.starters[name].deployment for name in self.ready)
        weights = WeightsAtHand(
            here=frozenset(self.here),
            fetching=frozenset(self.fetching),
            seeded=frozenset(revision for _, revision in self.here),
        )
        return facts(left, self.limits, weights=weights, ready=counts, swarms=self.swarms)

    def check(self, plan: StartPlan) -> None:
        """No limit is exceeded by those that hold their place and those that were let go now."""
        names = [one.id for one in plan.starting] + list(plan.go)
        ones = [self.starters[name] for name in names]
        assert not self.limits.per_fleet or len(ones) <= self.limits.per_fleet
        for count in Counter(one.node_id for one in ones).values():
            assert not self.limits.per_node or count <= self.limits.per_node
        sources = {one.source for one in ones if one.source not in self.here} | set(self.fetching)
        if self.limits.from_origins and not self.swarms:
            assert len(sources) <= self.limits.from_origins
        racks: dict[int, set[str]] = {}
        for node_id, _ in sources:
            racks.setdefault(int(node_id[1:]) % 2, set()).add(node_id)
        for nodes in racks.values():
            assert not self.limits.per_rack or len(nodes) <= self.limits.per_rack

    def _live(self) -> None:
        for source, since in list(self.fetching.items()):
            if (self.now - since).total_seconds() >= self.fetch_seconds:
                del self.fetching[source]
                self.here.add(source)
        for one in list(self.starters.values()):
            if one.waits_since is None and one.id not in self.ready:
                self._go_on(one)

    def _go_on(self, one: Starter) -> None:
        if one.source not in self.here:
            self.fetching.setdefault(one.source, self.now)
        elif one.status == states.PLACED:
            self.starters[one.id] = replace(one, status=states.LOADING, status_since=self.now)
        elif one.id not in self.hangs and (self.now - one.status_since).total_seconds() >= self.load_seconds:
            self.ready.add(one.id)


def fleet(nodes: int, each: int, revisions: Sequence[str] = ("w",)) -> dict[str, Starter]:
    made = {}
    for number in range(nodes * each):
        revision = revisions[number % len(revisions)]
        name = f"r{number:04}"
        made[name] = starter(
            name,
            f"n{number % nodes}",
            revision=revision,
            deployment=revision,
            standby=number % 7 == 6,
            start_seconds=60.0,
        )
    return made


limits_of_all_sorts = st.builds(
    StartLimits,
    per_node=st.integers(0, 4),
    per_fleet=st.integers(0, 12),
    from_origins=st.integers(0, 3),
    in_place=st.just(0),
    per_rack=st.integers(0, 3),
)


@given(
    nodes=st.integers(1, 6),
    each=st.integers(1, 5),
    revisions=st.integers(1, 3),
    limits=limits_of_all_sorts,
    swarms=st.booleans(),
    hangs=st.sets(st.integers(0, 29), max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_limits_are_never_exceeded_and_all_start_in_the_end(
    nodes: int, each: int, revisions: int, limits: StartLimits, *, swarms: bool, hangs: set[int]
) -> None:
    hung = frozenset(f"r{number:04}" for number in hangs)
    starters = fleet(nodes, each, [f"w{n}" for n in range(revisions)])
    world = World(starters, limits, swarms, hung)
    able = starters.keys() - hung
    for _ in range(2000):
        world.step()
        if able <= world.ready:
            break
    assert able <= world.ready
    waiting = [one for one in world.starters.values() if one.waits_since is not None]
    assert not waiting or hung, "all have had their turn"


def test_standby_has_its_turn_although_urgent_ones_never_end() -> None:
    """Replacements keep coming, faster than they start: patience is what puts the standby before them."""
    world = World(
        {"calm": starter("calm", standby=True)}, replace(FREE, per_fleet=1), swarms=True, load_seconds=10
    )
    world.here = {(f"n{n}", "w") for n in range(400)}
    for number in range(200):
        name = f"u{number:04}"
        world.starters[name] = starter(name, f"n{number}", takes_over=True, waits_since=world.now)
        world.step()
        if world.starters["calm"].waits_since is None:
            break
    assert world.starters["calm"].waits_since is None
    assert len(world.ready) >= 10, "the urgent ones went first until then"


def test_plan_does_not_depend_on_the_order_of_the_record() -> None:
    ones = list(fleet(5, 4, ("a", "b")).values())
    limits = StartLimits(per_node=2, per_fleet=7, from_origins=1)
    first = plan_starts(facts(ones, limits, weights=WeightsAtHand()), now=NOW)
    again = plan_starts(facts(ones[::-1], limits, weights=WeightsAtHand()), now=NOW)
    assert (first.go, set(first.waits)) == (again.go, set(again.waits))
