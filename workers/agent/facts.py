"""What the plan of a node is made from and made of: facts, policy, actions. Plain data.

Times are monotonic seconds of this boot of the machine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from workers.protocol.engines.sleeping import AWAKE
from workers.protocol.observed import MemoryWait, ObservedState
from workers.protocol.wish import ReplicaSpec


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient the agent is."""

    backoff_base_seconds: float = 0.5
    backoff_cap_seconds: float = 60.0
    crash_limit: int = 6
    """Crashes in a row after which a generation is given up."""
    stable_seconds: float = 30.0
    """Ready for this long, and earlier crashes are forgotten."""
    stop_grace_seconds: float = 10.0
    """From SIGTERM to SIGKILL."""
    kill_again_seconds: float = 2.0
    idle_scrapes_to_stop: int = 2
    port_conflict_limit: int = 5
    """Lost ports in a row that are forgiven; the next ones count as crashes."""
    first_token_seconds: float = 180.0
    """At least so long may the first token of an attempt take: kernels are compiled for it."""
    first_token_factor: float = 3.0
    """Or so many times the stall limit, if that is longer."""
    kill_is_stuck_seconds: float = 10.0
    """What outlives SIGKILL for so long is told by pid: it holds what the next attempt needs."""
    starts_at_once: int = 4
    """Attempts that may be on their way to ready at the same time; 0: any number."""
    idle_scrapes_to_sleep: int = 2
    sleep_seconds: float = 120.0
    """How long an engine may take to fall asleep."""
    wake_seconds: float = 60.0
    """From the wish for a sleeper to answer until it does; then it is started anew."""
    head_away_seconds: float = 60.0
    """A member of a replica over several nodes ends when its head has not answered for so long."""

    def backoff_seconds(self, crashes: int) -> float:
        """Pause after so many crashes in a row: doubles each time, up to the cap."""
        if crashes <= 0:
            return 0.0
        doublings = min(crashes - 1, 32)
        return min(self.backoff_cap_seconds, self.backoff_base_seconds * float(2**doublings))


class Probe(enum.Enum):
    """What the engine's port says."""

    CLOSED = "closed"
    LOADING = "loading"
    READY = "ready"
    UNREACHABLE = "unreachable"
    """Was ready, and now refuses or denies it three times in a row."""
    DEAD = "dead"
    """Was ready, and its port is closed, or it has denied it for long: the process lives in vain."""


class ModelCheck(enum.Enum):
    """Whether the model's files on this node are what the wish says."""

    UNKNOWN = "unknown"
    RUNNING = "running"
    GOOD = "good"
    BAD = "bad"


class Ending(enum.Enum):
    """Why an attempt is over; only the first one counts towards the crash limit."""

    CRASHED = "crashed"
    STOPPED = "stopped"
    PORT_TAKEN = "port_taken"
    INTERRUPTED = "interrupted"
    """The agent died between writing the attempt down and starting it."""


