"""The last turn of each session, as its request and its answer went by: what is needed to have it again.

The engine holds the same content as KV; nothing is written anywhere, and all of it ends with the process.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TURN_PATHS = frozenset({CHAT, TEXT})
_MOST_BYTES = 64 << 20
_MOST_ANSWER_BYTES = 4 << 20
_SESSION_BYTES = 512
"""Of an entry beside its content, about."""
_SAYS_THE_PROMPT = frozenset(
    {
        *("model", "messages", "prompt", "tools", "documents", "chat_template", "chat_template_kwargs"),
        *("add_special_tokens", "cache_salt", "reasoning_effort"),
    }
)
"""Fields of a request that its prompt depends on; all others only say how to answer."""
_MEDIA_FIELDS = frozenset({"prompt_embeds", "mm_processor_kwargs"})


class NothingToMoveError(Exception):
    """What is kept of a session is not enough to have its context again."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session, and its answer as far as it came."""

    session_id: str
    path: str
    body: bytes
    answer: list[bytes] = field(default_factory=list)
    answer_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """What keeping it costs."""
        return len(self.body) + self.answer_bytes


@dataclass(slots=True, eq=False)
class _Session:
    last: Turn | None = None
    open_turns: int = 0
    newest: int = 0
    """Number of the turn that began last; 0: none has here."""


class KeptTurns:
    """Last turns of sessions, the least recently used ones dropped first. For one thread."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._used_bytes = 0
        self._begun = 0
        """Of all sessions, so that no number comes twice, not even where a session was dropped between."""

    @property
    def used_bytes(self) -> int:
        """What is kept now."""
        return self._used_bytes

    def begin(self, session_id: str, path: str, body: bytes) -> Turn:
        """Note that a turn begins."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _Session()
            self._used_bytes += _SESSION_BYTES
        self._sessions.move_to_end(session_id)
        session.open_turns += 1
        self._begun += 1
        session.newest = self._begun
        return Turn(session_id, path, body)

    def add(self, turn: Turn, piece: bytes) -> None:
        """Keep a piece of its answer; of one that is too long nothing is kept."""
        turn.answer_bytes += len(piece)
        if turn.answer_bytes <= _MOST_ANSWER_BYTES:
            turn.answer.append(piece)
        else:
            turn.answer.clear()

    def end(self, turn: Turn, *, was_served: bool, is_whole: bool) -> None:
        """Note its end: if it was served it is the session's last one, with its answer if that was whole."""
        session = self._sessions[turn.session_id]
        session.open_turns -= 1
        if was_served:
            if not is_whole or turn.answer_bytes > _MOST_ANSWER_BYTES:
                turn.answer.clear()
            turn.answer_bytes = sum(map(len, turn.answer))
            self._replace(session, turn)
        elif session.last is None and not session.open_turns:
            self.drop(turn.session_id)
        self._make_room()

    def adopt(self, session_id: str, path: str, body: bytes, *, newest: int = 0) -> None:
        """Take a session over from another engine, unless one has begun here after the turn `newest`.

        What is kept of it from before it went there is older than what comes back.
        """
        session = self._sessions.setdefault(session_id, _Session())
        if session.newest != newest or session.open_turns:
            return
        if session.last is None:
            self._used_bytes += _SESSION_BYTES
        self._replace(session, Turn(session_id, path, body))
        self._sessions.move_to_end(session_id)
        self._make_room()

    def last(self, session_id: str) -> Turn | None:
        """Its last turn, if it is kept."""
        session = self._sessions.get(session_id)
        return session.last if session is not None else None

    def open_turns(self, session_id: str) -> int:
        """Turns of it that run."""
        session = self._sessions.get(session_id)
        return session.open_turns if session is not None else 0

    def newest(self, session_id: str) -> int:
        """Number of the turn of it that began last; 0 where nothing is known of one."""
        session = self._sessions.get(session_id)
        return session.newest if session is not None else 0

    def drop(self, session_id: str) -> bool:
        """Forget a session of which no turn runs; says whether there was one."""
        session = self._sessions.get(session_id)
        if session is None or session.open_turns:
            return False
        self._used_bytes -= _SESSION_BYTES + (session.last.size_bytes if session.last else 0)
        del self._sessions[session_id]
        return True

    def _replace(self, session: _Session, turn: Turn) -> None:
        self._used_bytes += turn.size_bytes - (session.last.size_bytes if session.last else 0)
        session.last = turn

    def _make_room(self) -> None:
        for session_id in list(self._sessions):
            if self._used_bytes <= self._most_bytes:
                return
            self.drop(session_id)


def request_again(turn: Turn) -> dict[str, Any]:
    """Return the request that has an engine read a turn with its answer, and answer one token.

    Raises `NothingToMoveError` where its prompt cannot be made again elsewhere.
    """
    asked = _object(turn.body)
    if _MEDIA_FIELDS & asked.keys() or _has_media(asked.get("messages")):
        raise NothingToMoveError("its prompt is not all text")
    request = {name: value for name, value in asked.items() if name in _SAYS_THE_PROMPT}
    if asked.get("tool_choice") == "none":
        request["tool_choice"] = "none"
    said = _answer(b"".join(turn.answer), is_chat=turn.path == CHAT)
    if turn.path == CHAT:
        if not isinstance(request.get("messages"), list):
            raise NothingToMoveError("its last request has no messages")
        request["messages"] = [*request["messages"], *([said] if said else [])]
    elif isinstance(request.get("prompt"), str):
        request["prompt"] += said.get("text", "")
    elif _is_token_ids(request.get("prompt")):
        request["prompt"] += said.get("token_ids", [])
    else:
        raise NothingToMoveError("its last request has several prompts or none")
    return request | {"max_tokens": 1, "temperature": 0.0, "stream": False}


def only_prompt(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request of `request_again` without anything that it would not have made."""
    allowed = _SAYS_THE_PROMPT | {"tool_choice"}
    kept = {name: value for name, value in request.items() if name in allowed}
    return kept | {"max_tokens": 1, "temperature": 0.0, "stream": False}


def _object(text: bytes) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise NothingToMoveError("its last request cannot be read") from error
    if not isinstance(read, dict):
        raise NothingToMoveError("its last request cannot be read")
    return read


def _has_media(messages: object) -> bool:
    """Whether a message has parts that are not text."""
    parts = [
        part
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def _is_token_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


def _answer(told: bytes, *, is_chat: bool) -> dict[str, Any]:
    """What the engine said, as the client will repeat it; empty where that cannot be told."""
    if not told:
        return {}
    try:
        if told.startswith((b"data:", b":")):
            return _streamed(told, is_chat=is_chat)
        (choice,) = json.loads(told)["choices"]
        if not is_chat:
            return {"text": choice["text"], "token_ids": choice.get("token_ids") or []}
        message = choice["message"]
        calls = message.get("tool_calls")
        return {"role": "assistant", "content": message.get("content")} | (
            {"tool_calls": calls} if calls else {}
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _streamed(told: bytes, *, is_chat: bool) -> dict[str, Any]:
    """The same of a stream. Tool calls come in parts there, and the request alone is moved then."""
    pieces: list[str] = []
    token_ids: list[int] = []
    for line in told.splitlines():
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            continue
        for choice in json.loads(line[5:]).get("choices") or ():
            part = choice["delta"] if is_chat else choice
            if choice.get("index") or part.get("tool_calls"):
                return {}
            pieces.append(part.get("content" if is_chat else "text") or "")
            token_ids += choice.get("token_ids") or ()
    text = "".join(pieces)
    return {"role": "assistant", "content": text} if is_chat else {"text": text, "token_ids": token_ids}
