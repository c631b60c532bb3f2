"""One simulated rollout from its seed to its end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.policy import RolloutPolicy, read_policy
from tests.fakes.rollout_faults import CALM_SECONDS, FULL_DISK, NO_TRAFFIC, QUORUM_LOST, Trouble
from tests.fakes.rollout_fleet import RolloutFleet
from tests.fakes.rollout_records import NEW, OLD, machines
from tests.fakes.rollout_rules import END_STATE, ENDED, ENDS, names_what
from tests.fakes.rollout_world import ENDED_STATUSES, RolloutWorld

REPLICAS_EACH = 12
LONGEST_SECONDS = CALM_SECONDS + 12 * 3600
LONGEST_LACKING_SECONDS = 4 * 3600
"""What never mends may never end, and has said so by then, where nothing of it went on for a while."""
QUIET_SECONDS = 3600
LOOK_AT_ALL_EVERY = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that is drawn before it begins."""

    seed: int
    domains: int
    nodes_each: int
    spare: int
    """Places of each node that are free."""
    standbys: int
    policy: RolloutPolicy
    bad: str
    bad_from: int
    lacking: str
    room: int
    """Free places of the whole fleet, in hundredths of its nodes."""
    names_racks: bool = True
    longest_seconds: int = LONGEST_SECONDS

    @classmethod
    def drawn(cls, seed: int, *, domains: int, nodes_each: int) -> Scenario:
        """Draw one from its seed, the same in every run."""
        chance = random.Random(f"scenario {seed}")  # noqa: S311 - drawn anew the same in every run
        spare = chance.choice((0, 0, 1))
        policy = {
            "max_surge": chance.choice(("5%", "10%")) if spare else "0",
            "max_unavailable": chance.choice(("0", "2%", "5%") if spare else ("3%", "5%", "10%", "20%")),
            "canary": chance.choice(("1", "4", "1%")),
            "growth": chance.choice((["5%", "100%"], ["1%", "10%", "100%"])),
            "approve_waves": chance.choice(([], [], [], [2], [3, 5])),
            "canary_soak_seconds": chance.choice((0, 60, 300)),
            "soak_seconds": chance.choice((0, 30, 60)),
            "sessions_wait_seconds": chance.choice((0, 30)),
            "min_requests": chance.choice((0, 20, 20, 60)),
            "data_deadline_seconds": 600,
            "prewarm_seconds": 900,
            "on_failure": chance.choice(("roll_back", "roll_back", "roll_back", "halt")),
        }
        return cls(
            seed=seed,
            domains=domains,
            nodes_each=nodes_each,
            spare=spare,
            standbys=chance.choice((0, 0, domains)),
            policy=read_policy(policy),
            bad=chance.choice(("",) * 5 + ("crash", "hang", "error", "slow", "spoilt")),
            names_racks=chance.random() < 0.8,
            bad_from=chance.choice((0, 0, 2, 4)),
            room=chance.choice((5, 20, 75, 75)),
            lacking=chance.choice(("",) * 12 + (NO_TRAFFIC, FULL_DISK, QUORUM_LOST)),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it."""

    scenario: Scenario
    status: str
    why: str
    broken: dict[str, list[str]]
    faults: Counter[str]
    outcomes: Counter[str]
    seconds: int
    looks: int
    waves: int
    worst_missing: int
    worst_own: int
    wanted: int
    unavailable: int
    picture: str

    def figures(self) -> dict[str, object]:
        """What a summary of many is made from."""
        return {
            "status": self.status,
            "bad": self.scenario.bad,
            "lacking": self.scenario.lacking,
            "broken": sorted(self.broken),
            "faults": dict(self.faults),
            "outcomes": dict(self.outcomes),
            "hours": self.seconds / 3600,
            "waves": self.waves,
            "worst_missing_ratio": self.worst_missing / self.wanted,
            "worst_own_ratio": self.worst_own / self.wanted,
            "over_promised": self.worst_own > self.unavailable,
        }

    def told(self) -> str:
        """What was broken, for who reads a failed test."""
        rules = "\n".join(f"- {rule}:\n    " + "\n    ".join(told) for rule, told in self.broken.items())
        return f"seed {self.scenario.seed}: {self.scenario}\n{rules}\n{self.picture}\n{dict(self.faults)}"


def build(scenario: Scenario) -> tuple[RolloutWorld, Trouble]:
    """The world as it is when the rollout begins, and what will befall it."""
    chance = random.Random(f"world {scenario.seed}")  # noqa: S311 - drawn anew the same in every run
    slots = REPLICAS_EACH + scenario.spare
    nodes = machines(scenario.domains, scenario.nodes_each, slots, named=scenario.names_racks)
    spare = len(nodes) * scenario.room * REPLICAS_EACH // 1200 + 1
    wanted = len(nodes) * slots - spare - scenario.standbys
    fleet = RolloutFleet(chance, nodes, wanted, scenario.standbys)
    world = RolloutWorld(chance, fleet, scenario.policy, bad=scenario.bad, bad_from=scenario.bad_from)
    return world, Trouble(world, chance, scenario.lacking)


def run(scenario: Scenario) -> Run:
    """Run one to its end, and a little beyond."""
    world, trouble = build(scenario)
    looks = 0
    while world.status not in ENDED_STATUSES and not trouble.is_over:
        if world.fleet.now_seconds > scenario.longest_seconds or (scenario.lacking and is_stuck(world)):
            break
        looks += 1
        live_on(world, trouble, looks)
    judge_end(world, trouble)
    if world.status in ENDED_STATUSES:
        stays_ended(world, trouble)
    return Run(
        scenario,
        world.status,
        world.why,
        {rule: told for rule, told in world.rules.broken.items() if told},
        trouble.done,
        world.outcomes,
        world.fleet.now_seconds,
        looks,
        len(world.waves),
        world.rules.worst_missing,
        world.rules.worst_own,
        world.fleet.wanted,
        world.unavailable,
        world.picture(),
    )


def is_stuck(world: RolloutWorld) -> bool:
    """Whether it has gone on for long, and its wave has not gone on lately: then it says what it lacks."""
    latest = max((wave.since for wave in world.waves), default=world.now)
    quiet_seconds = (world.now - latest).total_seconds()
    return world.fleet.now_seconds > LONGEST_LACKING_SECONDS and quiet_seconds > QUIET_SECONDS


def live_on(world: RolloutWorld, trouble: Trouble, looks: int) -> None:
    """One moment: something breaks, agents act, the deployment is planned, the rollout looks."""
    chance = world.chance
    trouble.strike()
    world.tick(chance.choice((2, 5, 20, 30, 30)))
    if chance.random() < 0.95:
        world.fleet.reconcile()
    if not trouble.control() and world.fleet.is_at_rest:
        world.tick(30)
    world.rules.look(world)
    if looks % LOOK_AT_ALL_EVERY == 0:
        world.rules.look_at_all(world)


def judge_end(world: RolloutWorld, trouble: Trouble) -> None:
    """It ended as it says, or says what it lacks."""
    rules, releases = world.rules, world.releases()
    rules.look_at_all(world)
    if world.status in ENDED_STATUSES:
        expected = NEW if world.status == states.DONE else OLD
        if set(releases) != {expected}:
            rules.say(END_STATE, world, f"{world.status} with {dict(releases)}")
        # That answers are slow or fail shows to those who ask, and a policy may want no answers.
        is_hidden = trouble.lacking == NO_TRAFFIC and world.bad in {"error", "slow"}
        if world.bad and world.status == states.DONE and world.fleet.bad and not is_hidden:
            rules.say(END_STATE, world, f"done with a release that is bad: {world.bad}")
        if not world.bad and world.status == states.ROLLED_BACK and not trouble.by_person:
            rules.say(END_STATE, world, f"a good release was turned back: {world.why}")
        return
    told = world.why if world.status == states.HALTED else world.waits_for
    if not trouble.lacking and not world.bad:
        rules.say(ENDS, world, f"it is {world.status}: {told}")
    if not names_what(told):
        rules.say(ENDS, world, f"it is {world.status} and does not say what it lacks: {told!r}")


def stays_ended(world: RolloutWorld, trouble: Trouble) -> None:
    """Whatever comes after the end changes nothing of it."""
    status = world.status
    if allowed := trouble.ask_of_ended():
        world.rules.say(ENDED, world, f"people may still {', '.join(allowed)}")
    for _ in range(4):
        world.tick(20)
        world.fleet.reconcile()
        look = world.look()
        if look.actions:
            world.rules.say(ENDED, world, f"more is done: {look.actions[:2]}")
        world.carry_out(look)
    if world.status != status:
        world.rules.say(ENDED, world, f"{status} became {world.status}")