class RequestState(enum.Enum):
    """How the request that puts an engine to sleep, or wakes it, goes."""

    NONE = "none"
    """This agent has sent none for the state that the attempt is in."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SleepFacts:
    """Whether an attempt sleeps. Of one that is awake only the hindrance counts."""

    state: str = AWAKE
    """One of `engines.sleeping`'s."""
    since_seconds: float = 0.0
    request: RequestState = RequestState.NONE
    error: str = ""
    """Why the request failed."""
    answers_again: bool = False
    """Health that was asked for after it had been woken was good."""
    hindrance: str = ""
    """Why it is not put to sleep; empty where it may be."""


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """An open attempt, as journal, process table and probes show it."""

    attempt: int
    launch_digest: str
    launched_at_seconds: float
    pids: tuple[int, ...]
    """Living processes of the attempt, shim included."""
    started: bool = True
    """False if its process was never seen."""
    engine_ended: bool = False
    """The main process's end is on record; what still lives is left over."""
    exit_text: str = ""
    probe: Probe = Probe.CLOSED
    probe_reason: str = ""
    ready_at_seconds: float | None = None
    idle_scrapes: int = 0
    """Scrapes in a row, since the drain began, that saw no open request."""
    port_taken: bool = False
    drain_since_seconds: float | None = None
    term_sent_at_seconds: float | None = None
    kill_sent_at_seconds: float | None = None
    stop_reason: str = ""
    stop_blames_engine: bool = False
    still_seconds: float = 0.0
    """For how long requests ran and no token came, or nothing was answered, as far as was looked."""
    still_text: str = ""
    """What stood still."""
    has_generated: bool = False
    """A token has come from this attempt."""
    stalled: bool = False
    """It is being ended because it stood still."""
    sleep: SleepFacts = SleepFacts()
    idle_in_a_row: int = 0
    """The last scrapes in a row that saw no open request."""
    epoch: int = 0
    """Of the start of a replica over several nodes; 0: this node runs it all."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why a replica is not launched now: the memory that it was promised is not free, or not seen."""

    pids: tuple[int, ...]
    """Processes that are not ours and keep it out; the fleet has to help."""
    text: str
    wait: MemoryWait | None = None
    """The figures, where memory is what is waited for."""


HeldMemory: TypeAlias = Callable[[ReplicaSpec], Held | None]
"""What the launch of a replica waits for."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica: what is wanted of it, and what is remembered of its past."""

    replica_id: str
    spec: ReplicaSpec | None
    """`None`: the wish does not name it."""
    generation: int = 0
    """The generation that the counters below belong to."""
    last_attempt: int = 0
    epoch: int = 0
    """Of the last attempt: its member is not launched for this start of the whole again."""
    crashes: int = 0
    port_conflicts: int = 0
    last_ended_at_seconds: float | None = None
    last_exit_text: str = ""
    refusal: str = ""
    """Why this generation cannot be launched at all."""
    model: ModelCheck = ModelCheck.UNKNOWN
    model_reason: str = ""
    stray_pids: tuple[int, ...] = ()
    """Processes of this replica that no open attempt knows; nothing is launched beside them."""
    held: Held | None = None
    """Who sits on the memory that a launch would need; `None` where it is free or unknown."""
    memory_note: str = ""
    """Why it may be launched though its memory was not seen to be free."""
    last_stalled: bool = False
    """The last attempt was ended because it stood still."""
    attempt: AttemptFacts | None = None


@dataclass(frozen=True, slots=True)
class CheckModel:
    """Begin to verify the model's files."""

    replica_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Lease ports and start an attempt."""

    replica_id: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Start the drain's clock."""

    replica_id: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to the engine; the grace period begins."""

    replica_id: str
    attempt: int
    why: str
    blames_engine: bool = False
    """The end that follows counts as a crash."""
    stalled: bool = False
    """It is ended because it stood still."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to every process of the attempt."""

    replica_id: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class Close:
    """No process is left: write the end down, free the ports, remove the runtime folder."""

    replica_id: str
    attempt: int
    ending: Ending
    crashes: int
    """The replica's crash count from now on."""
    port_conflicts: int
    why: str
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class ForgetCrashes:
    """The attempt has been ready for long enough: earlier crashes count no more."""

    replica_id: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class SetSleep:
    """Write down how an attempt sleeps, and ask its engine for it where that takes a request."""

    replica_id: str
    attempt: int
    state: str
    """One of `engines.sleeping`'s."""
    why: str
    note: str = ""
    """Why it is not to be put to sleep again."""
    at_most_seconds: float = 0.0
    """How long the engine may take to answer."""
    restarts_clock: bool = True


Action: TypeAlias = CheckModel | Launch | BeginDrain | Terminate | Kill | Close | ForgetCrashes | SetSleep


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do for one replica now, and how it stands."""

    replica_id: str
    state: ObservedState
    reason: str = ""
    actions: tuple[Action, ...] = ()
    retry_in_seconds: float | None = None
    stalled: bool = False
    held_by_pids: tuple[int, ...] = ()
    memory_wait: MemoryWait | None = None
