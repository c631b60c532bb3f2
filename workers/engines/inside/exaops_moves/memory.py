"""Has SGLang give its memory back, or take it again, once, however often it is asked.

Its scheduler ends, and the server with it, if memory is to go or come back twice. Whoever asks may die
before the answer, and another one, who knows of no answer, asks again or for the other of both. What stands
here lives as long as the scheduler: it knows what became of the first request, and answers the second by it.
"""

from __future__ import annotations

import asyncio
import hmac
import json

from .inner import App, Receive, Scope, Send, ask, read_body, replayed

_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
_LEAVES = {_RELEASE: True, _RESUME: False}
_MOST_BODY_BYTES = 1 << 16
_OK = 200


class MemoryTurns:
    """An engine's HTTP application, whose memory goes and comes back by turns."""

    def __init__(self, app: App, key: str) -> None:
        """Wrap `app`; whoever does not know `key` is left to it."""
        self._app = app
        self._key = key
        self._is_away = False
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[tuple[int, bytes]]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] not in _LEAVES or not self._has_key(scope):
            await self._app(scope, receive, send)
            return
        body = await read_body(receive, _MOST_BODY_BYTES)
        if body is None:
            return
        if not _is_of_all_memory(body):  # whoever moves parts keeps account of them
            await self._app(scope, replayed(body, receive), send)
            return
        change = asyncio.get_running_loop().create_task(self._change(scope, scope["path"]))
        self._running.add(change)
        change.add_done_callback(self._running.discard)
        # It goes on when whoever asked has left: what has begun cannot be taken back.
        status, told = await asyncio.shield(change)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(told))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": told})

    async def _change(self, scope: Scope, path: str) -> tuple[int, bytes]:
        """Have memory go or come back, unless it has; one that is under way is waited for."""
        leaves = _LEAVES[path]
        async with self._one_at_a_time:
            if leaves == self._is_away:
                return _OK, b"{}"
            status, told = await ask(self._app, scope, path, {}, self._key)
            if status == _OK:
                self._is_away = leaves
            return status, told

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], b"Bearer " + self._key.encode())


def _is_of_all_memory(body: bytes) -> bool:
    """Whether a request names no part of it."""
    try:
        asked = json.loads(body or b"{}")
    except ValueError:
        return False
    return isinstance(asked, dict) and not asked.get("tags")
