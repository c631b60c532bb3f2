"""Standbys that sleep: who may, who is to, and what that makes of their being ready. Pure.

A sleeper keeps its place and its promise of memory whole. What its engine has given back is nobody else's:
a standby is there for the moment when something is lost, and then it must find its memory free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.protocol.engines import sleeping

AWAKE, FALLING_ASLEEP, ASLEEP, WAKING = sleeping.STATES
STATES = sleeping.STATES


@dataclass(frozen=True, slots=True)
class SleepWish:
    """What decides whether a replica is to sleep."""

    standbys_sleep: bool
    stands_by: bool
    """It is a standby that is meant to run."""
    engine: str
    options: Mapping[str, object]
    """Of its own release, which may be another one than its deployment's."""
    is_relied_on: bool = False
    """It is awake, while one that serves still wakes or is not reached yet: it is the first to step in."""


def is_to_sleep(wish: SleepWish) -> bool:
    """Whether a replica is to sleep once it is ready."""
    if wish.is_relied_on:
        return False
    return wish.standbys_sleep and wish.stands_by and sleeping.can_sleep(wish.engine, wish.options)


def refusal(engine: str, options: Mapping[str, object], *, nodes: int = 1) -> str:
    """Why standbys of a deployment cannot sleep, and what to do; empty where they can.

    `nodes`: over how many each replica runs.
    """
    if nodes > 1:
        return "a replica that several nodes run together is not put to sleep"
    return sleeping.why_no_sleep(engine, options)
