"""An engine that does all it can to its neighbours' KV memory: `rogue_engine.py HOST PORT JSON`.

It joins the node's pool, takes what it can get and never gives anything back, and writes into what it
holds without a pause. Once its deed file says `scribble`, it writes over the whole arena.
"""

from __future__ import annotations

import ctypes
import http.server
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fakes.tiny_engine import Handler
from workers.engines.base import EngineOptions, EngineSample, Launch, LaunchContext
from workers.kv.arena import CpuArena
from workers.kv.layout import KvLayout
from workers.kv.lease import PoolMember, Terms, Use, join

ROOT = Path(__file__).parents[2]
_PAUSE_SECONDS = 0.005
_LISTEN_SECONDS = 0.05


@dataclass(frozen=True)
class Plan:
    """What one attempt is told."""

    folder: str
    replica_id: str
    attempt: int
    blocks: int
    ceiling: int
    layout: dict[str, object]
    deed_file: str


class RogueAdapter:
    """Launches this script; options: `blocks`, `ceiling`, `layout` (JSON) and `deed_file`."""

    name = "rogue"
    port_count = 1
    health_path = "/health"
    metrics_path = "/metrics"

    def check_options(self, options: EngineOptions) -> None:
        """Whatever a test says is right."""

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        plan = Plan(
            folder=str(context.kv_pool_dir),
            replica_id=context.replica_id,
            attempt=context.attempt,
            blocks=int(options["blocks"]),
            ceiling=int(options["ceiling"]),
            layout=json.loads(str(options["layout"])),
            deed_file=str(options["deed_file"]),
        )
        arguments = (context.host, str(context.ports[0]), json.dumps(asdict(plan)))
        argv = (sys.executable, "-u", str(Path(__file__)), *arguments)
        return Launch(argv=argv, env={"PYTHONPATH": str(ROOT)})

    def parse_metrics(self, page: str) -> EngineSample:
        assert page
        return EngineSample(requests_running=0, requests_waiting=0)


def address_of(member: PoolMember) -> tuple[int, int]:
    """Where the arena lies and how large it is."""
    arena = member.arena
    assert isinstance(arena, CpuArena)
    return arena.address, arena.size_bytes


def main() -> None:
    """Join, hoard, write, and at the end scribble."""
    host, port, text = sys.argv[1:]
    plan = Plan(**json.loads(text))
    layout = KvLayout(**plan.layout)  # type: ignore[arg-type]  # as it was written
    terms = Terms(plan.blocks, plan.blocks, plan.ceiling)
    member = join(Path(plan.folder), layout, plan.replica_id, plan.attempt, terms)
    address, size = address_of(member)
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, args=(_LISTEN_SECONDS,), daemon=True).start()
    deed = Path(plan.deed_file)
    while True:
        member.take(1, Use(live=plan.ceiling, needed=10 * plan.blocks, waiting=9))
        for extent in member.extents:
            ctypes.memset(address + extent * layout.extent_bytes, 0xFF, layout.extent_bytes)
        if deed.exists():
            deed.unlink()  # the next attempt is to live
            ctypes.memset(address, 0xFF, size)
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
