"""An engine of vLLM's shape whose caches a test can look into: ASGI, words for tokens, no model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from workers.engines.inside.exaops_moves.app import SessionMoves

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
TOKEN_BYTES = 1024
ANSWER = "ships came by night"


@dataclass
class Fabric:
    """What KV goes over: exports of all engines, by engine and request."""

    held: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)


@dataclass
class ScriptedEngine:
    """Keeps prefixes, exports and imports as vLLM does with a connector, and answers always the same."""

    name: str
    fabric: Fabric
    key: str
    cached: list[tuple[str, ...]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    pulled_bytes: int = 0
    fails_imports: bool = False
    hangs_in_imports: bool = False
    """Until whoever asked leaves."""
    fails: bool = False
    """Answers nothing but refusals."""
    exports_nothing: bool = False
    calls_a_tool: bool = False
    holds: threading.Event = field(default_factory=threading.Event)
    """While it is clear, answers wait; prompts have been read then."""
    reading: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.holds.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/metrics":
            page = f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {self.pulled_bytes}.0\n'.encode()
            await _answer(send, 200, page)
        elif (b"authorization", f"Bearer {self.key}".encode()) not in scope["headers"]:
            await _answer(send, 401, b'{"error": "Unauthorized"}')
        else:
            await self._complete(scope["path"], json.loads(body), send)

    async def _complete(self, path: str, asked: dict[str, Any], send: Send) -> None:
        self.requests.append(asked)
        if self.fails:
            await _answer(send, 503, b'{"error": {"message": "engine dead"}}')
            return
        is_chat = path == "/v1/chat/completions"
        tokens = _rendered(asked) if is_chat else tuple(str(asked["prompt"]).split())
        params = asked.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            if self.hangs_in_imports:
                await asyncio.get_running_loop().create_future()
            exported = self.fabric.held.get((params["remote_engine_id"], params["remote_request_id"]))
            if self.fails_imports or exported is None:
                await _answer(send, 500, b'{"error": {"message": "KV load failed"}}')
                return
            del self.fabric.held[params["remote_engine_id"], params["remote_request_id"]]
            self.pulled_bytes += TOKEN_BYTES * len(exported)
            self.cached.append(exported)
        found = max((_common(tokens, one) for one in self.cached), default=0)
        self.cached.append(tokens)
        self.reading.set()
        await asyncio.to_thread(self.holds.wait)
        answer: dict[str, Any] = {"usage": _usage(len(tokens), found)}
        if params.get("do_remote_decode") and not self.exports_nothing:
            request_id = f"request-{len(self.requests)}"
            self.fabric.held[self.name, request_id] = tokens
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.name,
                "remote_request_id": request_id,
                "remote_block_ids": [list(range(len(tokens)))],
            }
        if asked.get("stream"):
            await self._stream(send, is_chat=is_chat)
        else:
            await _answer(send, 200, json.dumps(answer | {"choices": [self._choice(is_chat)]}).encode())

    def _choice(self, is_chat: bool) -> dict[str, Any]:
        if not is_chat:
            return {"index": 0, "text": f" {ANSWER}"}
        calls = [{"id": "c", "type": "function", "function": {"name": "count", "arguments": "{}"}}]
        message = {"role": "assistant", "content": ANSWER} | (
            {"tool_calls": calls} if self.calls_a_tool else {}
        )
        return {"index": 0, "message": message}

    async def _stream(self, send: Send, *, is_chat: bool) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number, word in enumerate(ANSWER.split()):
            text = word if number == 0 else f" {word}"
            choice = {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": f" {word}"}
            event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            for part in (event[:9], event[9:]):  # as a network may cut it
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _rendered(asked: dict[str, Any]) -> tuple[str, ...]:
    """A chat template that closes each message, and opens the assistant's."""
    told = [
        f"<{m['role']}> {m['content'] or ''} {m.get('tool_calls') or ''} <end>" for m in asked["messages"]
    ]
    return tuple(" ".join([*told, "<assistant>"]).split())


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _usage(prompt: int, found: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": found},
    }


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(engine: ScriptedEngine, moves: str, **bounds: float) -> Iterator[str]:
    """Serve an engine with what moves its sessions around it, and give its address."""
    app = SessionMoves(engine, engine.key, moves, **bounds)
    config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        engine.holds.set()
        server.should_exit = True
        thread.join()
        listener.close()
