"""Whether a wave may be followed by the next: what is seen of the new release, against the old one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from exaserve_ops.rollouts.domain.chance import most_failures_by_chance
from exaserve_ops.rollouts.domain.durations import LEAST_OLD, ByKind, Comparison, compare
from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.rollouts.domain.spread_of_values import Buckets, add_up

OPEN = "open"
CLOSED = "closed"
NO_DATA = "no data"

READINESS = "readiness"
CRASHES = "crash loops"
OUT_OF_BLOCKS = "out of KV blocks"
ERRORS = "failed requests"
TTFT = "TTFT p95"
ITL = "time between tokens p95"

FAILURE_CONFIDENCE = 0.99
"""With which the gate of failed requests closes: people feel each of them, so it is quick."""
TTFT_FLOOR_SECONDS = 0.25
ITL_FLOOR_SECONDS = 0.025
"""Below these a multiple of the old release's figure says nothing that anybody would feel."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What one release answered in a window."""

    requests: int = 0
    failed: int = 0
    ttft: ByKind = field(default_factory=dict)
    """Of replicas that were warm by then, by kind of answer."""
    itl: Buckets = field(default_factory=dict)
    """Of streamed answers of such replicas."""

    @property
    def all_ttft(self) -> Buckets:
        """Of all kinds together."""
        return add_up(self.ttft.values())

    @property
    def failed_ratio(self) -> float | None:
        """Share that failed; `None` of nothing."""
        return self.failed / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class Health:
    """How the replicas of the new release fare."""

    wanted: int
    ready: int
    not_ready: tuple[str, ...] = ()
    """Names, with what they are."""
    failed: tuple[str, ...] = ()
    """Those that their agents gave up, with the reason."""
    restarts: int = 0
    """Most restarts of any of them."""
    restarted: str = ""
    """Which one that is."""
    out_of_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Gate:
    """One question and its answer: the figure, the limit, and what follows."""

    name: str
    state: str
    figure: str
    limit: str
    why: str

    @property
    def is_closed(self) -> bool:
        """Whether it speaks against going on."""
        return self.state == CLOSED


def judge(new: Answers, old: Answers, health: Health, policy: RolloutPolicy) -> tuple[Gate, ...]:
    """Answer every question with what is known now."""
    return (
        _readiness(health),
        _crashes(health, policy),
        _out_of_blocks(health, policy),
        _errors(new, old, policy),
        _ttft(new, old, policy),
        _itl(new, old, policy),
    )


def closed_reason(gates: Iterable[Gate]) -> str:
    """What speaks against going on, all of it; empty where nothing does."""
    return "; ".join(gate.why for gate in gates if gate.is_closed)


def missing_data(gates: Iterable[Gate]) -> str:
    """What is not known yet; empty where everything is."""
    return "; ".join(gate.why for gate in gates if gate.state == NO_DATA)


def _readiness(health: Health) -> Gate:
    figure = f"{health.ready} of {health.wanted} ready"
    if not health.not_ready:
        return Gate(READINESS, OPEN, figure, "all", "all of the new release are ready")
    return Gate(READINESS, NO_DATA, figure, "all", f"not ready: {_listed(health.not_ready)}")


def _crashes(health: Health, policy: RolloutPolicy) -> Gate:
    limit = f"{policy.max_restarts} restart{'' if policy.max_restarts == 1 else 's'} of one"
    figure = f"{health.restarts} at most of one"
    if health.failed:
        return Gate(
            CRASHES, CLOSED, f"{len(health.failed)} given up", limit, f"given up: {_listed(health.failed)}"
        )
    if health.restarts > policy.max_restarts:
        why = f"{health.restarted} was restarted {health.restarts} times, more than {policy.max_restarts}"
        return Gate(CRASHES, CLOSED, figure, limit, why)
    return Gate(CRASHES, OPEN, figure, limit, "none restarts over and over")


def _out_of_blocks(health: Health, policy: RolloutPolicy) -> Gate:
    figure, limit = f"{health.out_of_blocks} times", f"{policy.max_out_of_blocks} times"
    if health.out_of_blocks > policy.max_out_of_blocks:
        why = f"ran out of KV blocks {figure}, more than {policy.max_out_of_blocks}"
        return Gate(OUT_OF_BLOCKS, CLOSED, figure, limit, why)
    return Gate(OUT_OF_BLOCKS, OPEN, figure, limit, "KV blocks are enough")


