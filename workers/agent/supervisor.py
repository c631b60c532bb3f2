"""What to do next for each replica: a pure function of the wish, the facts and the time.

Nothing here starts, stops or reads anything. Times are monotonic seconds of this boot of the
machine. Safety before liveness: an attempt is only ever launched while no attempt of the replica
is open, and one is closed only when no process of it is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from workers.agent.facts import (
    Action,
    AttemptFacts,
    BeginDrain,
    CheckModel,
    Close,
    Decision,
    Ending,
    ForgetCrashes,
    Held,
    Kill,
    Launch,
    ModelCheck,
    Policy,
    Probe,
    ReplicaFacts,
    RequestState,
    SetSleep,
    SleepFacts,
    Terminate,
)
from workers.agent.members import is_follower, lacks_head, spent, why_alone, why_outdated, why_spent
from workers.agent.sleep import follow_sleep
from workers.agent.turns import take_turns
from workers.protocol.engines.sleeping import ASLEEP, AWAKE
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ReplicaSpec, WantedState

__all__ = [
    "Action",
    "AttemptFacts",
    "BeginDrain",
    "CheckModel",
    "Close",
    "Decision",
    "Ending",
    "ForgetCrashes",
    "Kill",
    "Launch",
    "ModelCheck",
    "Policy",
    "Probe",
    "ReplicaFacts",
    "RequestState",
    "SetSleep",
    "SleepFacts",
    "Terminate",
    "launch_digest",
    "merge_wish",
    "plan",
]


def launch_digest(spec: ReplicaSpec) -> str:
    """Digest of all in a wish that a running engine cannot change; another one means a relaunch."""
    parts = (
        spec.model,
        spec.engine,
        spec.engine_options,
        spec.accelerator_uuids,
        spec.memory_bytes,
        # Left out where there is none, so that what ran before there were such shares stays what it is.
        *((spec.mps,) if spec.mps is not None else ()),
    )
    body = msgspec.json.encode(parts, order="deterministic")
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def merge_wish(known: Iterable[ReplicaSpec], wanted: Iterable[ReplicaSpec]) -> tuple[ReplicaSpec, ...]:
    """The new wish, in which no replica falls back to an older generation or start than is known."""
    newest = {spec.replica_id: spec for spec in known}
    merged = {}
    for spec in wanted:
        before = newest.get(spec.replica_id)
        merged[spec.replica_id] = before if before and _age(before) > _age(spec) else spec
    return tuple(merged[key] for key in sorted(merged))


def _age(spec: ReplicaSpec) -> tuple[int, int]:
    return spec.generation, spec.member.epoch if spec.member else 0


def plan(
    replicas: Iterable[ReplicaFacts], *, wish_known: bool, now: float, policy: Policy
) -> tuple[Decision, ...]:
    """Decide for every replica, each on its own but for the turns of those that start; ordered by id.

    Until a wish is known, nothing is stopped for not being in it.
    """
    ordered = sorted(replicas, key=lambda facts: facts.replica_id)
    decisions = [_plan_one(facts, wish_known, now, policy) for facts in ordered]
    return take_turns(decisions, ordered, at_once=policy.starts_at_once)


def _plan_one(
    facts: ReplicaFacts,
    wish_known: bool,  # noqa: FBT001 - private, and handed through by position
    now: float,
    policy: Policy,
) -> Decision:
    attempt = facts.attempt
    if attempt is None:
        return _plan_idle(facts, now, policy)
    if not attempt.pids:
        return _close(facts, attempt, now, policy)
    if attempt.engine_ended or attempt.term_sent_at_seconds is not None:
        return _finish_off(facts, attempt, now, policy)
    if facts.spec is not None:
        return _follow_wish(facts, attempt, facts.spec, now, policy)
    if wish_known:
        return _terminate(facts, attempt, "not wanted on this node any more")
    return _watch(facts, attempt, "no wish received yet; left alone")


def _follow_wish(
    facts: ReplicaFacts, attempt: AttemptFacts, spec: ReplicaSpec, now: float, policy: Policy
) -> Decision:
    outdated = why_outdated(spec.member, attempt)
    if outdated:
        return _terminate(facts, attempt, outdated)
    if is_follower(spec) and spec.wanted is not WantedState.STOP:
        return _follow_head(facts, attempt, spec, now, policy)
    match spec.wanted:
        case WantedState.STOP:
            return _terminate(facts, attempt, "stop was asked for")
        case WantedState.DRAIN:
            return _drain(facts, attempt, spec, now, policy)
        case WantedState.RUN:
            if attempt.launch_digest != launch_digest(spec):
                return _drain(facts, attempt, spec, now, policy)
            return _keep_running(facts, attempt, spec, now, policy)


def _follow_head(
    facts: ReplicaFacts, attempt: AttemptFacts, spec: ReplicaSpec, now: float, policy: Policy
) -> Decision:
    """A member runs for as long as its head does; only the head is drained."""
    alone = why_alone(attempt, spec, now, policy)
    if alone:
        return _terminate(facts, attempt, alone, blames_engine=spec.wanted is WantedState.RUN)
    if spec.wanted is WantedState.DRAIN:
        return Decision(facts.replica_id, ObservedState.DRAINING, "runs until its head has drained")
    if attempt.probe is Probe.READY:
        return _watch(facts, attempt, "")
    reason = f"waits for its head: {attempt.probe_reason or 'not asked yet'}"
    return Decision(facts.replica_id, ObservedState.LOADING, reason)


def _keep_running(
    facts: ReplicaFacts, attempt: AttemptFacts, spec: ReplicaSpec, now: float, policy: Policy
) -> Decision:
    late = now - attempt.launched_at_seconds > spec.start_seconds
    if attempt.ready_at_seconds is None and late:
        why = f"not ready after {spec.start_seconds:g} s"
        return _terminate(facts, attempt, why, blames_engine=True)
    # First: what sleeps is asked nothing, and neither its health nor its counters tell anything.
    sleeping = (
        follow_sleep(facts, attempt, spec, now, policy) if attempt.ready_at_seconds is not None else None
    )
    if sleeping is not None:
        return _forget_crashes(sleeping, facts, attempt, now, policy)
    if attempt.probe is Probe.DEAD:
        return _terminate(facts, attempt, f"dead: {attempt.probe_reason}", blames_engine=True)
    if _has_stalled(attempt, spec, policy):
        return _end_stalled(facts, attempt)
    return _forget_crashes(_watch(facts, attempt, ""), facts, attempt, now, policy)


def _forget_crashes(
    decision: Decision, facts: ReplicaFacts, attempt: AttemptFacts, now: float, policy: Policy
) -> Decision:
    """Add that earlier crashes count no more: not on the way into sleep or out of it, which may end badly."""
    stays = not decision.actions and attempt.sleep.state in (AWAKE, ASLEEP)
    if not (stays and facts.crashes and _is_stable(attempt, now, policy)):
        return decision
    # Written down now, not at its end: a reboot of the machine leaves no time to tell by.
    why = f"ready for {policy.stable_seconds:g} s"
    return replace(decision, actions=(ForgetCrashes(facts.replica_id, attempt.attempt, why),))


def _is_stable(attempt: AttemptFacts, now: float, policy: Policy) -> bool:
    ready_at = attempt.ready_at_seconds
    return ready_at is not None and now - ready_at >= policy.stable_seconds


def _has_stalled(attempt: AttemptFacts, spec: ReplicaSpec, policy: Policy) -> bool:
    """Whether nothing has moved for longer than may be; the first token may take longer than others."""
    if spec.stall_seconds <= 0 or attempt.ready_at_seconds is None:
        return False
    limit = spec.stall_seconds
    if not attempt.has_generated:
        limit = max(policy.first_token_seconds, policy.first_token_factor * limit)
    return attempt.still_seconds >= limit


def _end_stalled(facts: ReplicaFacts, attempt: AttemptFacts) -> Decision:
    """No grace: what stands still does not end its open requests either."""
    why = f"stalled: {attempt.still_text} for {attempt.still_seconds:.0f} s"
    end = Terminate(facts.replica_id, attempt.attempt, why, blames_engine=True, stalled=True)
    kill = Kill(facts.replica_id, attempt.attempt, why)
    return Decision(facts.replica_id, ObservedState.STOPPING, why, (end, kill), stalled=True)


def _watch(facts: ReplicaFacts, attempt: AttemptFacts, reason: str) -> Decision:
    states = {
        Probe.CLOSED: ObservedState.STARTING,
        Probe.LOADING: ObservedState.LOADING,
        Probe.READY: ObservedState.READY,
        Probe.UNREACHABLE: ObservedState.LOADING,
        Probe.DEAD: ObservedState.LOADING,
    }
    return Decision(facts.replica_id, states[attempt.probe], reason or attempt.probe_reason)


def _drain(
    facts: ReplicaFacts, attempt: AttemptFacts, spec: ReplicaSpec, now: float, policy: Policy
) -> Decision:
    goal = "relaunch with the new wish" if spec.wanted is WantedState.RUN else "stop"
    if attempt.ready_at_seconds is None:
        return _terminate(facts, attempt, f"{goal}: never was ready, so nothing is open")
    if attempt.sleep.state != AWAKE:
        return _terminate(facts, attempt, f"{goal}: asleep, so nothing is open")
    if attempt.drain_since_seconds is None:
        begin = BeginDrain(facts.replica_id, attempt.attempt, f"drain, then {goal}")
        return Decision(facts.replica_id, ObservedState.DRAINING, begin.why, (begin,))
    if attempt.idle_scrapes >= policy.idle_scrapes_to_stop:
        return _terminate(facts, attempt, f"{goal}: no request is open")
    left = attempt.drain_since_seconds + spec.drain_seconds - now
    if left <= 0:
        return _terminate(facts, attempt, f"{goal}: {spec.drain_seconds:g} s to drain are over")
    return Decision(facts.replica_id, ObservedState.DRAINING, f"open requests may end; {left:.0f} s left")


def _terminate(
    facts: ReplicaFacts, attempt: AttemptFacts, why: str, *, blames_engine: bool = False
) -> Decision:
    action = Terminate(facts.replica_id, attempt.attempt, why, blames_engine)
    return Decision(facts.replica_id, ObservedState.STOPPING, why, (action,))


def _finish_off(facts: ReplicaFacts, attempt: AttemptFacts, now: float, policy: Policy) -> Decision:
    """The attempt is ending: SIGKILL after the grace, again and again until all are gone."""
    pids = ", ".join(map(str, attempt.pids[:8]))
    if attempt.kill_sent_at_seconds is not None:
        due = attempt.kill_sent_at_seconds + policy.kill_again_seconds
        reason = f"killed; waiting for pid {pids} to go"
    elif attempt.engine_ended:
        due = now
        reason = f"engine ended; killing what it left: pid {pids}"
    else:
        due = (attempt.term_sent_at_seconds or 0.0) + policy.stop_grace_seconds
        reason = attempt.stop_reason
    kills = (Kill(facts.replica_id, attempt.attempt, reason),) if now >= due else ()
    return Decision(
        facts.replica_id,
        ObservedState.STOPPING,
        reason,
        kills,
        stalled=attempt.stalled,
        held_by_pids=_outliving(attempt, now, policy),
    )


def _outliving(attempt: AttemptFacts, now: float, policy: Policy) -> tuple[int, ...]:
    """Processes that SIGKILL does not end, such as one that waits for a device in the kernel."""
    ended_at = attempt.term_sent_at_seconds
    stuck_after = policy.stop_grace_seconds + policy.kill_is_stuck_seconds
    if attempt.kill_sent_at_seconds is None or ended_at is None or now - ended_at < stuck_after:
        return ()
    return attempt.pids


def _close(facts: ReplicaFacts, attempt: AttemptFacts, now: float, policy: Policy) -> Decision:
    ending = _ending(facts, attempt, policy)
    crashes = 0 if _is_stable(attempt, now, policy) else facts.crashes
    conflicts = 0 if attempt.ready_at_seconds is not None else facts.port_conflicts
    if ending is Ending.CRASHED:
        crashes += 1
    elif ending is Ending.PORT_TAKEN:
        conflicts += 1
    why = attempt.stop_reason or attempt.exit_text or "ended; nobody saw how"
    if attempt.epoch:
        crashes = conflicts = 0  # the whole is started again or given up by who sees all of its members
    close = Close(facts.replica_id, attempt.attempt, ending, crashes, conflicts, why, attempt.stalled)
    state, reason = _after(facts.spec, attempt, why)
    return Decision(facts.replica_id, state, reason, (close,))


def _after(spec: ReplicaSpec | None, attempt: AttemptFacts, why: str) -> tuple[ObservedState, str]:
    """How a replica stands at the end of an attempt that ended so."""
    if spec is None or spec.wanted is not WantedState.RUN:
        return ObservedState.STOPPED, why
    if spec.member is None:
        return ObservedState.BACKING_OFF, why
    if attempt.epoch == spec.member.epoch:
        return ObservedState.FAILED, spent(attempt.epoch, why)
    return ObservedState.WAITING, why


def _ending(facts: ReplicaFacts, attempt: AttemptFacts, policy: Policy) -> Ending:
    if attempt.stop_blames_engine:
        return Ending.CRASHED
    if not attempt.started:
        return Ending.INTERRUPTED
    draining = attempt.drain_since_seconds is not None
    if attempt.term_sent_at_seconds is not None or draining:
        return Ending.STOPPED
    never_ready = attempt.ready_at_seconds is None
    if attempt.port_taken and never_ready and facts.port_conflicts < policy.port_conflict_limit:
        return Ending.PORT_TAKEN
    return Ending.CRASHED


def _plan_idle(facts: ReplicaFacts, now: float, policy: Policy) -> Decision:
    """No attempt is open: launch, or say why not."""
    spec = facts.spec
    if spec is None or spec.wanted is not WantedState.RUN:
        return Decision(facts.replica_id, ObservedState.STOPPED, facts.last_exit_text)
    same = spec.generation == facts.generation
    crashes = facts.crashes if same else 0
    given_up = (_given_up(facts, crashes, policy) if same else "") or why_spent(spec.member, facts)
    if given_up:
        return Decision(facts.replica_id, ObservedState.FAILED, given_up)
    if facts.stray_pids:
        reason = f"a process of an earlier launch must go first: pid {facts.stray_pids[0]}"
        return Decision(facts.replica_id, ObservedState.WAITING, reason, held_by_pids=facts.stray_pids)
    if facts.held is not None:
        return _wait_for_memory(facts, facts.held)
    return _back_off_then_launch(facts, crashes, now, policy)


def _wait_for_memory(facts: ReplicaFacts, held: Held) -> Decision:
    """No attempt is burnt on memory that is not there; meanwhile its model can be made ready."""
    check = CheckModel(facts.replica_id, "model files are verified while its memory is waited for")
    return Decision(
        facts.replica_id,
        ObservedState.WAITING,
        held.text,
        (check,) if facts.model is ModelCheck.UNKNOWN else (),
        held_by_pids=held.pids,
        memory_wait=held.wait,
    )


def _back_off_then_launch(facts: ReplicaFacts, crashes: int, now: float, policy: Policy) -> Decision:
    ended = facts.last_ended_at_seconds
    wait = 0.0 if ended is None else ended + policy.backoff_seconds(crashes) - now
    if wait > 0:
        reason = f"crash {crashes} of {policy.crash_limit}: {facts.last_exit_text}"
        return Decision(
            facts.replica_id,
            ObservedState.BACKING_OFF,
            reason,
            retry_in_seconds=wait,
            stalled=facts.last_stalled,
        )
    return _check_model_then_launch(facts, crashes)


def _given_up(facts: ReplicaFacts, crashes: int, policy: Policy) -> str:
    if facts.refusal:
        return facts.refusal
    if crashes >= policy.crash_limit:
        return f"ended {crashes} times in a row, given up: {facts.last_exit_text}"
    return ""


def _check_model_then_launch(facts: ReplicaFacts, crashes: int) -> Decision:
    match facts.model:
        case ModelCheck.BAD:
            return Decision(facts.replica_id, ObservedState.FAILED, facts.model_reason)
        case ModelCheck.UNKNOWN:
            check = CheckModel(facts.replica_id, "model files must be verified first")
            return Decision(facts.replica_id, ObservedState.WAITING, check.why, (check,))
        case ModelCheck.RUNNING:
            return Decision(
                facts.replica_id, ObservedState.WAITING, facts.model_reason or "verifying the model"
            )
        case ModelCheck.GOOD if lacks_head(facts.spec):
            return Decision(facts.replica_id, ObservedState.WAITING, "waits for the head's address")
        case ModelCheck.GOOD:
            why = f"relaunch after crash {crashes}" if crashes else "wanted and not running"
            why = f"{why}; {facts.memory_note}" if facts.memory_note else why
            launch = Launch(facts.replica_id, facts.last_attempt + 1, why)
            return Decision(facts.replica_id, ObservedState.STARTING, why, (launch,))
