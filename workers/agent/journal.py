"""What the agent must still know after `kill -9` at any moment: SQLite, one file, synced writes.

Each function is one transaction. A launch is written down before the process is started, so that a
crash between the two leaves a row to be cleaned up and never a process that nobody knows.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from workers.agent.processes import ExitRecord, ProcessId
from workers.agent.supervisor import Close
from workers.protocol.imports import WeightsImport
from workers.protocol.weights import WeightsWanted
from workers.protocol.wish import ReplicaSpec

_BUSY_SECONDS = 5.0
_REMEMBERED_COMMANDS = 2000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS replicas (
    replica_id TEXT PRIMARY KEY,
    body BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS attempts (
    replica_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (replica_id, attempt)
) STRICT;
CREATE TABLE IF NOT EXISTS port_leases (
    port INTEGER PRIMARY KEY,
    replica_id TEXT NOT NULL,
    attempt INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS commands (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    command_id TEXT NOT NULL UNIQUE,
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS model_files (
    path TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    sha256 TEXT NOT NULL
) STRICT;
"""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The newest desired state that was taken in."""

    revision: int
    lease_epoch: int
    specs: tuple[ReplicaSpec, ...] = ()


class WeightsWish(msgspec.Struct, frozen=True, kw_only=True):
    """The newest wish for weights on this node's disk that was taken in."""

    revision: int
    lease_epoch: int
    weights: tuple[WeightsWanted, ...] = ()
    imports: tuple[WeightsImport, ...] = ()


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is remembered of a replica across its attempts."""

    replica_id: str
    generation: int = 0
    """The generation that counters and refusal belong to."""
    last_attempt: int = 0
    epoch: int = 0
    """Of the last attempt, where it was a member's of a replica over several nodes."""
    crashes: int = 0
    port_conflicts: int = 0
    restarts: int = 0
    last_ended_at: float | None = None
    refusal: str = ""
    last_exit: ExitRow | None = None


class ExitRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the last attempt ended. Log lines are masked already."""

    attempt: int
    code: int | None = None
    signal: int | None = None
    duration_seconds: float = 0.0
    log_tail: tuple[str, ...] = ()
    why: str = ""
    stalled: bool = False


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An open attempt: from the decision to launch until no process of it is left."""

    replica_id: str
    attempt: int
    generation: int
    launch_digest: str
    engine: str
    ports: tuple[int, ...]
    host: str
    runtime_dir: str
    log_file: str
    launched_at: float
    pid: int | None = None
    start_ticks: int | None = None
    ready_at: float | None = None
    drain_since: float | None = None
    term_sent_at: float | None = None
    kill_sent_at: float | None = None
    stop_reason: str = ""
    stop_blames_engine: bool = False
    stalled: bool = False
    sleep_state: str = ""
    """One of `engines.sleeping`'s."""
    sleep_since: float | None = None
    sleep_note: str = ""
    """Why it is not to be put to sleep again."""
    woke_in: float | None = None
    epoch: int = 0
    """Of the start of a replica over several nodes; 0: this node runs it all."""
    member_number: int = 0
    head_address: str = ""
    """`host:port` of the head that it follows; empty for the head itself, and where one node runs all."""
    rendezvous: str = ""
    """`host:port` where its members meet."""

    @property
    def leader(self) -> ProcessId | None:
        """The shim: leader of the attempt's session."""
        if self.pid is None or self.start_ticks is None:
            return None
        return ProcessId(self.pid, self.start_ticks)

    @property
    def key(self) -> tuple[str, int]:
        """Names the attempt."""
        return (self.replica_id, self.attempt)


_VOID_AFTER_REBOOT = {
    "pid": None,
    "start_ticks": None,
    "launched_at": 0.0,
    "ready_at": None,
    "drain_since": None,
    "term_sent_at": None,
    "kill_sent_at": None,
}


