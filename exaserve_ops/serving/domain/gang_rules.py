"""How a replica over several nodes is started, watched and ended as one. Pure.

Its members are launched together, once for each start of the whole, and starts are counted: the epoch. No
part is ever started again by itself. Between two starts all nodes are told to stop, and the next one begins
only when each has said that nothing of the last is left: so ranks of two starts never meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from exaserve_ops.serving.domain import lifecycle as states

RUN = "run"
DRAIN = "drain"
STOP = "stop"

HEAD = 0
"""Number of the member that has the rendezvous and answers HTTP."""

_ENDED = frozenset({states.FAILED, states.BACKING_OFF, states.STOPPED})
"""What an agent says of a member whose process ended."""
_LEVELS = {states.STARTING: 1, states.STOPPING: 1, states.DRAINING: 1, states.LOADING: 2, states.READY: 3}
"""How far a member is; what is not here has not been launched."""
_TOLD = 4
"""Members that ended whose reasons are told."""
_SEEN = {0: "seen_waiting", 1: "seen_starting", 2: "seen_loading", 3: "seen_ready"}


@dataclass(frozen=True, slots=True)
class GangPolicy:
    """How patient the leader is: as agents are with replicas on one node."""

    backoff_base_seconds: float = 0.5
    backoff_cap_seconds: float = 60.0
    crash_limit: int = 6
    """Starts that end in a row, after which it is given up."""
    stable_seconds: float = 30.0
    """Ready for this long, and earlier crashes are forgotten."""
    grace_seconds: float = 30.0
    """Beside the deployment's time to start: for words to get to all nodes and back."""

    def backoff_seconds(self, crashes: int) -> float:
        """Pause after so many crashes in a row: doubles each time, up to the cap."""
        doublings = min(max(0, crashes - 1), 32)
        return min(self.backoff_cap_seconds, self.backoff_base_seconds * float(2**doublings))


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One member, as its agent said last."""

    number: int
    node_name: str
    state: str = ""
    """Empty: nothing was said of it yet."""
    epoch: int = 0
    generation: int = 0
    """Of the wish that its agent had when it said so."""
    reason: str = ""
    node_dead: bool = False
    has_weights: bool = True
    """What it starts from is on its node."""
    ended: bool = False
    """It was let go, and nothing of it is left."""
    problem: str = ""
    """Why its agent cannot run a part of anything now; empty where it can."""


@dataclass(frozen=True, slots=True)
class GangFacts:
    """A replica over several nodes, as recorded."""

    status: str
    wanted: str
    generation: int
    members: tuple[MemberFacts, ...]
    epoch: int = 0
    """Of the newest start; 0: there was none."""
    began_at: datetime | None = None
    """When that start began; `None`: it is over, or there was none."""
    ready_by: datetime | None = None
    """When all members must be ready at the latest."""
    ready_at: datetime | None = None
    """When all were ready last."""
    retry_at: datetime | None = None
    """When the next start may begin; `None`: none is to follow one that has ended."""
    crashes: int = 0
    """Starts in a row that ended by themselves."""
    start_seconds: float = 300.0
    may_start: bool = True
    """It is its turn."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Have all members launched, with the next epoch."""

    ready_by: datetime
    why: str


@dataclass(frozen=True, slots=True)
class BackOff:
    """The start has ended: all are told to stop, and the next one follows after a pause."""

    why: str
    crashes: int
    retry_at: datetime


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Too many starts have ended: all are told to stop, and it is left to healing."""

    why: str
    crashes: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Its status becomes what its members show; an empty event: only the reason is new."""

    event: str
    why: str
    ready_by: datetime | None = None
    """Another time until which all must be ready; `None`: as it was."""


@dataclass(frozen=True, slots=True)
class StopRest:
    """It was being drained, and a part of it is gone: the rest serves nobody."""

    why: str


GangStep = Begin | BackOff | GiveUp | Follow | StopRest


def order_of(number: int, *, wanted: str, hands_over: bool, began: bool, head_ended: bool) -> str:
    """What a member's node is told to do: run, drain or stop.

    While the head ends its open requests the others have to run; they stop when it has ended.
    """
    if wanted == RUN:
        return RUN if began else STOP
    if wanted == STOP:
        return STOP
    if hands_over:
        return RUN
    if number == HEAD:
        return DRAIN
    return STOP if head_ended else RUN


def plan_gang_step(facts: GangFacts, *, now: datetime, policy: GangPolicy | None = None) -> GangStep | None:
    """Return what is to be done now; `None`: nothing, or nothing yet.

    While a member's node is dead nothing is: whether the whole is lost is for healing to say, which knows
    how much of the fleet is gone.
    """
    policy = policy or GangPolicy()
    if facts.status in (states.PENDING, states.STOPPED):
        return None
    if facts.wanted != RUN:
        return _end(facts)
    if any(member.node_dead for member in facts.members):
        return None
    if facts.began_at is None:
        return _next_start(facts, now, policy)
    return _follow(facts, now, policy)


