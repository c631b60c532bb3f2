"""What is special about a member of a replica that several nodes run together. Pure.

Its part is launched once for each start of the whole and never again by itself, so that no two starts'
processes meet. A member that is not the head answers no HTTP: it is as ready as its head is, and it ends
when the head is gone, for nobody would ask it anything any more.
"""

from __future__ import annotations

from workers.agent.facts import AttemptFacts, Policy, Probe, ReplicaFacts
from workers.protocol.wish import GangMember, ReplicaSpec


def is_follower(spec: ReplicaSpec | None) -> bool:
    """Whether it is a member other than the head."""
    return spec is not None and spec.member is not None and spec.member.number > 0


def why_spent(member: GangMember | None, facts: ReplicaFacts) -> str:
    """Why it is not launched again for this start; empty where it may be."""
    if member is None or member.epoch > facts.epoch:
        return ""
    ended = facts.last_exit_text or "nobody saw how"
    return spent(facts.epoch, ended)


def spent(epoch: int, ended: str) -> str:
    """What is said of a member whose part of a start has ended."""
    return f"its part of start {epoch} ended ({ended}): waits until the whole is started again"


def why_outdated(member: GangMember | None, attempt: AttemptFacts) -> str:
    """Why an attempt must make way at once; empty where it is of the start that is wanted."""
    wanted = 0 if member is None else member.epoch
    if attempt.epoch == wanted:
        return ""
    return f"start {attempt.epoch} of the whole is over: start {wanted} is wanted"


def lacks_head(spec: ReplicaSpec | None) -> bool:
    """Whether it is a member that is not told yet where its head is."""
    if spec is None or spec.member is None or spec.member.number == 0:
        return False
    return not (spec.member.head_address and spec.member.rendezvous)


def why_alone(attempt: AttemptFacts, spec: ReplicaSpec, now: float, policy: Policy) -> str:
    """Why a member cannot go on without its head; empty while the head answers, or may yet."""
    if attempt.ready_at_seconds is None:
        late = now - attempt.launched_at_seconds > spec.start_seconds
        return f"the head was not ready within {spec.start_seconds:g} s" if late else ""
    if attempt.probe is Probe.DEAD:
        return f"the head is gone ({attempt.probe_reason})"
    if attempt.still_seconds >= policy.head_away_seconds:
        return f"the head did not answer for {attempt.still_seconds:.0f} s"
    return ""
