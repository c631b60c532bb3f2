"""Moves sessions between engines, around an engine's HTTP server: ASGI, whatever is inside.

The source is told to (`POST /kv/moves`) by its agent. It asks the target (`POST /kv/transfers/{id}`) how it
can take the session; reads the session's last turn once more with an export of its KV, where both can; and
hands over the text and where the KV lies (`PUT /kv/transfers/{id}`). The target asks its own engine for the
same prompt, which pulls the KV or computes it, and has the session's context in its prefix cache then. What
was exported and is not fetched comes free at the source by the connector's lease. The source gives up
nothing; it forgets the text once it is told that the session lives elsewhere (`DELETE /kv/sessions/{id}`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import time
from collections import OrderedDict
from typing import Any
from urllib.parse import unquote

from .inner import (
    KV_FIELD,
    App,
    BodyTooLargeError,
    Message,
    Receive,
    Scope,
    Send,
    ask,
    names_kv,
    read_body,
    replayed,
)
from .kept import TURN_PATHS, KeptTurns, NothingToMoveError, Turn, only_prompt, request_again
from .wire import (
    COMPUTED,
    EXPORT_IMPORT,
    NIXL,
    PROOF,
    TRANSFERS,
    WARM_PREFILL,
    MoveError,
    Target,
    proof,
    refused,
    transfer_key,
    untagged,
)

ENV_MOVES = "EXAOPS_SESSION_MOVES"
"""`export_import` or `warm_prefill`: what the engine was started for."""
_ENV_KEYS = ("VLLM_API_KEY", "EXAOPS_ENGINE_API_KEY")
_SESSION_HEADERS = (b"x-session-id", b"x-smg-routing-key", b"x-conversation-id")
_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRANSFER_ID = re.compile(r"[0-9a-f]{32}")
_OFFER_SECONDS = 30.0
_ANSWER_SECONDS = 20.0
_MOVE_SECONDS = 120.0
_TAKE_SECONDS = 110.0
"""The target has answered before its source gives up."""
_IMPORT_SECONDS = 30.0
"""As long as the source's connector keeps what it exported: later there is nothing to fetch."""
_REMEMBERED = 1024
_TOLD_SECONDS = 2.0
"""How long the connector's counter of bytes may lag behind."""
_POLL_SECONDS = 0.02
_OK = 200
_BYTES_COUNTER = b"vllm:nixl_bytes_transferred_sum"
_EXPORT = {"do_remote_decode": True, "do_remote_prefill": False}


