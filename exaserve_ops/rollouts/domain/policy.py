"""How a rollout goes: how many at once, how long it is watched, and what stops it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

HALT = "halt"
ROLL_BACK = "roll_back"
_MOST_SECONDS = 7 * 24 * 3600
_MOST_REPLICAS = 100_000
_PERCENT = 100
_MOST_STEPS = 64
_MOST_DIGITS = 12
_MARGIN_SECONDS = 60.0


class PolicyError(ValueError):
    """A value that makes no sense; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """What a person chooses of a rollout. Counts are numbers of replicas, or shares such as `25%`."""

    max_surge: str = "10%"
    """Replicas that may run beyond what is wanted."""
    max_unavailable: str = "1"
    """Replicas of what is wanted that may be missing by the rollout's own doing."""
    canary: str = "1"
    """Size of the first wave."""
    growth: tuple[str, ...] = ("10%", "25%", "50%", "100%")
    """Sizes of the waves after it; the last one holds for all that follow. None crosses a failure domain."""
    approve_waves: tuple[int, ...] = ()
    """Waves, counted from 1, that begin only when somebody lets them."""
    canary_soak_seconds: int = 120
    soak_seconds: int = 60
    """For how long a wave is watched once it runs."""
    min_requests: int = 20
    """Answers of the new release that a verdict needs; 0: none."""
    warm_up_seconds: int = 30
    """What began so soon after its replica was ready counts for no duration: its caches were empty, and the
    conversations that were moved to it are computed anew all at once."""
    data_deadline_seconds: int = 900
    """A wave that has not had so many after so long halts the rollout."""
    max_error_ratio: float = 0.02
    """Share of failed requests beyond that of the old release in the same minutes."""
    max_ttft_ratio: float = 1.5
    """TTFT p95 over that of the old release in the same minutes, among answers of a kind."""
    max_itl_ratio: float = 1.5
    """The same of the p95 of time between tokens, of streamed answers."""
    max_restarts: int = 1
    """Restarts of one replica of the new release that are put up with."""
    max_out_of_blocks: int = 3
    """Times that replicas of the new release may run out of KV blocks in one wave."""
    on_failure: str = ROLL_BACK
    """`roll_back` or `halt`, when a gate stays closed."""
    move_sessions: bool = True
    """Sessions move between their turns; else they stay until they end, as long as they may."""
    sessions_wait_seconds: int = 60
    """For how long a replica is kept for its sessions before it drains."""
    prewarm_seconds: int = 3600
    """For how long weights may be under way to the nodes of a wave."""
    second_approver: bool = False
    """Somebody else than who asked for it must agree before anything runs."""

    def to_json(self) -> dict[str, Any]:
        """Give what the record keeps."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }


DEFAULT = RolloutPolicy()
_WHOLE = {
    "canary_soak_seconds": _MOST_SECONDS,
    "soak_seconds": _MOST_SECONDS,
    "min_requests": 1_000_000,
    "warm_up_seconds": 3600,
    "data_deadline_seconds": _MOST_SECONDS,
    "max_restarts": 1000,
    "max_out_of_blocks": 1_000_000,
    "sessions_wait_seconds": _MOST_SECONDS,
    "prewarm_seconds": _MOST_SECONDS,
}
"""Highest value of each whole number."""
_RATIOS = {"max_error_ratio": (0.0, 1.0), "max_ttft_ratio": (1.0, 1000.0), "max_itl_ratio": (1.0, 1000.0)}
_COUNTS = ("max_surge", "max_unavailable", "canary")
_SWITCHES = ("move_sessions", "second_approver")


def read_policy(given: Mapping[str, Any]) -> RolloutPolicy:
    """Check what somebody chose; what is left out is as usual. Raises `PolicyError`."""
    known = {field.name for field in fields(RolloutPolicy)}
    for name in given:
        if name not in known:
            raise PolicyError(name, f"is no part of a policy; what is: {', '.join(sorted(known))}")
    values = {name: _checked(name, value) for name, value in given.items()}
    policy = RolloutPolicy(**values)
    if not resolve(policy.max_surge, _MOST_REPLICAS) and not resolve(policy.max_unavailable, _MOST_REPLICAS):
        raise PolicyError(
            "max_surge",
            "and max_unavailable are both zero, so no replica could ever make way: allow one of them, "
            "surge where there is room for more replicas, else unavailable ones",
        )
    return policy


def resolve(count: str, wanted: int) -> int:
    """How many of `wanted` replicas a count or share is; a share above zero is at least one."""
    if not count.endswith("%"):
        return int(count)
    share = int(count[:-1])
    return max(1, wanted * share // _PERCENT) if share else 0


def longest_move_seconds(replicas: int, width: int, each_seconds: float, policy: RolloutPolicy) -> float:
    """For how long so many may make way, `width` at a time: each batch may start, be left and drain once."""
    batches = -(-replicas // max(1, width))
    return batches * (each_seconds + policy.sessions_wait_seconds + _MARGIN_SECONDS)


def _checked(name: str, value: Any) -> Any:  # noqa: ANN401 - each field has its own type
    if name in _COUNTS:
        return _count(name, value, least=int(name == "canary"))
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise PolicyError(name, "give true or false")
        return value
    if name in _WHOLE:
        return _whole(name, value, 0, _WHOLE[name])
    if name in _RATIOS:
        return _ratio(name, value)
    return {"growth": _growth, "approve_waves": _waves, "on_failure": _on_failure}[name](value)


def _count(name: str, value: object, *, least: int = 0) -> str:
    text = str(value).strip() if isinstance(value, str | int | float) else type(value).__name__
    digits = text.removesuffix("%")
    most = _PERCENT if text.endswith("%") else _MOST_REPLICAS
    # Few digits before any reading: `int` raises an error of its own for thousands of them.
    readable = digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
    if not readable or int(digits) > most:
        raise PolicyError(name, f"give a number of replicas, or a share such as 25%, not '{text[:40]}'")
    if int(digits) < least:
        raise PolicyError(name, f"give at least {least}")
    return f"{int(digits)}%" if text.endswith("%") else str(int(digits))


def _whole(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PolicyError(name, f"give a whole number from {least} to {most:,}")
    return value


def _ratio(name: str, value: object) -> float:
    least, most = _RATIOS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise PolicyError(name, f"give a number from {least:g} to {most:g}")
    return float(value)


def _growth(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= _MOST_STEPS:
        raise PolicyError("growth", f"give a list of 1 to {_MOST_STEPS} sizes, such as 10%, 50%, 100%")
    return tuple(_count("growth", one, least=1) for one in value)


def _waves(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > _MOST_STEPS:
        raise PolicyError("approve_waves", "give a list of wave numbers, counted from 1")
    return tuple(sorted({_whole("approve_waves", one, 1, _MOST_REPLICAS) for one in value}))


def _on_failure(value: object) -> str:
    if value not in (HALT, ROLL_BACK):
        raise PolicyError("on_failure", f"give {ROLL_BACK} or {HALT}")
    return str(value)
