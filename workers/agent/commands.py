"""What the agent does with each command: check, journal, act, answer."""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from workers.agent.journal import Journal, Wish
from workers.agent.supervisor import merge_wish
from workers.protocol import v1

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_Fenced: TypeAlias = (
    v1.ApplyDesired
    | v1.ApplyWeights
    | v1.TailLog
    | v1.EndProcess
    | v1.SetKvLimits
    | v1.MoveSession
    | v1.LetSessionGo
    | v1.ForgetReplica
)
"""Commands of a lease: refused once a newer one is known."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a command."""

    outcome: str
    reason: str = ""
    silent: bool = False
    """A canary that changed nothing: answered to the sender, not reported."""


@dataclass(frozen=True, slots=True)
class Reactions:
    """What commands set in motion elsewhere in the agent."""

    wake: Callable[[], None]
    say_hello: Callable[[], None]
    report: Callable[[v1.Report], None]
    take_weights: Callable[[v1.ApplyWeights], str]
    """Has these weights on the node's disk from now on. Returns why not, or nothing."""
    tail_log: Callable[[v1.TailLog], None]
    end_process: Callable[[v1.EndProcess], str]
    """Begins to end a process, whose end is reported when it comes. Returns why not, or nothing."""
    set_kv_limits: Callable[[v1.SetKvLimits], str]
    """Changes what a replica may have of the KV pool. Returns why not, or nothing."""
    move_session: Callable[[v1.MoveSession], str]
    """Begins to send a session, which is reported when it is over. Returns why not, or nothing."""
    let_session_go: Callable[[v1.LetSessionGo], str]
    """Begins to free what a replica has of a session. Returns why not, or nothing."""


class CommandDesk:
    """Takes sealed commands in."""

    def __init__(self, node_id: str, node_key: bytes, journal: Journal, reactions: Reactions) -> None:
        self._node_id = node_id
        self._node_key = node_key
        self._journal = journal
        self._reactions = reactions
        self._lock = threading.Lock()

    @property
    def lease_epoch(self) -> int:
        """Newest lease epoch that was taken in; 0 before the first."""
        wish = self._journal.wish()
        return wish.lease_epoch if wish else 0

    def take(self, data: bytes) -> str:
        """Take one command in; returns the outcome in words. Never raises for a bad message."""
        try:
            envelope = v1.open_envelope(data)
            if envelope.node_id != self._node_id:
                raise v1.ForgedMessageError(f"addressed to node {envelope.node_id}")
            command = v1.decode_command(envelope, node_key=self._node_key)
        except v1.ProtocolError as error:
            logger.warning("refused a message: %s", error)
            return f"refused: {error}"
        with self._lock:
            answer = self._answer(command)
        if not answer.silent:
            self._reactions.report(
                v1.CommandResult(
                    node_id=self._node_id,
                    command_id=command.command_id,
                    outcome=answer.outcome,
                    reason=answer.reason,
                )
            )
        return f"{answer.outcome}: {answer.reason}" if answer.reason else answer.outcome

    def _answer(self, command: v1.Command) -> Answer:
        known = self._journal.find_outcome(command.command_id)
        if known is not None:
            return Answer(*known)  # delivered twice: said again, not done again
        try:
            answer = self._carry_out(command)
        except sqlite3.Error as error:
            # Not remembered: the same command may come again and then succeed.
            logger.exception("command %s failed", command.command_id)
            return Answer("failed", f"journal: {error}")
        if not answer.silent:
            self._journal.save_outcome(command.command_id, answer.outcome, answer.reason)
        return answer

    def _carry_out(self, command: v1.Command) -> Answer:
        if isinstance(command, v1.RequestHello):  # for when the lease is in doubt, so no epoch is checked
            logger.info("hello asked for: %s", command.reason)
            self._reactions.say_hello()
            return Answer("done")
        return self._fenced(command) or self._obey(command)

    def _obey(self, command: _Fenced) -> Answer:
        match command:
            case v1.ApplyDesired():
                return self._apply_desired(command)
            case v1.TailLog():
                return self._tail_log(command)
            case v1.EndProcess() | v1.ApplyWeights():
                return self._begin(command)
            case v1.SetKvLimits():
                return self._set_kv_limits(command)
            case v1.MoveSession() | v1.LetSessionGo():
                return self._begin_with_session(command)
            case v1.ForgetReplica():
                return self._forget(command)

    def _fenced(self, command: v1.Command) -> Answer | None:
        epoch = self.lease_epoch
        if command.lease_epoch >= epoch:
            return None
        return Answer("refused", f"lease epoch {command.lease_epoch} is over; now {epoch}")

    def _apply_desired(self, command: v1.ApplyDesired) -> Answer:
        for spec in command.replicas:
            if not _SAFE_ID.fullmatch(spec.replica_id):
                return Answer("refused", f"replica id {spec.replica_id!r} is not usable")
        before = self._journal.wish()
        if before is not None and command.revision < before.revision:
            # The lease may be newer although the wish is not.
            self._journal.save_wish(
                Wish(revision=before.revision, lease_epoch=command.lease_epoch, specs=before.specs)
            )
            return Answer("done", f"revision {before.revision} is known already")
        wish = Wish(
            revision=command.revision,
            lease_epoch=command.lease_epoch,
            specs=merge_wish(before.specs if before else (), command.replicas),
        )
        if wish == before:
            return Answer("done", silent=True)
        self._journal.save_wish(wish)
        self._reactions.wake()
        return Answer("done")

    def _tail_log(self, command: v1.TailLog) -> Answer:
        if not _SAFE_ID.fullmatch(command.replica_id):
            return Answer("refused", f"replica id {command.replica_id!r} is not usable")
        self._reactions.tail_log(command)
        return Answer("done")

    def _begin(self, command: v1.EndProcess | v1.ApplyWeights) -> Answer:
        if isinstance(command, v1.EndProcess):
            refusal = self._reactions.end_process(command)
        else:
            refusal = self._reactions.take_weights(command)
        # Begun is not done: what becomes of it is reported once it is known.
        return Answer("refused", refusal) if refusal else Answer("done", silent=True)

    def _set_kv_limits(self, command: v1.SetKvLimits) -> Answer:
        refusal = self._reactions.set_kv_limits(command)
        return Answer("refused", refusal) if refusal else Answer("done")

    def _begin_with_session(self, command: v1.MoveSession | v1.LetSessionGo) -> Answer:
        if isinstance(command, v1.MoveSession):
            refusal = self._reactions.move_session(command)
        else:
            refusal = self._reactions.let_session_go(command)
        return Answer("refused", refusal) if refusal else Answer("done", silent=True)

    def _forget(self, command: v1.ForgetReplica) -> Answer:
        wish = self._journal.wish()
        wanted = {spec.replica_id for spec in wish.specs} if wish else set()
        kept = [
            replica_id
            for replica_id in command.replica_ids
            # Forgetting a wanted one would begin its attempts, and their tokens, from 1 again.
            if replica_id in wanted or not self._journal.forget_replica(replica_id)
        ]
        self._reactions.wake()
        if kept:
            return Answer("failed", f"still wanted or not gone: {', '.join(kept)}")
        return Answer("done")
