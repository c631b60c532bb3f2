"""What a rollout does next: one look at everything, and the actions that follow. Pure.

The same look gives the same actions, and each action is harmless when it is done twice, so any controller
may die between two of them and another one goes on from the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.actions import (
    Action,
    AddWaves,
    Leave,
    LetGo,
    MoveRollout,
    MoveWave,
    NoteGates,
    Roll,
    Stay,
    Wait,
)
from exaserve_ops.rollouts.domain.gates import closed_reason, judge, missing_data
from exaserve_ops.rollouts.domain.making_way import Direction, make_way
from exaserve_ops.rollouts.domain.policy import HALT
from exaserve_ops.rollouts.domain.view import IN_PLACE, SURGE, RolloutView, Seat, WaveState
from exaserve_ops.rollouts.domain.waves import is_lone_node
from exaserve_ops.serving.domain.lifecycle import BACKING_OFF, LOADING, PENDING, PLACED, STARTING

NEW = "the new release"
OLD = "the old release"
_STARTING = frozenset({STARTING, LOADING, BACKING_OFF})
_NOTHING_RUNS = "healing put replicas of the old release in its place: others try the new one"


def decide(view: RolloutView, now: datetime) -> list[Action]:
    """Return the actions to take now, in their order."""
    if view.deployment_ends:
        return [MoveRollout("abandon", "its deployment is being deleted")]
    if view.status == states.RUNNING:
        return _forward(view, now)
    if view.status == states.ROLLING_BACK:
        return _back(view, now)
    if view.status in {states.PAUSED, states.HALTED}:
        return _stand_still(view)
    return []


# -- forward -----------------------------------------------------------------------------------------
def _forward(view: RolloutView, now: datetime) -> list[Action]:
    wave = view.wave
    if wave is None:
        if view.kept(view.old_release):
            return [AddWaves("replicas of the old release were made or moved meanwhile")]
        if any(not seat.is_ready for seat in view.kept(view.new_release)):
            return [Wait(f"not ready: {', '.join(view.health().not_ready[:3])}")]
        return [MoveRollout("finish", "every replica runs the new release")]
    step = {
        states.WAITING: _open,
        states.PREWARMING: _prewarm,
        states.MOVING: _move,
        states.SOAKING: _soak,
        states.FAILED: _failed,
    }[wave.status]
    return step(view, wave, now)


def _open(view: RolloutView, wave: WaveState, now: datetime) -> list[Action]:
    if wave.needs_approval:
        return [MoveRollout("hold", f"wave {wave.number} begins when somebody lets it")]
    if view.frozen:
        return [Wait(f"healing is frozen: {view.frozen}")]
    old = sorted(
        (s for s in view.kept(view.old_release) if wave.covers(s.domain)),
        key=lambda s: (not s.serves, s.active_sessions, s.name),
    )
    # Where nothing came of the canary, the next wave is the first to try the release, and as small.
    most = wave.planned if view.kept(view.new_release) else min(wave.planned, view.waves[0].planned)
    members = tuple(seat.replica_id for seat in old[:most])
    mode = SURGE if view.surge and view.has_surge_room else IN_PLACE
    if mode == IN_PLACE and not view.unavailable:
        return [_without_room(view, now)]
    return [MoveWave(wave.number, "open", f"{len(members)} in {wave.domain}", members, mode)]


def _without_room(view: RolloutView, now: datetime) -> Action:
    """Nodes come back, and others end; but not for ever."""
    why = "there is no room for one more replica, and none of those that serve may be missing"
    since = max([view.running_since, *(wave.since for wave in view.waves if wave.status == states.PASSED)])
    if now - since < timedelta(seconds=view.move_seconds):
        return Wait(why)
    return MoveRollout("halt", f"{why}, for {view.move_seconds:.0f} s")


def _prewarm(view: RolloutView, wave: WaveState, now: datetime) -> list[Action]:
    own = frozenset(wave.members)
    left = [seat for seat in view.kept(view.old_release) if seat.replica_id in own]
    if not left:
        return [MoveWave(wave.number, "pass", "nothing of it is left to make way")]
    if spoilt := view.weights.spoilt:
        # No node is to blame and no wait mends it, so it is the release that is turned back.
        reason = f"weights are spoilt: {_by_node(spoilt)}"
        return [MoveWave(wave.number, "fail", reason), *_on_failure(view, reason)]
    # A node that is away gets no weights, and what follows its replicas starts elsewhere.
    nodes = {seat.node_name for seat in left if seat.node_alive}
    unready = {node: why for node, why in view.weights.unready.items() if node in nodes}
    if not unready:
        return [MoveWave(wave.number, "begin", "weights can be read on its nodes")]
    told = _by_node(unready)
    if now - wave.since >= timedelta(seconds=view.policy.prewarm_seconds):
        return [MoveRollout("halt", f"weights are not on all nodes of wave {wave.number} in time: {told}")]
    return [Wait(f"weights are brought to {len(unready)} nodes: {told}")]


def _by_node(reasons: Mapping[str, str], most: int = 3) -> str:
    return "; ".join(f"{node}: {why}" for node, why in sorted(reasons.items())[:most])


def _move(view: RolloutView, wave: WaveState, now: datetime) -> list[Action]:
    gates = judge(view.new_answers, view.old_answers, view.health(), view.policy)
    noted: list[Action] = [NoteGates(wave.number, gates)]
    if reason := closed_reason(gates):
        return [*noted, MoveWave(wave.number, "fail", reason), *_on_failure(view, reason)]
    own = frozenset(wave.members)
    members = [seat for seat in view.seats if seat.replica_id in own]
    direction = Direction(view.old_release, view.new_release, wave.mode, NEW)
    actions = make_way(view, members, direction, now) if not view.frozen else []
    if not actions and view.frozen:
        actions = [Wait(f"healing is frozen: {view.frozen}")]
    if not actions and (why := _unfinished(view, members)):
        actions = [Wait(why)]
    if not actions and not view.kept(view.new_release):
        return [*noted, MoveWave(wave.number, "reopen", _NOTHING_RUNS)]
    if not actions:
        return [*noted, MoveWave(wave.number, "soak", "all of it runs the new release")]
    if now - _moved_at(view, wave) >= timedelta(seconds=view.move_seconds) and not view.frozen:
        return [*noted, *_too_late(view, wave, actions, now)]
    return [*noted, *actions]


def _moved_at(view: RolloutView, wave: WaveState) -> datetime:
    """When a wave came on last: with less room than may be used it takes longer, which is no fault."""
    came = [s.since for s in view.kept(view.new_release) if s.is_ready and s.since is not None]
    return max([wave.since, *came])


def _unfinished(view: RolloutView, members: Sequence[Seat]) -> str:
    """What is still to come before a wave is moved; empty where nothing is."""
    ending = [seat.name for seat in members if not seat.is_gone]
    if ending:
        return f"not stopped yet: {', '.join(ending[:3])}"
    unready = view.health().not_ready
    return f"not ready: {', '.join(unready[:3])}" if unready else ""


def _too_late(view: RolloutView, wave: WaveState, actions: Sequence[Action], now: datetime) -> list[Action]:
    """A wave that does not come on: one that starts without end speaks against the release, nothing else."""
    told = f"nothing of wave {wave.number} has moved for {view.move_seconds:.0f} s"
    stuck = [s for s in view.kept(view.new_release) if _starts_without_end(s, view, now)]
    if stuck:
        reason = f"{told}: {', '.join(f'{s.name} {s.state}' for s in stuck[:3])}"
        return [MoveWave(wave.number, "fail", reason), *_on_failure(view, reason)]
    waits = [action.why for action in actions if isinstance(action, Wait | Roll | Leave | LetGo)]
    homeless = [s for s in view.kept(view.new_release) if s.status in {PENDING, PLACED}]
    names = "; ".join(f"{s.name}: {s.reason or s.status}" for s in homeless[:3])
    return [MoveRollout("halt", f"{told}: {names or waits[-1]}")]


def _starts_without_end(seat: Seat, view: RolloutView, now: datetime) -> bool:
    if seat.is_ready or seat.since is None or not seat.node_alive or seat.status not in _STARTING:
        return False
    return now - seat.since >= timedelta(seconds=view.start_seconds)


def _soak(view: RolloutView, wave: WaveState, now: datetime) -> list[Action]:
    gates = judge(view.new_answers, view.old_answers, view.health(), view.policy)
    noted: list[Action] = [NoteGates(wave.number, gates)]
    if reason := closed_reason(gates):
        return [*noted, MoveWave(wave.number, "fail", reason), *_on_failure(view, reason)]
    if not view.kept(view.new_release):
        return [*noted, MoveWave(wave.number, "reopen", _NOTHING_RUNS)]
    lasted = now - wave.since
    if lasted < timedelta(seconds=wave.soak_seconds):
        left = wave.soak_seconds - lasted.total_seconds()
        return [*noted, Wait(f"watched for {left:.0f} s more")]
    missing = missing_data(gates)
    if not missing:
        return [*noted, MoveWave(wave.number, "pass", "every gate is open")]
    deadline = max(view.policy.data_deadline_seconds, wave.soak_seconds)
    if lasted >= timedelta(seconds=deadline):
        return [*noted, MoveRollout("halt", f"not enough is known after {deadline} s: {missing}")]
    return [*noted, Wait(f"not enough is known: {missing}")]


def _failed(view: RolloutView, wave: WaveState, _now: datetime) -> list[Action]:
    """Somebody had a halted rollout go on; else a controller died before it could halt or turn back."""
    if view.running_since > wave.since:
        return [MoveWave(wave.number, "retry", "somebody lets it go on")]
    return _on_failure(view, f"wave {wave.number} failed: {wave.why}")


def _on_failure(view: RolloutView, reason: str) -> list[Action]:
    event = "halt" if view.policy.on_failure == HALT else "roll_back"
    return [MoveRollout(event, reason)]


# -- standing still, and back ------------------------------------------------------------------------
def _stand_still(view: RolloutView) -> list[Action]:
    """What has not begun to make way does not begin; pairs that are under way both serve on."""
    covered = {seat.replaces for seat in view.seats if seat.is_wanted}
    undone = tuple(
        seat.replica_id
        for seat in view.kept(view.old_release)
        if (seat.rolls_to or seat.leaving_since is not None) and seat.replica_id not in covered
    )
    return [Stay(undone, "the rollout stands still")] if undone else []


def _back(view: RolloutView, now: datetime) -> list[Action]:
    actions: list[Action] = []
    kept_old = view.kept(view.old_release)
    staying = tuple(s.replica_id for s in kept_old if s.rolls_to or s.leaving_since is not None)
    if staying:
        actions.append(Stay(staying, "the rollout goes back"))
    new = view.kept(view.new_release)
    if not new:
        unready = [seat.name for seat in kept_old if not seat.is_ready]
        ending = [s.name for s in view.seats if s.release == view.new_release and not s.is_gone]
        waits = [*(f"{name} is not ready" for name in unready), *(f"{name} ends" for name in ending)]
        if waits:
            return [*actions, Wait(", ".join(waits[:3]))]
        return [*actions, MoveRollout("finish_back", "every replica runs the old release again")]
    # Those whose predecessor still serves are simply one too many: they go as soon as they are marked.
    still_there = {seat.replica_id for seat in kept_old}
    surplus = tuple(s.replica_id for s in new if not s.rolls_to and s.replaces in still_there)
    if surplus:
        actions.append(Roll(surplus, view.old_release, in_place=False, why="go back to the old release"))
    mode = SURGE if view.surge and (view.has_surge_room or _is_doubled(view, new)) else IN_PLACE
    direction = Direction(view.new_release, view.old_release, mode, OLD)
    domains = _domains_under_way(view, new, still_there)
    replaced = {seat.replaces for seat in view.seats if seat.is_wanted}
    members = [
        s for s in new if s.domain in domains and (s.replaces not in still_there or s.replica_id in replaced)
    ]
    actions += make_way(view, members, direction, now) if members else []
    return actions or [Wait(_kept_for_now(view, new))]


def _kept_for_now(view: RolloutView, new: Sequence[Seat]) -> str:
    """Why replicas that are marked to go are still there: their deployment lacks others."""
    names = ", ".join(seat.name for seat in new[:3])
    return f"{names} go once others serve: {view.missing} of {view.wanted} replicas are missing"


def _is_doubled(view: RolloutView, new: Sequence[Seat]) -> bool:
    """Whether successors run beside replicas that make way: they took the room, and are not undone for it."""
    replaced = {seat.replaces for seat in view.seats if seat.is_wanted}
    return any(s.rolls_to and not s.in_place and s.is_ready and s.replica_id in replaced for s in new)


def _domains_under_way(
    view: RolloutView, new: Sequence[Seat], still_there: Collection[str]
) -> Collection[str]:
    """One domain goes back after the other; the one that began is finished first.

    Nodes of which no rack is known go together, as they came. What serves nobody, or beside its
    predecessor, may go anywhere: it is not missed.
    """
    begun = Counter(
        s.domain
        for s in new
        if s.is_ready and (s.rolls_to or s.leaving_since is not None) and s.replaces not in still_there
    )
    sizes = Counter(s.domain for s in new)
    first, *others = sorted(sizes, key=lambda domain: (-begun[domain], domain))
    chosen, size = [first], sizes[first]
    width = max(view.surge, view.unavailable)
    for domain in others if is_lone_node(first) else ():
        if is_lone_node(domain) and (begun[domain] or size + sizes[domain] <= width):
            chosen.append(domain)
            size += sizes[domain]
    return chosen
