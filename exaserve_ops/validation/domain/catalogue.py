"""The checks of a validation: what each asks, what it depends on, and how long it may take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CONFIG, WEIGHTS, LAUNCH, MEMORY = "config", "weights", "launch", "memory"
GOLDEN, PREFIX, CHAT, STOP = "golden", "prefix", "chat", "stop"
CONTEXT, CONCURRENCY, BLOCKS = "context", "concurrency", "blocks"
AGAIN, IDLE, HASHING, AGREEMENT = "again", "idle", "hashing", "agreement"
SLEEP, TUNING = "sleep", "tuning"


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of check."""

    name: str
    title: str
    asks: str
    """The question, for people."""
    after: tuple[str, ...] = ()
    """Checks without which it cannot run."""
    seconds: float = 120.0
    """It has failed if it takes longer."""
    launches: int = 0
    """For how many launches that time is."""
    of_model: bool = False
    """Asked once for the model and not of each engine."""
    informs: bool = False
    """What it finds helps to serve well; it is no reason not to serve."""


CATALOGUE: tuple[Check, ...] = (
    Check(CONFIG, "Configuration", "Is the architecture known, and what a token of KV takes?", of_model=True),
    Check(
        WEIGHTS,
        "Weights",
        "Are all files listed, of the right size, with headers that cover them?",
        of_model=True,
    ),
    Check(HASHING, "Prefix hashes", "Do two launches give the same content the same hash?"),
    Check(
        LAUNCH,
        "Launch",
        "Does the engine start from these weights and become ready?",
        seconds=1800,
        launches=1,
    ),
    Check(MEMORY, "Memory", "Does the engine report the KV memory that was forecast?", (LAUNCH,)),
    Check(GOLDEN, "Golden prompts", "Does the same prompt give the same tokens each time?", (LAUNCH,), 600),
    Check(PREFIX, "Prefix cache", "Is a prompt found in cache when it is asked again?", (LAUNCH,), 300),
    Check(
        CHAT,
        "Chat template",
        "Does the next turn of a chat begin with the last one, token for token?",
        (LAUNCH,),
        300,
    ),
    Check(STOP, "Stop strings", "Does an answer end before a stop string?", (GOLDEN,), 300),
    Check(
        CONTEXT,
        "Context length",
        "Are contexts answered up to the limit, and refused beyond?",
        (LAUNCH,),
        1800,
    ),
    Check(
        CONCURRENCY,
        "Concurrency",
        "How do TTFT and time between tokens grow with requests at once?",
        (LAUNCH,),
        1800,
    ),
    Check(IDLE, "Idle, then asked", "Is the first answer after a rest as quick as before?", (LAUNCH,), 900),
    Check(SLEEP, "Sleep and wake", "Does it answer as before once it has slept?", (LAUNCH,), 5400),
    Check(BLOCKS, "KV blocks", "Are all KV blocks free once nothing runs?", (LAUNCH,)),
    Check(AGAIN, "Second launch", "Does another launch give the same tokens?", (GOLDEN,), 2400, launches=1),
    # Last: what it launches has other options than the checks above were made with.
    Check(
        TUNING,
        "Best settings",
        "With which settings does it bring most within the limits?",
        (LAUNCH,),
        4 * 3600,
        launches=8,
        informs=True,
    ),
    Check(AGREEMENT, "Agreement", "Do the engines give the same tokens?", of_model=True, after=(GOLDEN,)),
)
BY_NAME = {check.name: check for check in CATALOGUE}


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """A check of one validation; `engine` is empty for what is asked of the model."""

    name: str
    engine: str = ""


def plan_checks(engines: Iterable[str]) -> tuple[PlannedCheck, ...]:
    """All checks of a validation on these engines, in the order in which they run."""
    chosen = tuple(dict.fromkeys(engines))
    first = [PlannedCheck(c.name) for c in CATALOGUE if c.of_model and c.name != AGREEMENT]
    own = [PlannedCheck(c.name, engine) for engine in chosen for c in CATALOGUE if not c.of_model]
    last = [PlannedCheck(AGREEMENT)] if len(chosen) > 1 else []
    return (*first, *own, *last)
