"""`python -m workers.engines.simulated_engine`: a server that behaves, or misbehaves, as told."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from workers.engines.openai_server.serve import (
    add_server_arguments,
    configure_logging,
    serve,
    settings_from,
)
from workers.engines.simulated_engine.engine import SimulatedEngine, SimulationSettings
from workers.engines.simulated_engine.meeting import Meeting, follow


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this engine's flags."""
    parser = argparse.ArgumentParser(prog="simulated_engine", description=__doc__)
    add_server_arguments(parser)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--jitter-ratio", type=float, default=0.0)
    parser.add_argument("--kv-blocks", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--wake-seconds", type=float, default=0.0)
    members = parser.add_argument_group("members of a replica over several nodes")
    members.add_argument("--rank", type=int, default=0)
    members.add_argument("--nodes", type=int, default=1)
    members.add_argument("--meet-host", default="")
    members.add_argument("--meet-port", type=int, default=0)
    faults = parser.add_argument_group("faults")
    faults.add_argument("--fail-after", type=int, help="the model loop dies after N requests")
    faults.add_argument("--fail-loading", action="store_true")
    faults.add_argument("--fail-waking", action="store_true")
    faults.add_argument("--exit-after-seconds", type=float, help="the process exits by itself")
    faults.add_argument("--exit-code", type=int, default=1)
    faults.add_argument("--hang-after-seconds", type=float, help="no route answers any more")
    faults.add_argument("--hang", action="store_true", help="no route ever answers")
    faults.add_argument("--ignore-sigterm", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine. Returns 0 after a drain, 1 if loading failed or the head went, 2 for bad arguments."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    configure_logging()
    if arguments.rank:
        return follow(arguments.rank, arguments.meet_host, arguments.meet_port)
    server = replace(settings_from(arguments, parser), ignore_sigterm=arguments.ignore_sigterm)
    settings = SimulationSettings(
        model_name=arguments.served_model_name,
        ttft_seconds=arguments.ttft_ms / 1000,
        itl_seconds=arguments.itl_ms / 1000,
        jitter_ratio=arguments.jitter_ratio,
        kv_blocks=arguments.kv_blocks,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        load_seconds=arguments.load_seconds,
        seed=arguments.seed,
        fail_after=arguments.fail_after,
        fail_loading=arguments.fail_loading,
        wake_seconds=arguments.wake_seconds if arguments.enable_sleep_mode else None,
        fail_waking=arguments.fail_waking,
    )
    if arguments.exit_after_seconds is not None:
        _exit_later(arguments.exit_after_seconds, arguments.exit_code)
    engine = SimulatedEngine(settings, may_be_ready=_meet(arguments))
    hang_after = 0.0 if arguments.hang else arguments.hang_after_seconds

    def wrap(app: ASGIApp) -> ASGIApp:
        return app if hang_after is None else _Hanging(app, hang_after)

    return serve(engine, engine.metrics, server, wrap=wrap)


def _meet(arguments: argparse.Namespace) -> Callable[[], bool]:
    """Wait for the other members, if there are any; says whether all have come."""
    if arguments.nodes == 1:
        return lambda: True
    meeting = Meeting(arguments.meet_host, arguments.meet_port, arguments.nodes - 1)
    return lambda: meeting.is_complete


class _Hanging:
    """Accepts connections and, from a moment on, answers nothing: not even health."""

    def __init__(self, app: ASGIApp, after_seconds: float) -> None:
        self._app = app
        self._from = time.monotonic() + after_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if time.monotonic() >= self._from:
            await asyncio.Event().wait()
        await self._app(scope, receive, send)


def _exit_later(seconds: float, code: int) -> None:
    """End the process from a thread, without goodbye, as a crash would."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
