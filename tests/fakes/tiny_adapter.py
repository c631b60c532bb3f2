"""Adapter of the tiny engine."""

from __future__ import annotations

import sys
from pathlib import Path

from workers.engines.base import EngineOptions, EngineSample, Launch, LaunchContext
from workers.protocol import names
from workers.protocol.engines.kinds import EngineOptionError

_SCRIPT = Path(__file__).with_name("tiny_engine.py")


class TinyAdapter:
    """Launches `tiny_engine.py`; its options are passed on as they are."""

    preload: tuple[str, ...] = ()
    prepares: str | None = None
    """Trouble on the way to what the replicas of one model share; `None`: they share nothing."""

    name = "tiny"
    port_count = 2
    health_path = "/health"
    metrics_path = "/metrics"

    def check_options(self, options: EngineOptions) -> None:
        if "unknown" in options:
            raise EngineOptionError("option unknown: no such option")

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        self.check_options(options)
        settings = [f"{key}={value}" for key, value in options.items() if key != "port"]
        if context.rank is not None:
            rank = context.rank
            settings += [f"rank={rank.rank}", f"nodes={rank.nodes}", f"meet={rank.master_port}"]
        port = options.get("port", context.ports[0])
        arguments = (context.host, str(port), *settings)
        env = {names.ENV_ENGINE_API_KEY: context.api_key, "TINY_RUNTIME": str(context.runtime_dir)}
        env["TINY_MODEL"] = str(context.model_dir)
        return Launch(
            argv=(sys.executable, "-u", str(_SCRIPT), *arguments),
            env=env | ({"PYTHONPATH": str(_SCRIPT.parents[2])} if self.preload else {}),
            module="tests.fakes.tiny_engine" if self.preload else "",
            arguments=arguments,
            preload=self.preload,
            prepare=self._prepare(context.model_digest),
        )

    def _prepare(self, digest: str) -> tuple[str, ...]:
        if self.prepares is None:
            return ()
        return ("tests.fakes.prepared_note:prepare", digest, self.prepares)

    def parse_metrics(self, page: str) -> EngineSample:
        said = dict(line.split() for line in page.splitlines())
        tokens = float(said["tokens"]) if "tokens" in said else None
        return EngineSample(
            requests_running=int(said["running"]), requests_waiting=0, generation_tokens=tokens
        )


class ForkedTinyAdapter(TinyAdapter):
    """The same engine, forked off a template process that has its imports."""

    preload = ("http.server",)


class PreparedTinyAdapter(ForkedTinyAdapter):
    """The same engine, forked off a process that has read what all replicas of its model share."""

    def __init__(self, trouble: str = "") -> None:
        self.prepares = trouble
