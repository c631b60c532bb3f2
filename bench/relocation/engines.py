"""Real torch engines in processes of their own, which can be told at which step of a move to die.

They are forked off one process that has imported torch, as an agent's are, so one that was killed is back
in a fraction of a second. A *step* is a call of the move's code to the engine, or its answer.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from workers.engines.openai_server.port import Borrowed, HeldSession
from workers.engines.openai_server.serve import ServerSettings, serve
from workers.engines.torch_engine.config import ModelConfig, read_model_config
from workers.engines.torch_engine.engine import TorchEngine
from workers.engines.torch_engine.settings import EngineSettings
from workers.kv.neighbour import LentBlock
from workers.kv.transfer import Block, Ticket

MODEL = "m"
_PRELOAD = ["bench.relocation.engines", "workers.engines.torch_engine.loading"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica's place: what all of its processes have in common."""

    replica_id: str
    node: str
    model_dir: Path
    weights_cache: Path
    blocks: int
    pool_dir: Path | None = None
    """Folder of its node's KV pools; `None`: memory of its own."""


@dataclass(slots=True)
class Engine:
    """One process of a replica."""

    seat: Seat
    attempt: int
    port: int
    api_key: str
    process: BaseProcess
    fuse: Connection
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Two moves may choose one victim at once, and a connection carries one question at a time."""

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.is_alive()

    def die_at(self, step: int) -> bool:
        """Have it kill itself at the so-manieth step from now; 0: not at all. False if it is gone."""
        try:
            with self.turn:
                self.fuse.send(step)
                self.fuse.recv()
        except (OSError, EOFError):
            return False
        return True

    def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.join()
        with self.turn:
            self.fuse.close()


class Launcher:
    """Starts engines."""

    def __init__(self) -> None:
        """Set up; the process that engines are forked off is started with the first of them."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)

    def start(self, seat: Seat, attempt: int) -> Engine:
        """Start a process for a seat. It answers `/health` when it is ready."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        settings = EngineSettings(
            model_dir=seat.model_dir,
            model_name=MODEL,
            model_digest="bench",
            device="cpu",
            dtype="float32",
            num_blocks=seat.blocks,
            threads=1,
            weights_cache=seat.weights_cache,
            kv_pool_dir=seat.pool_dir,
            replica_id=seat.replica_id,
            attempt=attempt,
        )
        server = ServerSettings(MODEL, "127.0.0.1", port, secrets.token_hex(16), drain_seconds=1.0)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(settings, server, theirs), daemon=True)
        process.start()
        theirs.close()
        return Engine(seat, attempt, port, server.api_key, process, ours)


def _run(settings: EngineSettings, server: ServerSettings, told: Connection) -> None:
    """Be an engine. `told` says when to die."""
    fuse = _Fuse()
    threading.Thread(target=_listen, args=(told, fuse), daemon=True).start()
    engine = _MortalEngine(settings, read_model_config(settings.model_dir), fuse)
    status = serve(engine, engine.metrics, server)
    os._exit(status)  # as the engine's own program does


def _listen(told: Connection, fuse: _Fuse) -> None:
    while True:
        try:
            fuse.steps = told.recv()
            told.send(None)
        except (OSError, EOFError):
            os._exit(0)  # whoever started it is gone


class _Fuse:
    """Counts steps, and ends the process at the one it was set to."""

    def __init__(self) -> None:
        self.steps = 0
        """Until death; 0: not set."""

    def burn(self) -> None:
        """Count one step."""
        if self.steps:
            self.steps -= 1
            if not self.steps:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)  # not one instruction more of anything


class _MortalEngine(TorchEngine):
    """A torch engine with a fuse in each call that a move makes, and in each answer."""

    def __init__(self, settings: EngineSettings, config: ModelConfig, fuse: _Fuse) -> None:
        super().__init__(settings, config)
        self._fuse = fuse

    def held(self, session_id: str) -> Future[HeldSession]:
        """See `SessionMover`."""
        return self._burning(lambda: super(_MortalEngine, self).held(session_id))

    def read_blocks(self, digests: Sequence[bytes]) -> Future[list[bytes]]:
        """See `SessionMover`."""
        return self._burning(lambda: super(_MortalEngine, self).read_blocks(digests))

    def lend_blocks(self, ticket: Ticket, first: int, digests: Sequence[bytes]) -> Future[list[LentBlock]]:
        """See `SessionMover`."""
        return self._burning(lambda: super(_MortalEngine, self).lend_blocks(ticket, first, digests))

    def borrow_blocks(
        self, ticket: Ticket, first: int, digests: Sequence[bytes], lent: Sequence[LentBlock]
    ) -> Future[Borrowed]:
        """See `SessionMover`."""
        return self._burning(lambda: super(_MortalEngine, self).borrow_blocks(ticket, first, digests, lent))

    def known_blocks(self, chain: Sequence[bytes]) -> Future[int]:
        """See `SessionMover`."""
        return self._burning(lambda: super(_MortalEngine, self).known_blocks(chain))

    def take_blocks(self, blocks: Sequence[Block]) -> Future[int]:
        """See `SessionMover`."""
        return self._burning(lambda: super(_MortalEngine, self).take_blocks(blocks))

    def adopt_session(self, session_id: str, chain: Sequence[bytes]) -> Future[int]:
        """See `SessionMover`."""
        return self._burning(lambda: super(_MortalEngine, self).adopt_session(session_id, chain))

    def let_session_go(self, session_id: str) -> Future[bool]:
        """See `SessionMover`."""
        return self._burning(lambda: super(_MortalEngine, self).let_session_go(session_id))

    def _burning(self, call: Callable[[], Future[_T]]) -> Future[_T]:
        self._fuse.burn()
        answer = call()
        answer.add_done_callback(lambda _: self._fuse.burn())
        return answer
