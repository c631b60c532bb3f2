"""SGLang's server as far as its memory goes: ASGI, and ends as SGLang's scheduler does if told twice.

`delicate_server.py HOST PORT SECONDS` serves it as `sglang/entry.py` does, with what stands around it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from tests.fakes.delicate_engine import DelicateAdapter
from tests.fakes.scripted_engine import Receive, Scope, Send
from tests.fakes.tiny_engine import say
from workers.engines.base import EngineOptions, EngineRequest, Launch, LaunchContext
from workers.engines.endpoints import SLEEP, WAKE, find_endpoint
from workers.engines.inside.exaops_moves.memory import MemoryTurns
from workers.engines.sglang.endpoints import ENDPOINTS

ROOT = Path(__file__).parents[2]
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class SchedulerEndedError(Exception):
    """It was told what it had done already."""


@dataclass
class DelicateServer:
    """Takes its time, and counts what it was told."""

    seconds: float = 0.0
    told: list[str] = field(default_factory=list)
    is_away: bool = False
    is_busy: bool = False
    status: int = 200
    may_end: asyncio.Event | None = None
    """While it is clear, what was begun goes on."""
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return
        self.bodies.append((await receive()).get("body", b""))
        if scope["path"] in {RELEASE, RESUME}:
            await self._change(scope["path"])
        body = b"running 0\n" if scope["path"] == "/metrics" else b"{}"
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def end(self, path: str) -> None:
        """What comes of being told twice."""
        raise SchedulerEndedError(path)

    async def _change(self, path: str) -> None:
        self.told.append(path)
        leaves = path == RELEASE
        if self.status == 200 and (leaves == self.is_away or self.is_busy):
            self.end(path)
        self.is_busy = True
        await asyncio.sleep(self.seconds)
        if self.may_end is not None:
            await self.may_end.wait()
        self.is_busy = False
        self.is_away = leaves if self.status == 200 else self.is_away


class EndingServer(DelicateServer):
    """Takes its process with it."""

    def end(self, path: str) -> None:
        say(f"{path} at the wrong time")
        os._exit(1)


class DelicateServerAdapter(DelicateAdapter):
    """Launches this script, and asks it as SGLang."""

    def __init__(self, *, seconds: float) -> None:
        super().__init__(health_seconds=0.0, wake_seconds=0.0)
        self._seconds = seconds

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:  # noqa: ARG002 - the port's
        arguments = (context.host, str(context.ports[0]), str(self._seconds))
        argv = (sys.executable, "-u", str(Path(__file__)), *arguments)
        return Launch(argv=argv, env={"PYTHONPATH": str(ROOT), "KEY": context.api_key})

    def sleep_request(self) -> EngineRequest:
        return _request(SLEEP)

    def wake_request(self) -> EngineRequest:
        return _request(WAKE)


def _request(what: str) -> EngineRequest:
    found = find_endpoint(ENDPOINTS, what, ())
    assert found is not None
    return found


def main() -> None:
    """Serve."""
    host, port, seconds = sys.argv[1:]
    app = MemoryTurns(EndingServer(float(seconds)), os.environ["KEY"])
    uvicorn.run(app, host=host, port=int(port), log_level="warning", lifespan="off", ws="none")


if __name__ == "__main__":
    main()