def _end(facts: GangFacts) -> GangStep | None:
    if all(member.ended for member in facts.members):
        return _move(facts, "seen_stopped", "")
    if facts.wanted != DRAIN:
        return None
    head_ended = facts.members[HEAD].ended
    for member in facts.members:
        if member.node_dead:
            return StopRest(f"{_named(member, facts)}: its node is dead")
        if not member.ended and not head_ended and _has_ended(member, facts):
            return StopRest(_with_reason(member, facts))
    return _move(facts, "seen_stopping", "its head has ended, the others follow") if head_ended else None


def _next_start(facts: GangFacts, now: datetime, policy: GangPolicy) -> GangStep | None:
    """No start is under way: what the next one waits for, or its beginning."""
    given_up = facts.epoch > 0 and facts.retry_at is None
    if not facts.may_start or given_up or (facts.retry_at is not None and now < facts.retry_at):
        return None
    left = [member for member in facts.members if facts.epoch and not _is_gone(member, facts)]
    if left:
        return Follow("", f"start {facts.epoch} must be gone first: {_with_reason(left[0], facts)}")
    unable = _unable(facts)
    if unable:
        return Follow("", unable[0])
    lacking = [member.node_name for member in facts.members if not member.has_weights]
    if lacking:
        return Follow("", f"waits for weights on {', '.join(lacking)}")
    count = len(facts.members)
    return Begin(now + _limit(facts, policy), f"start {facts.epoch + 1} of the whole, on {count} nodes")


def _follow(facts: GangFacts, now: datetime, policy: GangPolicy) -> GangStep | None:
    """A start is under way: all are ready, or one is the last, or one has ended it."""
    ended = _unable(facts) or [_with_reason(one, facts) for one in facts.members if _has_ended(one, facts)]
    if ended:
        # The one that is to blame may not be the first: the others end because it has.
        return _crash(facts, "; ".join(ended[:_TOLD]), now, policy)
    last = min(facts.members, key=lambda member: (_level(member, facts), member.number))
    levels = [_level(member, facts) for member in facts.members]
    why = _with_reason(last, facts) if _is_current(last, facts) else _not_heard(last, facts)
    if min(levels) == _LEVELS[states.READY]:
        return _move(facts, "seen_ready", "")
    # Where one is launched the whole has begun, though others may still wait.
    event = _SEEN[max(min(levels), min(1, max(levels)))]
    if facts.status in (states.READY, states.UNREACHABLE):
        return Follow(event, why, now + _limit(facts, policy))
    if facts.ready_by is not None and now >= facts.ready_by:
        seconds = (now - (facts.began_at or now)).total_seconds()
        return _crash(facts, f"not all ready after {seconds:.0f} s: {why}", now, policy)
    return _move(facts, event, why)


def _crash(facts: GangFacts, why: str, now: datetime, policy: GangPolicy) -> GangStep:
    stable = timedelta(seconds=policy.stable_seconds)
    began, ready = facts.began_at, facts.ready_at
    was_stable = began is not None and ready is not None and began <= ready <= now - stable
    crashes = 1 if was_stable else facts.crashes + 1
    why = f"start {facts.epoch}: {why}"
    if crashes >= policy.crash_limit:
        return GiveUp(f"ended {crashes} times in a row, given up: {why}", crashes)
    pause = timedelta(seconds=policy.backoff_seconds(crashes))
    return BackOff(f"crash {crashes} of {policy.crash_limit}: {why}", crashes, now + pause)


def _move(facts: GangFacts, event: str, why: str) -> Follow | None:
    """The event where it changes the status, else the reason alone."""
    if states.REPLICA.allows(facts.status, event):
        return Follow(event, why)
    return Follow("", why) if why else None


def _limit(facts: GangFacts, policy: GangPolicy) -> timedelta:
    return timedelta(seconds=facts.start_seconds + policy.grace_seconds)


def _is_current(member: MemberFacts, facts: GangFacts) -> bool:
    """Whether what was said of it is about the start that is under way."""
    return member.epoch == facts.epoch and member.generation >= facts.generation


def _has_ended(member: MemberFacts, facts: GangFacts) -> bool:
    return _is_current(member, facts) and member.state in _ENDED


def _is_gone(member: MemberFacts, facts: GangFacts) -> bool:
    """Whether its node has said, knowing that it is to stop, that nothing of it is left."""
    return member.state == states.STOPPED and member.generation >= facts.generation


def _level(member: MemberFacts, facts: GangFacts) -> int:
    return _LEVELS.get(member.state, 0) if _is_current(member, facts) else 0


def _unable(facts: GangFacts) -> list[str]:
    """Members whose agents were put back to one that knows no members."""
    return [f"{_named(member, facts)}: {member.problem}" for member in facts.members if member.problem]


def _named(member: MemberFacts, facts: GangFacts) -> str:
    return f"node {member.node_name}, member {member.number} of {len(facts.members)}"


def _with_reason(member: MemberFacts, facts: GangFacts) -> str:
    said = member.reason or member.state.replace("_", " ") or "nothing heard of it yet"
    return f"{_named(member, facts)}: {said}"


def _not_heard(member: MemberFacts, facts: GangFacts) -> str:
    """What its agent said last is of an earlier start, or of an older wish: no reason of this one."""
    return f"{_named(member, facts)}: nothing heard of start {facts.epoch} yet"
