"""What must hold in every rollout: each rule by its name, asked of the world and not of the planner."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.actions import Action, Leave, LetGo, MoveRollout, MoveWave, Roll
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT
from exaserve_ops.rollouts.domain.view import RolloutView, Seat, WaveState
from exaserve_ops.serving.domain.facts import SERVING
from exaserve_ops.serving.domain.lifecycle import READY
from tests.fakes.rollout_records import NEW, OLD, POLICY, Row

if TYPE_CHECKING:
    from tests.fakes.rollout_world import RolloutWorld

ADDS_ONLY_SO_FAR = "takes nobody away once as many are missing as may be, by whatever cause"
FLOOR = "never more missing by its own doing than it promised"
ONE_DOMAIN = "a wave takes replicas away in one failure domain alone"
ONE_DOMAIN_BACK = "on its way back it takes replicas away in one failure domain at a time"
ONE_SUCCESSOR = "never two successors for one replica"
TWO_RELEASES = "never a release other than the old and the new one"
SURGE = "never more replicas beyond the wish than it promised"
WEIGHTS = "old weights stay where they are until the end"
GATES = "no wave is followed by the next before its gates were open"
CANARY = "nothing but the canary makes way before the release was seen to work"
SESSIONS = "sessions leave, or had their time, before their replica goes"
NO_SESSION_LOST = "every session is served by some replica"
STANDS_STILL = "a paused or halted rollout begins nothing"
ENDED = "an ended rollout stays ended"
TWICE = "an action that is done twice is done once"
ENDS = "it ends, or says what it lacks"
END_STATE = "at its end every replica runs the release it says"

SAFETY = (
    *(ADDS_ONLY_SO_FAR, FLOOR, ONE_DOMAIN, ONE_DOMAIN_BACK, ONE_SUCCESSOR, TWO_RELEASES, SURGE, WEIGHTS),
    *(GATES, CANARY, SESSIONS, NO_SESSION_LOST, STANDS_STILL, ENDED, TWICE),
)
LIVENESS = (ENDS, END_STATE)
RULES = (*SAFETY, *LIVENESS)

_NAMES_WHAT = re.compile(
    r"\bn\d\d-\d\d\d\b|\br\d{6}\b|answers that a verdict needs|are missing|no room|given up"
    r"|requests failed|TTFT|spoilt"
)
"""A replica, a node, or what else is lacking."""


@dataclass
class Rules:
    """Keeps what was broken, and goes on."""

    broken: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    worst_missing: int = 0
    """Most that were missing at a time, by whatever cause."""
    worst_own: int = 0
    """Most that were missing at a time by the rollout's own doing."""
    _places: dict[str, Row] = field(default_factory=dict)
    """Who serves, or is to serve, in place of each one that was taken away: open ones."""
    _is_proven: bool = False
    """Whether a wave has passed its gates."""
    _domains: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def say(self, rule: str, world: RolloutWorld, told: str) -> None:
        """Note that a rule was broken."""
        if len(self.broken[rule]) < 3:
            self.broken[rule].append(f"at {world.fleet.now_seconds} s: {told}")

    # -- before each action ----------------------------------------------------------------------------
    def before(self, world: RolloutWorld, view: RolloutView, action: Action) -> None:
        """Ask about an action that is about to be carried out."""
        match action:
            case Roll() | Leave() | LetGo():
                if world.status == view.status:  # else it is refused
                    self._before_replicas(world, view, action)
            case MoveWave(event="pass"):
                self._before_pass(world, view, world.waves[action.number - 1])
            case MoveWave(event="open"):
                self._before_open(world, world.waves[action.number - 1], action)
            case MoveRollout() if world.status in ROLLOUT.final:
                self.say(ENDED, world, f"{action.event} of one that is {world.status}")

    def _before_replicas(self, world: RolloutWorld, view: RolloutView, action: Roll | Leave | LetGo) -> None:
        if world.status not in {states.RUNNING, states.ROLLING_BACK}:
            self.say(STANDS_STILL, world, f"{type(action).__name__} while {world.status}")
        if isinstance(action, Roll) and action.release not in {OLD, NEW}:
            self.say(TWO_RELEASES, world, f"rolls to {action.release}")
        rows = [world.fleet.rows[key] for key in action.replica_ids if key in world.fleet.rows]
        serving = [row for row in rows if row.answers and row.machine is not None]
        self._ask_for_domains(world, serving)
        takes_away = not isinstance(action, Roll) or action.in_place
        if takes_away and world.status == states.ROLLING_BACK:
            self._ask_for_way_back(world, view, serving)
        if isinstance(action, LetGo) or (isinstance(action, Roll) and action.in_place):
            self._ask_for_sessions(world, view, serving)
        if isinstance(action, Roll) and action.in_place:
            self._ask_for_missing(world, view, action)

    def _ask_for_domains(self, world: RolloutWorld, serving: list[Row]) -> None:
        wave = world.wave
        if world.status == states.RUNNING and wave is not None:
            self._domains[wave.number] |= {_domain(row) for row in serving if row.release == OLD}
            touched = self._domains[wave.number]
            if len(touched) > 1 and not _stand_together(world, touched, wave):
                self.say(ONE_DOMAIN, world, f"wave {wave.number}: {sorted(touched)}")

    def _ask_for_way_back(self, world: RolloutWorld, view: RolloutView, serving: list[Row]) -> None:
        """Who is left now, or goes first, is where others are left, or nobody is.

        One beside which a successor is started may be anywhere: it serves on.
        """
        kept = {row.id for row in world.fleet.rows.values() if row.is_kept and row.release == OLD}
        seats = [seat for seat in view.seats if _serves(seat) and seat.release == NEW]
        begun = {s.domain for s in seats if (s.in_place or s.leaving_since) and s.replaces not in kept}
        fresh = [row for row in serving if not row.in_place and row.leaving_since is None]
        taken = {_domain(row) for row in fresh if row.release == NEW and row.replaces not in kept}
        domains = taken | begun
        if taken and len(domains) > 1 and not _stand_together(world, domains):
            self.say(ONE_DOMAIN_BACK, world, f"{sorted(domains)}")

    def _ask_for_sessions(self, world: RolloutWorld, view: RolloutView, serving: list[Row]) -> None:
        seats = {seat.replica_id: seat for seat in view.seats}
        for row in serving:
            seat = seats[row.id]
            if not seat.serves:
                continue
            waited = 0.0 if seat.leaving_since is None else (world.now - seat.leaving_since).total_seconds()
            patience = view.policy.sessions_wait_seconds
            if seat.leaving_since is None or (seat.sessions_left and waited < patience):
                told = f"{row.id} goes with {seat.sessions_left} sessions after {waited:.0f} of {patience} s"
                self.say(SESSIONS, world, told)

    def _ask_for_missing(self, world: RolloutWorld, view: RolloutView, action: Roll) -> None:
        """By what the controller saw: it adds to what is missing by whatever cause only so far."""
        serving = [seat for seat in view.seats if _serves(seat)]
        missing = max(0, view.wanted - len(serving))
        taken = sum(seat.in_place or seat.replica_id in action.replica_ids for seat in serving)
        if taken and missing + taken > world.unavailable:
            told = f"{missing} are missing, {taken} more are taken, {world.unavailable} may be"
            self.say(ADDS_ONLY_SO_FAR, world, told)

    def _before_pass(self, world: RolloutWorld, view: RolloutView, wave: WaveState) -> None:
        """The gates, asked anew of what the controller saw."""
        if wave.status != states.SOAKING:
            left = [key for key in wave.members if key in world.fleet.rows]
            if any(world.fleet.rows[key].wanted == "run" for key in left):
                self.say(GATES, world, f"wave {wave.number} passes while some of it are left")
            return
        for why in self._closed(world, view, wave):
            self.say(GATES, world, f"wave {wave.number} passes: {why}")
        self._is_proven = True

    def _closed(self, world: RolloutWorld, view: RolloutView, wave: WaveState) -> list[str]:
        new = [seat for seat in view.seats if seat.release == NEW and seat.is_wanted]
        answers = view.new_answers
        soak = world.policy.canary_soak_seconds if wave.number == 1 else world.policy.soak_seconds
        found = []
        if not new:
            found.append("nothing runs the new release")
        if (world.now - wave.since).total_seconds() < soak:
            found.append(f"not watched for {soak} s")
        if any(seat.status != READY or not seat.node_alive for seat in new):
            found.append("some of the new release are not ready")
        if answers.requests < world.policy.min_requests:
            found.append(f"{answers.requests} of {world.policy.min_requests} answers")
        if world.fleet.bad in {"error", "slow"} and answers.requests >= max(40, world.policy.min_requests):
            found.append(f"the release is bad: {world.fleet.bad}")
        return found

    def _before_open(self, world: RolloutWorld, wave: WaveState, action: MoveWave) -> None:
        if any(earlier.status != states.PASSED for earlier in world.waves[: wave.number - 1]):
            self.say(GATES, world, f"wave {wave.number} opens before those ahead of it have passed")
        if wave.needs_approval:
            self.say(GATES, world, f"wave {wave.number} opens without the approval that it needs")
        if not self._is_proven and len(action.members) > world.canary:
            self.say(CANARY, world, f"wave {wave.number} opens with {len(action.members)}")

    def after_twice(self, world: RolloutWorld, action: Action, before: object, after: object) -> None:
        """Ask whether the second time changed anything."""
        if before != after:
            self.say(TWICE, world, f"{type(action).__name__}: {before} became {after}")

    # -- after each moment -----------------------------------------------------------------------------
    def look(self, world: RolloutWorld) -> None:
        """Ask about how things stand."""
        fleet = world.fleet
        took_away = bool(fleet.given_way)
        for row in fleet.given_way:
            self._places[row.id] = row
        fleet.given_way.clear()
        self._follow_places(world)
        missing = max(0, fleet.wanted - fleet.answering[OLD] - fleet.answering[NEW])
        self.worst_missing = max(self.worst_missing, missing)
        # While others serve beyond the wish, such as those that take the place of a node that is emptied,
        # what was taken away is not missing.
        own = min(missing, len(self._places))
        self.worst_own = max(self.worst_own, own)
        # Of what was taken away a part may be made up for by such others; which part, only the moment tells
        # in which somebody goes: what faults take later is not its doing.
        if took_away and own > world.unavailable:
            open_ones = ", ".join(list(self._places)[:6])
            told = f"{len(self._places)} were taken away ({open_ones}), {world.unavailable} may be"
            self.say(FLOOR, world, told)
        self._look_at_successors(world)
        if world.status not in ROLLOUT.final:
            lost = [one for one in fleet.evicted if one[2] == OLD]
            if lost:
                self.say(WEIGHTS, world, f"gone from {lost[0][1]}")
        fleet.evicted.clear()

    def _follow_places(self, world: RolloutWorld) -> None:
        """A place is filled once one that serves in it was ready, or a fault struck who was to."""
        for key, row in list(self._places.items()):
            head = row
            while successors := world.fleet.successors_of(head):
                head = successors[0]
            struck = any(
                one.machine is not None
                and (not one.machine.alive or one.machine.silent_seconds or one.machine.draining)
                for one in (row, head)
            )
            is_over = head.wanted != "run" and head is not row
            if head.answers or head.role != SERVING or struck or is_over or head.id in world.fleet.ended:
                del self._places[key]

    def _look_at_successors(self, world: RolloutWorld) -> None:
        replaced = Counter(r.replaces for r in world.fleet.rows.values() if r.replaces and r.wanted == "run")
        twice = [key for key, count in replaced.items() if count > 1 and key in world.fleet.rows]
        if twice:
            self.say(ONE_SUCCESSOR, world, f"{twice[:3]}")

    def look_at_all(self, world: RolloutWorld) -> None:
        """Ask what takes a look at every replica: now and then, and at the end."""
        fleet = world.fleet
        rows = list(fleet.rows.values())
        others = {row.release for row in rows} - {OLD, NEW}
        if others:
            self.say(TWO_RELEASES, world, f"{others}")
        held = sum(row.sessions for row in rows)
        if held != fleet.sessions:
            self.say(NO_SESSION_LOST, world, f"{held} of {fleet.sessions} are served")
        kept = [row for row in rows if row.is_kept and row.status not in {"unreachable", "failed", "pending"}]
        most = fleet.wanted + fleet.standbys + world.surge + POLICY.surge(fleet.wanted)
        if len(kept) > most:
            self.say(SURGE, world, f"{len(kept)} run, {most} may")


def _domain(row: Row) -> str:
    room = row.machine.room if row.machine is not None else None
    return room.domain if room is not None else ""


def _stand_together(world: RolloutWorld, domains: set[str], wave: WaveState | None = None) -> bool:
    """Whether these are nodes of which no rack is known, no more of them than make way at once."""
    if any(world.fleet.by_name[name.removeprefix("node ")].rack for name in domains if name[:5] == "node "):
        return False
    if wave is not None:
        own = sum(other.planned for other in world.waves if other.domains == wave.domains)
        return domains <= set(wave.domains) and own <= world.width
    held = [row for row in world.fleet.rows.values() if _domain(row) in domains and row.answers]
    going = [row for row in held if row.rolls_to or row.leaving_since is not None]
    return all(name.startswith("node ") for name in domains) and len(going) <= 2 * world.width


def _serves(seat: Seat) -> bool:
    return seat.is_ready and seat.serves


def names_what(why: str) -> bool:
    """Whether a reason names a replica, a node, or what else is lacking."""
    return bool(_NAMES_WHAT.search(why))
