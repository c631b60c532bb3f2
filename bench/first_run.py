"""`python -m bench.first_run --json`: what the first minutes with the product cost.

Clones this repository into an empty folder and starts it there as a new user would, only that the
packages are not downloaded again: the clone runs on the interpreter that runs this script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.chat_client import ChatClient, ChatError
from bench.fleet_run import FleetRun, fleet_up, leftovers, start_fleet, wait_until_up

HERE = Path(__file__).resolve().parents[1]
_SESSIONS_AT_ONCE = 4
_QUESTION = {"role": "user", "content": "Tell me about the sea."}


def measure(*, source: Path, sessions: int, options: Sequence[str]) -> dict[str, float | int]:
    """Run the whole course and return the figures by name."""
    with tempfile.TemporaryDirectory(prefix="exaops-first-run-") as folder:
        code, began = Path(folder) / "clone", time.monotonic()
        subprocess.run(["git", "clone", "--quiet", str(source), str(code)], check=True)  # noqa: S607 - git of the PATH
        var = code / "var"
        run = start_fleet(code, var, *options)
        try:
            cold_start_seconds = _first_token_seconds(run, began)
            ratio = turn2_same_replica_ratio(run.chat(), sessions)
            restart_seconds = replica_restart_seconds(run)
        finally:
            run.stop()
        orphans = len(leftovers(var))

        began = time.monotonic()
        with fleet_up(code, var, *options) as again:
            warm_start_seconds = _first_token_seconds(again, began)
        orphans += len(leftovers(var))
    return {
        "cold_start_seconds": round(cold_start_seconds, 2),
        "warm_start_seconds": round(warm_start_seconds, 2),
        "replica_restart_seconds": round(restart_seconds, 2),
        "turn2_same_replica_ratio": round(ratio, 4),
        "orphans_after_stop": orphans,
    }


def _first_token_seconds(run: FleetRun, began: float) -> float:
    """From `began` until the first token of a streamed answer."""
    wait_until_up(run)
    asked = time.monotonic()
    turn = run.chat().ask([_QUESTION])
    return asked - began + turn.ttft_seconds


def turn2_same_replica_ratio(client: ChatClient, sessions: int) -> float:
    """Share of sessions whose second turn found the KV of their first.

    Every conversation starts with words of its own, so only the replica that took the first turn can
    have its blocks: reuse shows that it was the same one.
    """
    with ThreadPoolExecutor(_SESSIONS_AT_ONCE) as pool:
        reused = list(pool.map(lambda _: _second_turn_reuses(client), range(sessions)))
    return sum(reused) / len(reused)


def _second_turn_reuses(client: ChatClient) -> bool:
    session_id = str(uuid.uuid4())
    messages = [{"role": "user", "content": f"{session_id}: remember this, and tell me of the sea."}]
    first = client.ask(messages, session_id=session_id, max_tokens=24)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And now of the hills."},
    ]
    return client.ask(messages, session_id=session_id, max_tokens=8).cached_tokens > 0


def replica_restart_seconds(run: FleetRun) -> float:
    """From the kill of one engine until its replica is ready again, as the API tells it."""
    victim = min(run.replicas(), key=lambda replica: str(replica["name"]))
    os.kill(int(victim["pid"]), signal.SIGKILL)
    killed = time.monotonic()

    def is_back() -> bool:
        now = next(one for one in run.replicas() if one["id"] == victim["id"])
        return bool(now["attempt"] > victim["attempt"] and now["status"] == "ready")

    run.wait_until(is_back, "the killed replica to be ready again", seconds=120)
    return time.monotonic() - killed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.first_run", description="Cost of the first minutes.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--source", type=Path, default=HERE, help="repository to clone (this one)")
    parser.add_argument("--sessions", type=int, default=40, help="sessions of two turns")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2, help="for each node")
    arguments = parser.parse_args(argv)
    options = ("--nodes", str(arguments.nodes), "--replicas", str(arguments.replicas))
    try:
        figures = measure(source=arguments.source, sessions=arguments.sessions, options=options)
    except ChatError as error:
        print(f"a chat failed: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<28} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
