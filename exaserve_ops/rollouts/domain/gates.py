"""Whether a wave may be followed by the next: what is seen of the new release, against the old one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.rollouts.domain.spread_of_values import Buckets, quantile_seconds

OPEN = "open"
CLOSED = "closed"
NO_DATA = "no data"

READINESS = "readiness"
CRASHES = "crash loops"
OUT_OF_BLOCKS = "out of KV blocks"
ERRORS = "failed requests"
TTFT = "TTFT p95"
ITL = "time between tokens p95"

P95 = 0.95
TTFT_FLOOR_SECONDS = 0.25
ITL_FLOOR_SECONDS = 0.025
"""Below these a multiple of the old release's figure says nothing that anybody would feel."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What one release answered in a window."""

    requests: int = 0
    failed: int = 0
    ttft: Buckets = field(default_factory=dict)
    itl: Buckets = field(default_factory=dict)

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
        _duration(TTFT, (new.ttft, old.ttft), policy.max_ttft_ratio, TTFT_FLOOR_SECONDS, policy),
        _duration(ITL, (new.itl, old.itl), policy.max_itl_ratio, ITL_FLOOR_SECONDS, policy),
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
    limit = f"{policy.max_restarts} restarts of one"
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
    ratio = new.failed_ratio
    figure = "none yet" if ratio is None else f"{ratio:.1%} of {new.requests}"
    if new.requests < policy.min_requests:
        # Few answers prove nothing good; that more failed than all that are needed may, is proof enough.
        if new.failed > allowed * policy.min_requests:
            why = f"{new.failed} of {new.requests} requests failed, {limit} of {policy.min_requests} may"
            return Gate(ERRORS, CLOSED, figure, limit, why)
        return Gate(ERRORS, NO_DATA, figure, limit, _too_few(new.requests, policy))
    if ratio is not None and ratio > allowed:
        beside = f", the old release's {old.failed_ratio:.1%}" if old.failed_ratio is not None else ""
        why = f"{ratio:.1%} of {new.requests} requests failed, {limit} may{beside}"
        return Gate(ERRORS, CLOSED, figure, limit, why)
    return Gate(ERRORS, OPEN, figure, limit, "no more requests fail than of the old release")


def _duration(
    name: str,
    pair: tuple[Buckets, Buckets],
    most_ratio: float,
    floor_seconds: float,
    policy: RolloutPolicy,
) -> Gate:
    new, old = (quantile_seconds(one, P95) for one in pair)
    counts = tuple(sum(one.values()) for one in pair)
    figure = "none yet" if new is None else f"{new:.3f} s"
    if policy.min_requests == 0 and new is None:
        return Gate(name, OPEN, figure, "none", "no requests are asked for")
    if new is None or counts[0] < policy.min_requests:
        return Gate(name, NO_DATA, figure, "not known yet", _too_few(counts[0], policy))
    if old is None or counts[1] < policy.min_requests:
        # Once most is moved the old release answers too little to compare with, or nothing any more.
        return Gate(
            name,
            OPEN,
            figure,
            "none",
            f"the old release answered {counts[1]} in the same minutes: no comparison",
        )
    limit_seconds = max(old * most_ratio, floor_seconds)
    limit = f"{limit_seconds:.3f} s"
    if new > limit_seconds:
        why = f"{name} is {new:.3f} s, {limit} may be (the old release: {old:.3f} s)"
        return Gate(name, CLOSED, figure, limit, why)
    return Gate(name, OPEN, figure, limit, f"the old release has {old:.3f} s")


def _too_few(requests: int, policy: RolloutPolicy) -> str:
    return f"{requests} of {policy.min_requests} answers that a verdict needs"


def _listed(names: tuple[str, ...], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
