"""Sleep of a replica that stands by: what to do next for it. Pure.

A sleeper is ready and cannot answer: it is asked nothing, and nothing that it does not do counts against
it. Whoever wakes it waits for two things in a row: the engine's word that its memory is back, and health
that was asked for after that. What takes too long, or goes wrong on the way up, ends the attempt, since
nobody knows then what state the engine is in. What goes wrong on the way down is undone by waking it.
"""

from __future__ import annotations

from workers.agent.facts import (
    AttemptFacts,
    Decision,
    Policy,
    Probe,
    ReplicaFacts,
    RequestState,
    SetSleep,
    Terminate,
)
from workers.protocol.engines.sleeping import ASLEEP, AWAKE, FALLING_ASLEEP, WAKING
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ReplicaSpec


def follow_sleep(
    facts: ReplicaFacts, attempt: AttemptFacts, spec: ReplicaSpec, now: float, policy: Policy
) -> Decision | None:
    """Decide for a ready attempt that sleeps or is to; `None`: it is awake, and nothing of sleep is to do."""
    match attempt.sleep.state:
        case "falling_asleep":
            return _fall(facts, attempt, spec, now, policy)
        case "asleep":
            return _rest(facts, attempt, spec, policy)
        case "waking":
            return _rise(facts, attempt, now, policy)
        case _:
            return _lie_down(facts, attempt, spec, policy)


def _lie_down(
    facts: ReplicaFacts, attempt: AttemptFacts, spec: ReplicaSpec, policy: Policy
) -> Decision | None:
    may = spec.asleep and attempt.probe is Probe.READY and not attempt.sleep.hindrance
    if not may or attempt.idle_in_a_row < policy.idle_scrapes_to_sleep:
        return None
    return _turn(facts, attempt, FALLING_ASLEEP, "it stands by, and nothing runs", policy)


def _fall(
    facts: ReplicaFacts, attempt: AttemptFacts, spec: ReplicaSpec, now: float, policy: Policy
) -> Decision:
    sleep = attempt.sleep
    late = now - sleep.since_seconds > policy.sleep_seconds
    if sleep.request is RequestState.DONE:
        return _turn(facts, attempt, ASLEEP, "its accelerators' memory is given back", policy)
    if sleep.request is RequestState.FAILED or late:
        error = sleep.error or f"no answer within {policy.sleep_seconds:g} s"
        why = f"it could not be put to sleep: {error}"
        return _turn(facts, attempt, WAKING, why, policy, note=why)
    if sleep.request is RequestState.NONE:  # whoever asked is gone: asked again, whichever is wanted now
        return _turn(facts, attempt, FALLING_ASLEEP if spec.asleep else WAKING, "asked again", policy)
    return _ready(facts)


def _rest(facts: ReplicaFacts, attempt: AttemptFacts, spec: ReplicaSpec, policy: Policy) -> Decision:
    if attempt.probe is Probe.DEAD:
        why = f"dead in its sleep: {attempt.probe_reason}"
        return _end(facts, attempt, why)
    if not spec.asleep:
        return _turn(facts, attempt, WAKING, "it is to answer again", policy)
    return _ready(facts)


def _rise(facts: ReplicaFacts, attempt: AttemptFacts, now: float, policy: Policy) -> Decision:
    sleep = attempt.sleep
    if sleep.request is RequestState.FAILED:
        return _end(facts, attempt, f"did not wake: {sleep.error}")
    if sleep.request is RequestState.DONE and sleep.answers_again:
        return _turn(facts, attempt, AWAKE, "", policy)
    if now - sleep.since_seconds > policy.wake_seconds:
        missing = "it is not healthy" if sleep.request is RequestState.DONE else "no answer"
        return _end(facts, attempt, f"did not wake within {policy.wake_seconds:g} s: {missing}")
    if sleep.request is RequestState.NONE:
        # The bound goes on from when it was asked first.
        return _turn(facts, attempt, WAKING, "wakes", policy, restarts_clock=False)
    return _ready(facts)


def _ready(facts: ReplicaFacts) -> Decision:
    """The state of its sleep says all: a reason would outlive it in the record."""
    return Decision(facts.replica_id, ObservedState.READY)


def _turn(
    facts: ReplicaFacts,
    attempt: AttemptFacts,
    state: str,
    why: str,
    policy: Policy,
    *,
    note: str = "",
    restarts_clock: bool = True,
) -> Decision:
    at_most = policy.sleep_seconds if state == FALLING_ASLEEP else policy.wake_seconds
    action = SetSleep(facts.replica_id, attempt.attempt, state, why, note, at_most, restarts_clock)
    return Decision(facts.replica_id, ObservedState.READY, actions=(action,))


def _end(facts: ReplicaFacts, attempt: AttemptFacts, why: str) -> Decision:
    """No grace: what does not come back from sleep answers no request either."""
    action = Terminate(facts.replica_id, attempt.attempt, why, blames_engine=True)
    return Decision(facts.replica_id, ObservedState.STOPPING, why, (action,))
