"""A gateway as a process of its own, and visitors who chat through it all the time."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from django.contrib.auth.models import User

from exaserve_ops.access.services import create_api_key
from exaserve_ops.lib import clock
from tests.fakes.fleet import FLEET_SECRET
from tests.fakes.node import wait_for

CODE = Path(__file__).resolve().parents[2]
_PAUSE_SECONDS = 0.1

logging.getLogger("httpx").setLevel(logging.WARNING)  # visitors would fill the report of any failure


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def inference_key() -> str:
    """A key that the controllers will tell the gateways of."""
    user, _ = User.objects.get_or_create(username="visitor")
    _, text = create_api_key(
        user=user, name="visitor", scopes=("inference",), actor="user:test", now=clock.now()
    )
    return text


@dataclass(frozen=True, slots=True)
class Answer:
    """What a visitor got. Status 0: no answer at all."""

    status: int
    replica: str = ""
    route: str = ""
    text: str = ""


@dataclass
class FrontDoor:
    """One gateway; killed at the end."""

    folder: Path
    redis_url: str
    key: str
    model: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        with (self.folder / f"gateway-{self.port}.log").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "exaserve_ops.gateway"],
                cwd=CODE,
                env={
                    "PATH": os.environ["PATH"],
                    "REDIS_URL": self.redis_url,
                    "EXAOPS_FLEET_SECRET": FLEET_SECRET.hex(),
                    "EXAOPS_GATEWAY_PORT": str(self.port),
                },
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )

    def ask(self, session: str = "", *, seconds: float = 15.0) -> Answer:
        """One short chat."""
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        headers = {"Authorization": f"Bearer {self.key}"} | ({"x-session-id": session} if session else {})
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        try:
            reply = httpx.post(url, json=body, headers=headers, timeout=seconds)
        except httpx.HTTPError as error:
            return Answer(0, text=repr(error))
        return Answer(
            reply.status_code,
            reply.headers.get("x-exaops-replica", ""),
            reply.headers.get("x-exaops-route", ""),
            reply.text,
        )

    def wait_until_serving(self) -> None:
        wait_for(lambda: self.ask().status == 200, "the gateway to serve", seconds=40)

    def is_stale(self) -> bool:
        """Whether the gateway says that its table is an old one."""
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=5).text
        [line] = [line for line in text.splitlines() if "route_table_stale" in line and line[0] != "#"]
        return float(line.rpartition(" ")[2]) == 1

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Visitors:
    """Sessions that chat one after another, without a pause worth the name, until told to leave."""

    def __init__(self, door: FrontDoor, sessions: Sequence[str]) -> None:
        self._door = door
        self._sessions = sessions
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._answers: list[tuple[str, Answer]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def answers(self) -> list[tuple[str, Answer]]:
        """All so far: session and answer."""
        with self._lock:
            return list(self._answers)

    def count(self) -> int:
        return len(self.answers())

    def leave(self) -> list[tuple[str, Answer]]:
        self._leaving.set()
        self._thread.join(30)
        return self.answers()

    def _run(self) -> None:
        turn = 0
        while not self._leaving.wait(_PAUSE_SECONDS):
            session = self._sessions[turn % len(self._sessions)]
            turn += 1
            answer = self._door.ask(session)
            with self._lock:
                self._answers.append((session, answer))


def refused(answers: Sequence[tuple[str, Answer]]) -> list[tuple[str, Answer]]:
    """Those that got no whole answer."""
    return [(session, answer) for session, answer in answers if answer.status != 200]
