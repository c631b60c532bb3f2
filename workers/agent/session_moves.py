"""Has this node's engines send sessions to others, and free what lives elsewhere.

Each wish has a thread of its own, few at once: a transfer takes as long as its bytes, and no other
command waits for it. What was begun is answered by a report when it is over. If this agent dies
meanwhile nobody answers, and whoever asked counts the move as dropped: the session is still whole here.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import urllib3

from workers.agent import processes
from workers.agent.journal import AttemptRow
from workers.protocol import v1

MOVES_AT_ONCE = 4
_WAITING_AT_MOST = 32
_REMEMBERED = 1024
_CONNECT_SECONDS = 2.0
_LET_GO_SECONDS = 5.0
_MOST_SECONDS = 600.0
_OK = 200
_REASON_CHARACTERS = 500
_CODE_CHARACTERS = 64
ENGINE_UNREACHABLE = "engine_unreachable"

logger = logging.getLogger(__name__)


class SessionMoves:
    """Carries out what is asked of this node's ends of moves."""

    def __init__(
        self,
        node_id: str,
        attempts: Callable[[], Iterable[AttemptRow]],
        api_key: Callable[[str, int], str],
        report: Callable[[v1.Report], None],
    ) -> None:
        self._node_id = node_id
        self._attempts = attempts
        self._api_key = api_key
        self._report = report
        self._pool = ThreadPoolExecutor(MOVES_AT_ONCE, thread_name_prefix="move")
        self._lock = threading.Lock()
        self._begun: OrderedDict[str, None] = OrderedDict()
        """Commands of late, so that one that is delivered twice is not carried out twice."""
        self._under_way = 0
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(connect=_CONNECT_SECONDS))

    def stop(self) -> None:
        """Begin nothing more; what is under way ends with the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, command: v1.MoveSession) -> str:
        """Begin to send a session. Returns why not, or nothing."""
        row = self._attempt(command.replica_id, command.attempt)
        if isinstance(row, str):
            return row
        return self._submit(command.command_id, lambda: self._send(command))

    def let_go(self, command: v1.LetSessionGo) -> str:
        """Begin to free what a replica has of a session. Returns why not, or nothing."""
        row = self._attempt(command.replica_id, command.attempt)
        if isinstance(row, str):
            return row
        return self._submit(command.command_id, lambda: self._free(command))

    def _attempt(self, replica_id: str, attempt: int) -> AttemptRow | str:
        found = next((row for row in self._attempts() if row.key == (replica_id, attempt)), None)
        if found is None or not found.ports or found.leader is None:
            return f"attempt {attempt} of replica {replica_id} does not run here"
        # Before anything is sent: a stranger on the port must get none of the keys.
        label = processes.LaunchLabel(self._node_id, replica_id, attempt)
        if not processes.listens(processes.members(found.leader, label), found.ports[0]):
            return f"replica {replica_id} does not listen on port {found.ports[0]}"
        return found

    def _submit(self, command_id: str, work: Callable[[], None]) -> str:
        with self._lock:
            if command_id in self._begun:
                return ""
            if self._under_way >= _WAITING_AT_MOST:
                return f"{self._under_way} moves are under way on this node already"
            self._begun[command_id] = None
            if len(self._begun) > _REMEMBERED:
                self._begun.popitem(last=False)
            self._under_way += 1
        self._pool.submit(self._carry_out, work)
        return ""

    def _carry_out(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # top of the thread
            logger.exception("a move failed in an unforeseen way")
        finally:
            with self._lock:
                self._under_way -= 1

    def _send(self, command: v1.MoveSession) -> None:
        began = time.monotonic()
        wish = {
            "session_id": command.session_id,
            "transfer_id": command.transfer_id,
            "key": command.transfer_key,
            "target": command.target,
            "bytes_per_second": command.bytes_per_second,
            **({"way": command.way} if command.way else {}),
        }
        seconds = min(max(command.deadline_seconds, 1.0), _MOST_SECONDS)
        row = self._attempt(command.replica_id, command.attempt)  # it may have ended while this waited
        try:
            status, told = (
                (0, _error(ENGINE_UNREACHABLE, row))
                if isinstance(row, str)
                else self._ask(row, "POST", "/kv/moves", seconds, wish)
            )
        except urllib3.exceptions.HTTPError as error:
            status, told = 0, _error(ENGINE_UNREACHABLE, str(error))
        self._report(_result(self._node_id, command.command_id, status, told, time.monotonic() - began))

    def _free(self, command: v1.LetSessionGo) -> None:
        row = self._attempt(command.replica_id, command.attempt)  # it may have ended while this waited
        if isinstance(row, str):
            logger.info("event=session_not_let_go replica=%s error=%s", command.replica_id, row)
            return
        path = f"/kv/sessions/{quote(command.session_id, safe='')}"
        try:
            status, _ = self._ask(row, "DELETE", path, _LET_GO_SECONDS)
        except urllib3.exceptions.HTTPError as error:
            logger.info("event=session_not_let_go replica=%s error=%s", command.replica_id, error)
            return
        if status != _OK:
            # Its blocks leave with age instead.
            logger.info("event=session_not_let_go replica=%s status=%d", command.replica_id, status)

    def _ask(
        self, row: AttemptRow, method: str, path: str, seconds: float, body: object = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and body of an engine's answer. Raises `urllib3.exceptions.HTTPError`."""
        answer = self._http.request(
            method,
            f"http://{_bracketed(row.host)}:{row.ports[0]}{path}",
            headers={
                "Authorization": f"Bearer {self._api_key(*row.key)}",
                "Content-Type": "application/json",
            },
            body=None if body is None else json.dumps(body).encode(),
            timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=seconds),
        )
        try:
            told = json.loads(answer.data)
        except ValueError:
            told = {}
        return answer.status, told if isinstance(told, dict) else {}


def _result(
    node_id: str, command_id: str, status: int, told: dict[str, Any], seconds: float
) -> v1.SessionSent:
    if status == _OK:
        return v1.SessionSent(
            node_id=node_id,
            command_id=command_id,
            blocks=int(told.get("blocks", 0)),
            sent_blocks=int(told.get("sent_blocks", 0)),
            sent_bytes=int(told.get("sent_bytes", 0)),
            target_tokens=int(told.get("target_tokens", 0)),
            seconds=seconds,
            turn_began=bool(told.get("turn_began", True)),
            carrier=str(told.get("carrier", ""))[:_CODE_CHARACTERS],
            reason=str(told.get("why", ""))[:_REASON_CHARACTERS],
        )
    error = told.get("error")
    known = error if isinstance(error, dict) else {}
    code = str(known.get("code") or f"status_{status}")
    reason = str(known.get("message", ""))[:_REASON_CHARACTERS]
    return v1.SessionSent(
        node_id=node_id, command_id=command_id, code=code[:_CODE_CHARACTERS], reason=reason, seconds=seconds
    )


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