def _errors(new: Answers, old: Answers, policy: RolloutPolicy) -> Gate:
    allowed = (old.failed_ratio or 0.0) + policy.max_error_ratio
    limit = f"{allowed:.1%}"
    figure = f"{new.failed} of {new.requests}" if new.requests else "none yet"
    beside = f", the old release's {old.failed_ratio:.1%}" if old.failed_ratio is not None else ""
    by_chance = most_failures_by_chance(new.requests, allowed, FAILURE_CONFIDENCE)
    if new.failed > by_chance:
        # Few answers prove nothing good; that so many of them fail is proof enough.
        why = f"{figure} requests failed, {limit} may{beside}; {by_chance} of these may by chance"
        return Gate(ERRORS, CLOSED, figure, limit, why)
    if new.requests < policy.min_requests:
        return Gate(ERRORS, NO_DATA, figure, limit, _too_few(new.requests, policy))
    if new.failed > allowed * new.requests:
        why = f"{figure} requests failed, more than {limit}, but as many as {by_chance} may by chance"
        return Gate(ERRORS, NO_DATA, figure, limit, why)
    return Gate(ERRORS, OPEN, figure, limit, f"no more than {limit} failed{beside}")


def _ttft(new: Answers, old: Answers, policy: RolloutPolicy) -> Gate:
    if policy.min_requests == 0 and not new.ttft:
        return Gate(TTFT, OPEN, "none yet", "none", "no requests are asked for")
    seen = compare(new.ttft, old.ttft, most_ratio=policy.max_ttft_ratio, floor_seconds=TTFT_FLOOR_SECONDS)
    return _duration(TTFT, seen, policy.max_ttft_ratio, needs=policy.min_requests, policy=policy)


def _itl(new: Answers, old: Answers, policy: RolloutPolicy) -> Gate:
    """Only streams show when tokens came: without them nothing is asked, and few of them hold nobody up."""
    if not new.itl:
        return Gate(ITL, OPEN, "none streamed", "none", "none of its answers was streamed: nothing to judge")
    pair = ({"stream": new.itl}, {"stream": old.itl})
    seen = compare(*pair, most_ratio=policy.max_itl_ratio, floor_seconds=ITL_FLOOR_SECONDS)
    return _duration(ITL, seen, policy.max_itl_ratio, needs=0, policy=policy)


def _duration(name: str, seen: Comparison, ratio: float, *, needs: int, policy: RolloutPolicy) -> Gate:
    if seen.compared_old < max(policy.min_requests, LEAST_OLD) and seen.compared + seen.left_out >= needs:
        # Once most is moved the old release answers too little to compare with, or nothing any more.
        why = f"the old release answered {seen.compared_old} in the same minutes: no comparison"
        return Gate(name, OPEN, f"{seen.compared + seen.left_out} answers", "none", why)
    if not seen.compared and seen.left_out >= needs:
        # To wait for equals might be to wait for ever: what is asked of each replica may be of one kind.
        why = f"none of {seen.left_out} answers has equals among the old ones: no comparison"
        return Gate(name, OPEN, f"{seen.left_out} answers", "none", why)
    limits = _limits(seen.limits_seconds)
    figure = f"{seen.above} of {seen.compared} above {limits}" if seen.compared else "none yet"
    may_be = f"{seen.by_chance} by chance" if seen.compared else "not known yet"
    told = f"{seen.above} of {seen.compared} answers took longer than {limits}, {ratio:g} times the old p95"
    if seen.is_worse:
        return Gate(name, CLOSED, figure, may_be, f"{name}: {told}; {seen.by_chance} may by chance")
    if seen.compared < needs:
        others = f"; {seen.left_out} more have no equals among the old ones" if seen.left_out else ""
        return Gate(name, NO_DATA, figure, may_be, f"{_too_few(seen.compared, policy)}{others}")
    if seen.is_well:
        return Gate(name, OPEN, figure, may_be, told)
    why = f"{told}: too many to be well, and {seen.by_chance} may by chance"
    return Gate(name, NO_DATA, figure, may_be, why)


def _limits(seconds: tuple[float, ...]) -> str:
    if not seconds:
        return ""
    first, last = f"{seconds[0]:.2g}", f"{seconds[-1]:.2g}"
    return f"{first} s" if first == last else f"{first} to {last} s"


def _too_few(requests: int, policy: RolloutPolicy) -> str:
    return f"{requests} of {policy.min_requests} answers that a verdict needs"


def _listed(names: tuple[str, ...], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
