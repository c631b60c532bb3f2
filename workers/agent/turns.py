"""Who starts now and who waits, of all that a node would launch at once. Pure.

An engine that starts reads its weights from disk and compiles its kernels: a dozen at once are each
slower than one after the other. After a power cut nobody else is there to keep them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.agent.facts import Decision, Launch, ReplicaFacts
from workers.agent.members import is_follower
from workers.protocol.observed import ObservedState


def take_turns(
    decisions: Sequence[Decision], replicas: Sequence[ReplicaFacts], *, at_once: int
) -> tuple[Decision, ...]:
    """Let no more launches through than leave `at_once` starting (0: all); the others wait, with the reason.

    A member of a replica over several nodes whose head has started waits for no turn: two such replicas, each
    with a turn on another's node, would wait for one another.

    `replicas` are those of the decisions, in the same order. First come those that have crashed least, then
    those that wait longest: one that never gets ready does not take every turn. An attempt holds its place
    until it is ready or is ended, which its time to start sees to.
    """
    launching = [
        index
        for index, (decision, facts) in enumerate(zip(decisions, replicas, strict=True))
        if _launches(decision) and not is_follower(facts.spec)
    ]
    starting = sum(_starts(facts) for facts in replicas)
    room = max(0, at_once - starting) if at_once else len(launching)
    waiting = sorted(launching, key=lambda index: _rank(replicas[index]))[room:]
    if not waiting:
        return tuple(decisions)
    why = f"waits its turn: {starting + len(launching) - len(waiting)} of {at_once} start on this node"
    turned = list(decisions)
    for index in waiting:
        turned[index] = replace(decisions[index], state=ObservedState.WAITING, reason=why, actions=())
    return tuple(turned)


def _launches(decision: Decision) -> bool:
    return any(isinstance(action, Launch) for action in decision.actions)


def _starts(facts: ReplicaFacts) -> bool:
    attempt = facts.attempt
    if attempt is None or not attempt.pids or attempt.engine_ended:
        return False
    return attempt.ready_at_seconds is None and attempt.term_sent_at_seconds is None


def _rank(facts: ReplicaFacts) -> tuple[int, float, str]:
    renewed = facts.spec is not None and facts.spec.generation != facts.generation
    ended = facts.last_ended_at_seconds
    return (0 if renewed else facts.crashes, ended if ended is not None else 0.0, facts.replica_id)