class Journal:
    """The agent's memory. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # -- the machine's boot ----------------------------------------------------------------------
    def note_boot(self, boot_id: str, *, now: float) -> bool:
        """Record this boot of the machine; True if the journal is from another one.

        After a reboot every recorded pid and monotonic time is void: processes are forgotten, so
        that the attempts are closed as ended by no fault of theirs. Counts of crashes stay, and a
        back-off that was under way is waited out in full from `now` on: how much of it had passed,
        no clock of this boot can tell, and a machine that an engine takes down is not to be taken
        down without a pause again.
        """
        with self._transaction() as db:
            row = db.execute("SELECT value FROM facts WHERE name = 'boot'").fetchone()
            if row is not None and row[0] == boot_id.encode():
                return False
            db.execute("REPLACE INTO facts VALUES ('boot', ?)", (boot_id.encode(),))
            if row is None:
                return False
            for attempt in self.attempts():
                reason = attempt.stop_reason or "the machine was restarted"
                void = msgspec.structs.replace(attempt, stop_reason=reason, **_VOID_AFTER_REBOOT)
                self._save_attempt(void)
            for replica in self.replicas():
                ended_at = now if replica.crashes else None
                self._save_replica(msgspec.structs.replace(replica, last_ended_at=ended_at))
            return True

    # -- the wish --------------------------------------------------------------------------------
    def wish(self) -> Wish | None:
        """Return the newest wish taken in, if any."""
        with self._lock:
            row = self._db.execute("SELECT value FROM facts WHERE name = 'wish'").fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=Wish)

    def save_wish(self, wish: Wish) -> None:
        """Replace the wish."""
        with self._transaction() as db:
            db.execute("REPLACE INTO facts VALUES ('wish', ?)", (msgspec.msgpack.encode(wish),))

    def weights_wish(self) -> WeightsWish | None:
        """Return the newest wish for weights, if there was any."""
        with self._lock:
            row = self._db.execute("SELECT value FROM facts WHERE name = 'weights'").fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=WeightsWish)

    def save_weights_wish(self, wish: WeightsWish) -> None:
        """Replace the wish for weights."""
        with self._transaction() as db:
            db.execute("REPLACE INTO facts VALUES ('weights', ?)", (msgspec.msgpack.encode(wish),))

    # -- replicas and attempts -------------------------------------------------------------------
    def replicas(self) -> tuple[ReplicaRow, ...]:
        """Return every replica that is remembered."""
        with self._lock:
            rows = self._db.execute("SELECT body FROM replicas ORDER BY replica_id").fetchall()
        return tuple(msgspec.msgpack.decode(row[0], type=ReplicaRow) for row in rows)

    def find_replica(self, replica_id: str) -> ReplicaRow | None:
        """Return one replica's memory, if there is any."""
        with self._lock:
            row = self._db.execute("SELECT body FROM replicas WHERE replica_id = ?", (replica_id,)).fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=ReplicaRow)

    def attempts(self) -> tuple[AttemptRow, ...]:
        """Return every open attempt."""
        with self._lock:
            rows = self._db.execute("SELECT body FROM attempts ORDER BY replica_id, attempt").fetchall()
        return tuple(msgspec.msgpack.decode(row[0], type=AttemptRow) for row in rows)

    def open_attempt(self, attempt: AttemptRow) -> None:
        """Write a launch down before it happens: the attempt, its ports, the replica's count.

        Raises `sqlite3.IntegrityError` if a port is leased already, the attempt exists, or this start of a
        replica over several nodes, or a later one, was launched here before.
        """
        replica_id = attempt.replica_id
        with self._transaction() as db:
            replica = self.find_replica(replica_id) or ReplicaRow(replica_id=replica_id)
            if attempt.epoch and attempt.epoch <= replica.epoch:
                raise sqlite3.IntegrityError(f"start {replica.epoch} was launched already")
            if replica.generation != attempt.generation:
                replica = msgspec.structs.replace(
                    replica, generation=attempt.generation, crashes=0, port_conflicts=0, refusal=""
                )
            replica = msgspec.structs.replace(
                replica,
                last_attempt=attempt.attempt,
                epoch=attempt.epoch,
                restarts=replica.restarts + (1 if replica.last_attempt else 0),
            )
            self._save_replica(replica)
            db.execute(
                "INSERT INTO attempts VALUES (?, ?, ?)",
                (replica_id, attempt.attempt, msgspec.msgpack.encode(attempt)),
            )
            db.executemany(
                "INSERT INTO port_leases VALUES (?, ?, ?)",
                [(port, replica_id, attempt.attempt) for port in attempt.ports],
            )

    def change_attempt(self, key: tuple[str, int], **changes: object) -> bool:
        """Change fields of an open attempt; False if it has been closed meanwhile."""
        with self._transaction() as db:
            row = db.execute("SELECT body FROM attempts WHERE replica_id = ? AND attempt = ?", key).fetchone()
            if row is None:
                return False
            attempt = msgspec.msgpack.decode(row[0], type=AttemptRow)
            self._save_attempt(msgspec.structs.replace(attempt, **changes))
            return True

    def close_attempt(
        self, close: Close, *, exit_record: ExitRecord | None, log_tail: tuple[str, ...], now: float
    ) -> None:
        """Record how an attempt ended, free its ports, and drop it from the open ones."""
        key = (close.replica_id, close.attempt)
        ended = ExitRow(attempt=close.attempt, log_tail=log_tail, why=close.why, stalled=close.stalled)
        if exit_record is not None:
            ended = msgspec.structs.replace(
                ended,
                code=exit_record.code,
                signal=exit_record.signal,
                duration_seconds=exit_record.duration_seconds,
            )
        with self._transaction() as db:
            replica = self.find_replica(close.replica_id) or ReplicaRow(replica_id=close.replica_id)
            replica = msgspec.structs.replace(
                replica,
                crashes=close.crashes,
                port_conflicts=close.port_conflicts,
                last_ended_at=now,
                last_exit=ended,
            )
            self._save_replica(replica)
            db.execute("DELETE FROM attempts WHERE replica_id = ? AND attempt = ?", key)
            db.execute("DELETE FROM port_leases WHERE replica_id = ? AND attempt = ?", key)

    def forget_crashes(self, replica_id: str) -> None:
        """The replica has proved itself: its next crash is the first one again."""
        with self._transaction():
            replica = self.find_replica(replica_id)
            if replica is not None:
                self._save_replica(msgspec.structs.replace(replica, crashes=0))

    def refuse(self, replica_id: str, generation: int, reason: str) -> None:
        """Remember that this generation of a replica cannot be launched, and why."""
        with self._transaction():
            replica = self.find_replica(replica_id) or ReplicaRow(replica_id=replica_id)
            self._save_replica(
                msgspec.structs.replace(
                    replica, generation=generation, refusal=reason, crashes=0, port_conflicts=0
                )
            )

    def forget_replica(self, replica_id: str) -> bool:
        """Drop a replica that has no open attempt; False if it has one."""
        with self._transaction() as db:
            still_open = db.execute("SELECT 1 FROM attempts WHERE replica_id = ?", (replica_id,)).fetchone()
            if still_open:
                return False
            db.execute("DELETE FROM replicas WHERE replica_id = ?", (replica_id,))
            return True

    def leased_ports(self) -> frozenset[int]:
        """Return every port that an open attempt holds."""
        with self._lock:
            return frozenset(row[0] for row in self._db.execute("SELECT port FROM port_leases"))

    def _save_replica(self, replica: ReplicaRow) -> None:
        self._db.execute(
            "REPLACE INTO replicas VALUES (?, ?)",
            (replica.replica_id, msgspec.msgpack.encode(replica)),
        )

    def _save_attempt(self, attempt: AttemptRow) -> None:
        self._db.execute(
            "UPDATE attempts SET body = ? WHERE replica_id = ? AND attempt = ?",
            (msgspec.msgpack.encode(attempt), attempt.replica_id, attempt.attempt),
        )

    # -- commands --------------------------------------------------------------------------------
    def find_outcome(self, command_id: str) -> tuple[str, str] | None:
        """Return (outcome, reason) of a command that was taken in before."""
        with self._lock:
            row = self._db.execute(
                "SELECT outcome, reason FROM commands WHERE command_id = ?", (command_id,)
            ).fetchone()
        return None if row is None else (row[0], row[1])

    def save_outcome(self, command_id: str, outcome: str, reason: str) -> None:
        """Remember a command's outcome; the oldest of many are dropped."""
        with self._transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO commands (command_id, outcome, reason) VALUES (?, ?, ?)",
                (command_id, outcome, reason),
            )
            db.execute(
                "DELETE FROM commands WHERE number <= (SELECT max(number) FROM commands) - ?",
                (_REMEMBERED_COMMANDS,),
            )

    # -- model files -----------------------------------------------------------------------------
    def find_digest(self, path: str, fingerprint: str) -> str | None:
        """Return the SHA-256 computed earlier, if the file has not changed since."""
        with self._lock:
            row = self._db.execute(
                "SELECT sha256 FROM model_files WHERE path = ? AND fingerprint = ?",
                (path, fingerprint),
            ).fetchone()
        return None if row is None else str(row[0])

    def save_digests(self, digests: Iterable[tuple[str, str, str]]) -> None:
        """Remember (path, fingerprint, sha256) of files."""
        with self._transaction() as db:
            db.executemany("REPLACE INTO model_files VALUES (?, ?, ?)", list(digests))