class SessionMoves:
    """An engine's HTTP application, with what moves its sessions around it."""

    def __init__(
        self, app: App, key: str = "", moves: str = "", *, import_seconds: float = _IMPORT_SECONDS
    ) -> None:
        """Wrap `app`; without `key` and `moves` the environment says them.

        KV that is not here within `import_seconds`, with the wait for other imports, is computed.
        Without a key nothing is moved; what clients may not ask is refused in any case.
        """
        self._app = app
        self._key = key or next((os.environ[name] for name in _ENV_KEYS if os.environ.get(name)), "")
        self._moves = moves or os.environ.get(ENV_MOVES, "none")
        self._is_on = bool(self._key) and self._moves in {EXPORT_IMPORT, WARM_PREFILL}
        self._kept = KeptTurns()
        self._expected: OrderedDict[str, float] = OrderedDict()
        """Transfers that may come, with the time until which."""
        self._used: OrderedDict[str, None] = OrderedDict()
        self._moving: set[str] = set()
        self._imports = asyncio.Lock()
        self._import_seconds = import_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith("/kv/"):
            await _respond(send, *await self._own(scope, receive))
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            await self._pass(scope, receive, send)

    # -- what clients ask ---------------------------------------------------------------------------
    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)  # before anything is read
            body = await read_body(receive)
        except BodyTooLargeError:
            await _respond(send, 413, _error("body_too_large", "The body is too large."))
            return
        except MoveError as error:
            await _respond(send, error.status, _error(error.code, error.message))
            return
        if body is None:
            return
        session_id = _session_of(scope) if self._is_on and scope["path"] in TURN_PATHS else ""
        again = replayed(body, receive)
        if names_kv(body):
            told = _error("not_allowed", f"{KV_FIELD} is not for clients: leave it out.")
            await _respond(send, 400, told)
        elif session_id:
            await self._follow(scope, self._kept.begin(session_id, scope["path"], body), again, send)
        else:
            await self._app(scope, again, send)

    async def _follow(self, scope: Scope, turn: Turn, receive: Receive, send: Send) -> None:
        """Serve a turn and keep it."""
        was_served = is_whole = False

        async def watch(message: Message) -> None:
            nonlocal was_served, is_whole
            if message["type"] == "http.response.start":
                was_served = message["status"] == _OK
            elif message["type"] == "http.response.body":
                self._kept.add(turn, message.get("body", b""))
                is_whole = not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._kept.end(turn, was_served=was_served, is_whole=is_whole)

    # -- what agents and other engines ask ------------------------------------------------------------
    async def _own(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        try:
            return _OK, await self._serve(scope, receive)
        except MoveError as error:
            return error.status, _error(error.code, error.message)
        except BodyTooLargeError:
            return 413, _error("body_too_large", "The body is too large.")
        except NothingToMoveError as error:
            return 404, _error("session_unknown", f"There is nothing to move: {error}.")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return 400, _error("bad_request", f"This cannot be read: {error!r}.")

    async def _serve(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        if not self._is_on:
            raise MoveError(404, "not_found", "This engine moves no sessions.")
        path, method = unquote(scope["path"]), scope["method"]
        if path == "/kv/moves" and method == "POST":
            self._check_key(scope)
            return await self._move(scope, json.loads(await read_body(receive, 1 << 16) or b""))
        if path.startswith("/kv/sessions/") and method == "DELETE":
            self._check_key(scope)
            return {"let_go": self._kept.drop(path.removeprefix("/kv/sessions/"))}
        if path.startswith(TRANSFERS) and method in {"POST", "PUT"}:
            transfer_id = path.removeprefix(TRANSFERS)
            message = await self._proven(scope, receive, transfer_id)
            return self._offered(transfer_id) if method == "POST" else await self._take(scope, message)
        raise MoveError(404, "not_found", "There is nothing of that name.")

    def _check_key(self, scope: Scope) -> None:
        given, wanted = _header(scope, b"authorization"), b"Bearer " + self._key.encode()
        if self._key and not hmac.compare_digest(given, wanted):
            raise MoveError(401, "invalid_api_key", "Give this engine's key as a bearer token.")

    async def _proven(self, scope: Scope, receive: Receive, transfer_id: str) -> dict[str, Any]:
        """Body of a transfer's request, if whoever sent it knows the transfer's key."""
        if not _TRANSFER_ID.fullmatch(transfer_id):
            raise refused()
        number = bytes.fromhex(transfer_id)
        key = transfer_key(self._key, number)
        if not hmac.compare_digest(
            _header(scope, PROOF.encode()), proof(key, scope["method"], number).encode()
        ):
            raise refused()
        if scope["method"] == "PUT" and self._expected.pop(transfer_id, 0.0) < time.monotonic():
            raise MoveError(404, "not_expected", "This transfer is not expected, or not any more.")
        return untagged(key, number, await read_body(receive) or b"")

    # -- the source -----------------------------------------------------------------------------------
    async def _move(self, scope: Scope, order: dict[str, Any]) -> dict[str, Any]:
        session_id = str(order["session_id"])
        if session_id in self._moving:
            raise MoveError(409, "already_moving", "This session is being sent already.")
        self._moving.add(session_id)
        try:
            return await self._send(scope, session_id, order)
        finally:
            self._moving.discard(session_id)

    async def _send(self, scope: Scope, session_id: str, order: dict[str, Any]) -> dict[str, Any]:
        turn, newest = self._quiet(session_id)
        target = Target(order["target"], bytes.fromhex(order["transfer_id"]), bytes.fromhex(order["key"]))
        asked = await asyncio.to_thread(request_again, turn)
        can = {self._moves, (await target.ask("POST", {}, _ANSWER_SECONDS)).get("moves")}
        sends_kv = can == {EXPORT_IMPORT} and order.get("way") != WARM_PREFILL
        exported = await self._export(scope, turn, asked) if sends_kv else None
        message = {"session_id": session_id, "path": turn.path, "request": asked, "kv": exported}
        told = await target.ask("PUT", message, _MOVE_SECONDS)
        now = self._kept
        # What was dropped to make room meanwhile had no turn running, and none has begun since.
        turn_began = bool(now.open_turns(session_id)) or now.newest(session_id) not in {newest, 0}
        blocks = len(_flat(exported.get("remote_block_ids"))) if exported else 0
        return told | {"blocks": blocks, "sent_blocks": blocks, "turn_began": turn_began}

    def _quiet(self, session_id: str) -> tuple[Turn, int]:
        """Its last turn, while none runs, and the number of the one that began last."""
        if self._kept.open_turns(session_id):
            raise MoveError(409, "turn_runs", "A turn of this session is running.")
        turn = self._kept.last(session_id)
        if turn is None:
            raise MoveError(404, "session_unknown", "This engine has nothing of this session.")
        return turn, self._kept.newest(session_id)

    async def _export(self, scope: Scope, turn: Turn, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Have the engine hold the turn's KV for somebody to fetch; `None` where it would not."""
        answer = await self._compute(scope, turn.path, asked | {KV_FIELD: _EXPORT})
        exported = answer.get(KV_FIELD)
        return exported if isinstance(exported, dict) and exported.get("remote_block_ids") else None

    # -- the target -----------------------------------------------------------------------------------
    def _offered(self, transfer_id: str) -> dict[str, Any]:
        """Expect a transfer, once."""
        if transfer_id in self._used:
            raise MoveError(409, "transfer_used", "This transfer was offered before.")
        self._used[transfer_id] = None
        self._expected[transfer_id] = time.monotonic() + _OFFER_SECONDS
        for remembered in (self._used, self._expected):
            while len(remembered) > _REMEMBERED:
                remembered.popitem(last=False)
        return {"moves": self._moves}

    async def _take(self, scope: Scope, message: dict[str, Any]) -> dict[str, Any]:
        session_id, path = str(message["session_id"]), message["path"]
        if path not in TURN_PATHS or not _SESSION_ID.fullmatch(session_id):
            raise MoveError(400, "bad_request", "This is no turn of a session.")
        asked = only_prompt(message["request"])
        kv = message.get("kv") if self._moves == EXPORT_IMPORT else None
        began, newest = time.monotonic(), self._kept.newest(session_id)
        why, sent_bytes, answer = "", 0, None
        if kv is not None:
            try:
                answer, sent_bytes = await asyncio.wait_for(
                    self._import(scope, path, asked | {KV_FIELD: kv}), self._import_seconds
                )
            except asyncio.TimeoutError:
                why = f"its KV did not come: it was not here within {self._import_seconds:g} s."
            except MoveError as error:
                why = f"its KV did not come: {error.message}"
        if answer is None:
            answer = await self._compute(scope, path, asked, began + _TAKE_SECONDS - time.monotonic())
        body = json.dumps({name: asked[name] for name in asked if name != "max_tokens"}).encode()
        self._kept.adopt(session_id, path, body, newest=newest)
        usage = answer.get("usage") or {}
        return {
            "target_tokens": int(usage.get("prompt_tokens") or 0),
            "cached_tokens": int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            "sent_bytes": sent_bytes,
            "carrier": COMPUTED if kv is None or why else NIXL,
            "why": why,
            "target_seconds": time.monotonic() - began,
        }

    async def _import(self, scope: Scope, path: str, asked: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Have the engine pull KV, and count its bytes: one import at a time, so that they are its own."""
        async with self._imports:
            before = await self._pulled_bytes(scope)
            answer = await self._compute(scope, path, asked)
            after, until = await self._pulled_bytes(scope), time.monotonic() + _TOLD_SECONDS
            while after == before and time.monotonic() < until:
                await asyncio.sleep(_POLL_SECONDS)  # it is told with the engine's next step
                after = await self._pulled_bytes(scope)
            return answer, after - before

    async def _pulled_bytes(self, scope: Scope) -> int:
        status, page = await ask(self._app, scope, "/metrics", None, self._key)
        lines = page.splitlines() if status == _OK else []
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith(_BYTES_COUNTER)))

    async def _compute(
        self, scope: Scope, path: str, asked: dict[str, Any], seconds: float = _MOVE_SECONDS
    ) -> dict[str, Any]:
        """Have the engine read a prompt. Raises `MoveError` where it does not."""
        try:
            status, body = await asyncio.wait_for(ask(self._app, scope, path, asked, self._key), seconds)
        except asyncio.TimeoutError:
            raise MoveError(503, "busy", "The engine is busy.") from None
        answer = json.loads(body or b"{}")
        if status != _OK or not isinstance(answer, dict):
            # Not what it said: that may have of the prompt in it, and reasons are kept and shown.
            raise MoveError(502, "engine_refused", f"The engine answered {status}.")
        return answer


def _session_of(scope: Scope) -> str:
    """Session that a request belongs to; empty: none."""
    given = next((value for name in _SESSION_HEADERS if (value := _header(scope, name))), b"")
    text = given.decode("latin-1")
    return text if _SESSION_ID.fullmatch(text) else ""


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name.lower() == wanted), b"")


def _flat(blocks: object) -> list[object]:
    """Block ids, whatever groups they come in."""
    if not isinstance(blocks, list):
        return []
    return [block for part in blocks for block in (part if isinstance(part, list) else [part])]


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "type": "invalid_request_error", "param": None}}


async def _respond(send: Send, status: int, told: dict[str, Any]) -> None:
    body = json.dumps(told).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
