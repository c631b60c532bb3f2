"""What a rollout does next, each with a why."""

from __future__ import annotations

from dataclasses import dataclass

from exaserve_ops.rollouts.domain.gates import Gate


@dataclass(frozen=True, slots=True)
class MoveRollout:
    """An event of the rollout's lifecycle."""

    event: str
    why: str


@dataclass(frozen=True, slots=True)
class MoveWave:
    """An event of a wave's lifecycle; `members` and `mode` are settled by `open`."""

    number: int
    event: str
    why: str
    members: tuple[str, ...] = ()
    mode: str = ""


@dataclass(frozen=True, slots=True)
class AddWaves:
    """Replicas of the old release are left that no wave has: healing or scaling put them there."""

    why: str


@dataclass(frozen=True, slots=True)
class Roll:
    """Replicas make way for ones of a release; with `in_place` they go first."""

    replica_ids: tuple[str, ...]
    release: str
    in_place: bool
    why: str


@dataclass(frozen=True, slots=True)
class Stay:
    """Replicas that were to make way stay after all, and keep their sessions."""

    replica_ids: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Sessions leave replicas that are about to go."""

    replica_ids: tuple[str, ...]
    targets: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Replicas whose successors are ready drain and stop."""

    replica_ids: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class NoteGates:
    """Write down what the gates of a wave say."""

    number: int
    gates: tuple[Gate, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is done now; this is waited for."""

    why: str


Action = MoveRollout | MoveWave | AddWaves | Roll | Stay | Leave | LetGo | NoteGates | Wait
