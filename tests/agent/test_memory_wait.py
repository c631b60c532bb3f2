"""A launch waits for memory that is seen to be free: who is in the way, and what is nobody's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.node import make_spec
from workers.agent.facts import Held, ModelCheck, Policy, ReplicaFacts
from workers.agent.foreign import MemoryLook
from workers.agent.memory import Occupant, Room, Tenant, Whose, describe, find_shortage, tenant_of
from workers.agent.memory_gate import HostMemory, MemoryGate, OnNode
from workers.agent.supervisor import CheckModel, Decision, Launch, plan
from workers.probes.devices import CardMemory
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ModelFile, ModelRef, ReplicaSpec, WantedState

GIB = 1 << 30
CARD = AcceleratorInfo(uuid="GPU-1", kind="cuda", name="H", memory_bytes=80 * GIB)
MODEL = ModelRef(
    name="m",
    digest="d",
    source="file:///m",
    files=(
        ModelFile(path="a.safetensors", size_bytes=16 * GIB, sha256="0" * 64),
        ModelFile(path="tokenizer.json", size_bytes=1, sha256="0" * 64),
    ),
)


def spec_of(replica_id: str = "new", gibibytes: int = 60, **changes: object) -> ReplicaSpec:
    return make_spec(
        replica_id, accelerator_uuids=("GPU-1",), memory_bytes=gibibytes * GIB, model=MODEL, **changes
    )


def stranger(pid: int, gibibytes: int) -> Occupant:
    return Occupant("GPU-1", pid, gibibytes * GIB, Whose.STRANGER, command="python")


def replica(replica_id: str, gibibytes: int | None) -> Occupant:
    size = None if gibibytes is None else gibibytes * GIB
    return Occupant("GPU-1", 900, size, Whose.REPLICA, replica_id)


def holder(gibibytes: int | None) -> Occupant:
    size = None if gibibytes is None else gibibytes * GIB
    return Occupant("GPU-1", 800, size, Whose.HOLDER)


def tenant(replica_id: str, gibibytes: int, *, ready: bool = True, digest: str = "other") -> Tenant:
    return Tenant(replica_id, gibibytes * GIB, 16 * GIB, digest, ready)


def room(used: int, *occupants: Occupant, tenants: tuple[Tenant, ...] = (), shares: bool = False) -> Room:
    return Room("GPU-1", 80 * GIB, used * GIB, tenants, occupants, shares)


# -- who is in the way ----------------------------------------------------------------------------------
def test_memory_that_a_dead_replica_has_yet_to_give_back_is_waited_for_and_blamed_on_no_process() -> None:
    short = find_shortage(spec_of(), room(68))
    assert short is not None
    assert short.stranger_pids == ()
    assert describe(short.wait) == (
        "waiting for memory of GPU-1: 60.0 GiB are needed, 12.0 GiB of 80.0 GiB are free; "
        "68.0 GiB held by no process that is named: not yet given back"
    )
    assert find_shortage(spec_of(), room(12)) is None


def test_replica_that_is_ending_is_named_and_waited_for() -> None:
    short = find_shortage(spec_of(), room(65, replica("old", 65)))
    assert short is not None
    assert short.stranger_pids == ()
    assert "65.0 GiB held by replica old (pid 900), which is ending" in describe(short.wait)


def test_strangers_are_named_by_pid_only_where_nothing_else_could_make_room() -> None:
    kept_out = find_shortage(spec_of(), room(70, stranger(7, 40), stranger(5, 30)))
    assert kept_out is not None
    assert kept_out.stranger_pids == (5, 7)
    assert "40.0 GiB held by pid 7 (python, not ours)" in describe(kept_out.wait)
    # What is ours and ends would make room: the fleet need not help.
    helped = find_shortage(spec_of(), room(70, stranger(7, 10), replica("old", 60)))
    assert helped is not None
    assert helped.stranger_pids == ()


def test_memory_beside_somebody_is_enough_and_need_is_counted_for_each_accelerator() -> None:
    assert find_shortage(spec_of(), room(20, stranger(7, 20))) is None
    two = make_spec("r", accelerator_uuids=("GPU-1", "GPU-2"), memory_bytes=120 * GIB)
    assert find_shortage(two, room(20)) is None
    assert find_shortage(two, room(22)) is not None


def test_what_starts_has_yet_to_take_its_memory_and_what_is_ready_has_taken_it() -> None:
    starting = room(10, replica("other", 10), tenants=(tenant("other", 40, ready=False),))
    assert find_shortage(spec_of(gibibytes=50), starting) is not None
    assert find_shortage(spec_of(gibibytes=40), starting) is None
    ready = room(10, replica("other", 10), tenants=(tenant("other", 40),))
    assert find_shortage(spec_of(gibibytes=60), ready) is None


@pytest.mark.parametrize("seen", [replica("other", None), None], ids=["without a size", "not named"])
def test_memory_of_a_starting_replica_is_not_counted_twice_where_the_tool_does_not_size_it(
    seen: Occupant | None,
) -> None:
    occupants = () if seen is None else (seen,)
    view = room(40, *occupants, tenants=(tenant("other", 40, ready=False),))
    assert find_shortage(spec_of(gibibytes=40), view) is None


def test_replica_that_has_more_than_it_is_promised_is_named() -> None:
    short = find_shortage(spec_of(), room(30, replica("greedy", 30), tenants=(tenant("greedy", 20),)))
    assert short is not None
    assert "30.0 GiB held by replica greedy, more than it is promised" in describe(short.wait)
    assert short.stranger_pids == ()


# -- memory that replicas share ---------------------------------------------------------------------------
def test_weights_that_are_there_already_are_needed_from_nobody() -> None:
    # 16 GiB of weights and 24 of KV of the first one; the second needs 24 more, of 26 that are free.
    view = room(54, holder(40), stranger(5, 14), tenants=(tenant("first", 40, digest="d"),), shares=True)
    assert find_shortage(spec_of(gibibytes=40), view) is None
    assert find_shortage(spec_of(gibibytes=40), replace(view, shares=False)) is not None


def test_blocks_that_neighbours_borrowed_of_a_replicas_own_share_come_back_and_are_not_waited_for() -> None:
    # Two replicas of 30 GiB; one died, and the other has borrowed all that its pool lends: 16 + 14 + 14.
    view = room(74, holder(44), stranger(5, 30), tenants=(tenant("other", 30, digest="d"),), shares=True)
    assert find_shortage(spec_of(gibibytes=30), view) is None


def test_holder_whose_memory_the_tool_does_not_size_is_no_reason_to_wait_longer() -> None:
    view = room(20, holder(None), tenants=(tenant("other", 30, ready=False, digest="d"),), shares=True)
    assert find_shortage(spec_of(gibibytes=30), view) is None


@given(need=st.integers(1, 80), used=st.integers(0, 80), more=st.integers(0, 20), known=st.integers(0, 80))
def test_more_memory_in_use_never_makes_a_launch_possible(
    need: int, used: int, more: int, known: int
) -> None:
    occupants = (stranger(3, min(known, used)),)
    before = find_shortage(spec_of(gibibytes=need), room(used, *occupants))
    after = find_shortage(spec_of(gibibytes=need), room(min(80, used + more), *occupants))
    assert before is None or after is not None
    if before is not None:
        assert before.wait.needed_bytes > before.wait.free_bytes
        assert before.wait.free_bytes <= 80 * GIB - used * GIB


def test_tenant_shares_no_more_weights_than_it_claims() -> None:
    assert tenant_of(spec_of(gibibytes=60), ready=True).weights_bytes == 16 * GIB
    assert tenant_of(spec_of(gibibytes=4), ready=True).weights_bytes == 4 * GIB


# -- how long, and on what evidence -----------------------------------------------------------------------
@dataclass
class Source:
    """Looks at memory when told to."""

    memory: MemoryLook = field(default_factory=MemoryLook)
    asked: int = 0

    def ask_memory(self) -> None:
        self.asked += 1

    def see(self, now: float, *occupants: Occupant, cards: Mapping[str, CardMemory]) -> None:
        self.memory = MemoryLook(now, cards, occupants)


@dataclass
class World:
    """One node with a card of 80 GiB, and its clock."""

    now: float = 100.0
    cards: Mapping[str, CardMemory] = field(default_factory=dict)
    source: Source = field(default_factory=Source)
    node: OnNode = field(default_factory=lambda: OnNode((CARD,), ()))
    host: HostMemory | None = None

    def __post_init__(self) -> None:
        self.gate = MemoryGate(
            self.source, lambda: self.node, 90.0, host=lambda: self.host, clock=lambda: self.now
        )

    def use(self, gibibytes: int, *occupants: Occupant) -> None:
        self.source.see(self.now, *occupants, cards={"GPU-1": CardMemory(80 * GIB, gibibytes * GIB)})

    def ask(self, spec: ReplicaSpec) -> Held | None:
        """As the reconcile loop does: twice a second."""
        self.now += 0.5
        return self.gate.held(spec)


def test_no_launch_goes_by_a_look_from_before_it_was_wanted() -> None:
    world = World()
    world.use(0)
    held = world.ask(spec_of())
    assert held is not None
    assert (held.wait, world.source.asked) == (None, 1)
    assert "looked at before it is launched" in held.text
    world.use(0)
    assert world.ask(spec_of()) is None


def test_wait_says_its_figures_and_ends_when_memory_is_seen_free() -> None:
    world = World()
    world.ask(spec_of())
    for _ in range(60):
        world.use(68)
        held = world.ask(spec_of())
        assert held is not None
    assert held.wait is not None
    assert (held.pids, held.wait.at_most_seconds) == ((), 90.0)
    assert held.wait.waited_seconds == pytest.approx(29.5)
    world.use(1)
    assert world.ask(spec_of()) is None
    assert world.gate.notes == {}


def test_wait_that_nobody_can_explain_ends_at_its_deadline_and_the_launch_says_so() -> None:
    world = World()
    world.ask(spec_of())
    waits = 0
    for _ in range(400):
        world.use(68)
        if world.ask(spec_of()) is None:
            break
        waits += 1
    assert waits == 180  # at twice a second
    assert "launched after 90 s all the same" in world.gate.notes["new"]
    assert "12.0 GiB of 80.0 GiB are free" in world.gate.notes["new"]


def test_strangers_keep_a_launch_out_for_as_long_as_they_stay() -> None:
    world = World()
    world.ask(spec_of())
    for _ in range(400):
        world.use(70, stranger(7, 70))
        held = world.ask(spec_of())
        assert held is not None
    assert held.pids == (7,)
    assert held.wait is not None
    assert held.wait.at_most_seconds is None


def test_what_cannot_be_seen_is_not_waited_for_and_said() -> None:
    world = World()
    assert world.ask(spec_of()) is not None
    world.source.see(world.now, cards={})
    assert world.ask(spec_of()) is None
    assert "the memory of GPU-1 cannot be seen" in world.gate.notes["new"]
    silent = World()
    asked = [silent.ask(spec_of()) is not None for _ in range(80)]
    assert asked == [True] * 61 + [False] * 19
    assert "no answer in time" in silent.gate.notes["new"]


def test_launches_of_one_round_are_not_given_the_same_memory() -> None:
    world = World()
    first, second = spec_of("a", 50), spec_of("b", 50)
    world.ask(first)
    world.ask(second)
    world.use(20)
    assert world.ask(first) is None
    world.node = OnNode((CARD,), ((first, False),))
    assert world.ask(second) is not None


def test_cpu_launch_waits_for_what_the_machine_has_left_within_the_deadline() -> None:
    cpu = AcceleratorInfo(uuid="CPU-n", kind="cpu", name="cpu", memory_bytes=20 * GIB)
    spec = make_spec("r", accelerator_uuids=("CPU-n",), memory_bytes=8 * GIB, model=MODEL)
    world = World(node=OnNode((cpu,), ()), host=HostMemory(24 * GIB, 6 * GIB))
    held = world.ask(spec)
    assert held is not None
    assert held.text == "waiting for memory of host: 8.0 GiB are needed, 6.0 GiB of 24.0 GiB are free"
    assert world.source.asked == 0
    world.host = HostMemory(24 * GIB, 9 * GIB)
    assert world.ask(spec) is None
    world.host = None
    assert world.ask(spec) is None


def test_nothing_is_looked_at_for_what_claims_nothing_or_is_not_to_run() -> None:
    world = World(host=HostMemory(24 * GIB, 0))
    assert world.ask(spec_of(gibibytes=0)) is None
    assert world.ask(spec_of(wanted=WantedState.STOP)) is None
    assert world.source.asked == 0


# -- what the plan makes of it ------------------------------------------------------------------------------
def decide(facts: ReplicaFacts) -> Decision:
    (decision,) = plan([facts], wish_known=True, now=1000.0, policy=Policy())
    return decision


def test_wait_burns_no_attempt_and_readies_the_model_meanwhile() -> None:
    short = find_shortage(spec_of(), room(70, stranger(7, 70)))
    assert short is not None
    held = Held(short.stranger_pids, describe(short.wait), short.wait)
    found = ReplicaFacts("new", spec_of(), generation=1, model=ModelCheck.GOOD, held=held)
    decision = decide(found)
    assert (decision.state, decision.held_by_pids, decision.actions) == (ObservedState.WAITING, (7,), ())
    assert decision.memory_wait == short.wait
    assert [type(a) for a in decide(replace(found, model=ModelCheck.UNKNOWN)).actions] == [CheckModel]
    (launch,) = decide(replace(found, held=None, memory_note="launched all the same")).actions
    assert isinstance(launch, Launch)
    assert launch.why == "wanted and not running; launched all the same"
