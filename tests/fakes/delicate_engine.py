"""An engine that computes for each look at its health, and dies of being asked at the wrong time.

So does SGLang: `/health` has it generate a token; it ends if its memory is to be given back while anything
runs, if a token is wanted while the memory is away, and if it is put to sleep or woken twice.
`delicate_engine.py HOST PORT HEALTH_SECONDS WAKE_SECONDS`.
"""

from __future__ import annotations

import http.server
import os
import sys
import threading
import time
from pathlib import Path

from tests.fakes.tiny_engine import Handler, say
from workers.engines.base import EngineOptions, EngineRequest, EngineSample, Launch, LaunchContext

ROOT = Path(__file__).parents[2]


class DelicateAdapter:
    """Launches this script, under the name of the engine that it is like."""

    name = "sglang"
    port_count = 1
    health_path = "/health"
    metrics_path = "/metrics"

    def __init__(self, *, health_seconds: float, wake_seconds: float) -> None:
        self._seconds = (str(health_seconds), str(wake_seconds))

    def check_options(self, options: EngineOptions) -> None:
        """Whatever a test says is right."""

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:  # noqa: ARG002 - the port's
        arguments = (context.host, str(context.ports[0]), *self._seconds)
        argv = (sys.executable, "-u", str(Path(__file__)), *arguments)
        return Launch(argv=argv, env={"PYTHONPATH": str(ROOT)})

    def parse_metrics(self, page: str) -> EngineSample:
        assert page
        return EngineSample(requests_running=0, requests_waiting=0)

    def can_sleep(self, options: EngineOptions) -> bool:
        return bool(options)

    def sleep_request(self) -> EngineRequest:
        return EngineRequest("/sleep", "POST")

    def wake_request(self) -> EngineRequest:
        return EngineRequest("/wake_up", "POST")


class Delicate(Handler):
    """What it is asked. Sleep and health are under way in threads of their own."""

    health_seconds = wake_seconds = 0.0
    lock = threading.Lock()
    computing = 0
    is_asleep = False

    def do_GET(self) -> None:  # noqa: N802 - the base class looks for this name
        if self.path != "/health":
            super().do_GET()
            return
        self.change("asked for a token while its memory is away", may=not Delicate.is_asleep, computing=1)
        time.sleep(self.health_seconds)
        self.change("", computing=-1)
        self._answer(200, "ok")

    def do_POST(self) -> None:  # noqa: N802 - the base class looks for this name
        sleeps = self.path == "/sleep"
        if not sleeps:
            time.sleep(self.wake_seconds)  # its memory is away all that time
        may = Delicate.is_asleep != sleeps and not Delicate.computing
        self.change(f"{self.path} at the wrong time", may=may, is_asleep=sleeps)
        self._answer(200, "")

    def change(
        self, wrong: str, *, may: bool = True, computing: int = 0, is_asleep: bool | None = None
    ) -> None:
        with self.lock:
            if not may:
                say(wrong)
                os._exit(1)
            Delicate.computing += computing
            Delicate.is_asleep = Delicate.is_asleep if is_asleep is None else is_asleep


def main() -> None:
    """Serve."""
    host, port, *seconds = sys.argv[1:]
    Delicate.health_seconds, Delicate.wake_seconds = map(float, seconds)
    http.server.ThreadingHTTPServer((host, int(port)), Delicate).serve_forever()


if __name__ == "__main__":
    main()
