"""Running an engine's server process: socket first, then the model, drain at SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from workers.engines.openai_server.metrics import EngineMetrics
from workers.engines.openai_server.port import TextEngine
from workers.engines.openai_server.routes import Api, build_app
from workers.protocol import names

log = logging.getLogger(__name__)

EXIT_USAGE = 2
EXIT_LOAD_FAILED = 1

_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 1
_BACKLOG = 512


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How an engine serves."""

    model_name: str
    host: str
    port: int
    api_key: str
    drain_seconds: float = 30.0
    ignore_sigterm: bool = False
    ends_when_failed: bool = False
    """Whether a failure after loading ends the process, and does not only show in its health."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every engine of ours understands."""
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drain-seconds", type=float, default=30.0)


def settings_from(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> ServerSettings:
    """Read the common flags and the API key. Exits 2 when the key is missing."""
    api_key = os.environ.get(names.ENV_ENGINE_API_KEY, "")
    if not api_key:
        parser.error(f"{names.ENV_ENGINE_API_KEY} must be set: an engine never serves without a key")
    return ServerSettings(
        model_name=arguments.served_model_name,
        host=arguments.host,
        port=arguments.port,
        api_key=api_key,
        drain_seconds=arguments.drain_seconds,
    )


def configure_logging() -> None:
    """Log to standard error, one line an event."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def serve(
    engine: TextEngine,
    metrics: EngineMetrics,
    settings: ServerSettings,
    *,
    wrap: Callable[[ASGIApp], ASGIApp] | None = None,
) -> int:
    """Open the port, load the engine, serve until told to end. Returns the exit status."""
    try:
        listener = _listen(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host} port {settings.port}"
        log.error("cannot listen on %s: %s", where, error)  # noqa: TRY400 - says all; no traceback
        return EXIT_USAGE
    api = Api(engine, metrics, settings.model_name, settings.api_key)
    app: ASGIApp = build_app(api, settings.api_key)
    if wrap is not None:
        app = wrap(app)
    server = _Server(_uvicorn_config(app))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run(server, listener, api, engine, settings))
    engine.stop()
    return status


class _Server(uvicorn.Server):
    """uvicorn without its own signals: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(
    server: _Server,
    listener: socket.socket,
    api: Api,
    engine: TextEngine,
    settings: ServerSettings,
) -> int:
    told_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if not settings.ignore_sigterm:
            loop.add_signal_handler(number, told_to_end.set)
        else:
            loop.add_signal_handler(number, log.warning, "ignoring signal %d", number)
    log.info("listening on %s port %d", *listener.getsockname()[:2])
    engine.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ending = asyncio.create_task(told_to_end.wait())
    try:
        status = await _wait_for_end(serving, ending, engine, settings)
        if status == 0:
            api.draining = True
            await _drain(api, settings.drain_seconds)
        server.should_exit = True
        await serving
    finally:
        ending.cancel()
    return status


async def _wait_for_end(
    serving: asyncio.Task[None], ending: asyncio.Task[bool], engine: TextEngine, settings: ServerSettings
) -> int:
    """Wait until told to end (0), or until the engine fails (1: a retry may help, serving cannot).

    One that has loaded is watched only if its failure is to end the process.
    """
    while True:
        status = engine.readiness().status
        if status == "failed":
            return EXIT_LOAD_FAILED
        watched = status == "loading" or settings.ends_when_failed
        done, _ = await asyncio.wait(
            {serving, ending},
            timeout=_POLL_SECONDS if watched else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if done:
            return 0


async def _drain(api: Api, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while api.open_generations.count:
        if time.monotonic() >= deadline:
            count = api.open_generations.count
            log.warning("drain: ending with %d open requests after %.1f s", count, seconds)
            return
        await asyncio.sleep(_POLL_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.settimeout(0)  # asyncio wants it so
    return listener


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
