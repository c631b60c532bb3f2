"""`python -m bench.tiers --json`: how soon a session's next turn starts, by where its blocks are.

One model of realistic shape and made weights, one engine after another in the same run, each with fewer
blocks than the sessions need: with no tiers, with host memory, with a disk. A few sessions have a long
first turn each, so that the later ones push the earlier ones out; then each has its next turn of one
token, and what counts is the time to it. Where its prefix came from is read from the answer's usage, and
a turn that found it elsewhere ends the run. Before turns that read the disk its pages are dropped from the
page cache. *Announced*: the turn comes when what was announced is in place.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.engines.made_model import VOCABULARY, make_model
from workers.engines.base import LaunchContext
from workers.engines.torch_adapter import TorchAdapter

_READY_SECONDS = 120.0
_REQUEST_SECONDS = 300.0
_POLL_SECONDS = 0.01
_MORE_TOKENS = 24
"""What a next turn adds to the one before it."""
_BLOCK_TOKENS = 16
_TIER_BYTES = 1 << 30


class TierBenchError(RuntimeError):
    """An engine did not come up, or a turn found its prefix elsewhere than it was to."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request."""

    seconds: float
    cached: Mapping[str, int]
    """Prompt tokens that needed no computing, by tier."""


class Engine:
    """One running engine."""

    def __init__(self, client: httpx.Client, disk: Path) -> None:
        """Talk to an engine through `client`; its blocks on disk lie in `disk`."""
        self._client = client
        self._disk = disk

    def ask(self, tokens: Sequence[int]) -> Answer:
        """Ask for one token after these. Raises `httpx.HTTPError`."""
        body = {"model": "m", "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        began = time.monotonic()
        answer = self._client.post("/v1/completions", json=body)
        seconds = time.monotonic() - began
        answer.raise_for_status()
        usage = answer.json()["usage"]
        whole = {"accelerator": usage["prompt_tokens_details"]["cached_tokens"], "host": 0, "disk": 0}
        return Answer(seconds, usage.get("kv", {}).get("cached_tokens", whole))

    def announce(self, tokens: Sequence[int]) -> None:
        """Announce a turn and wait until what it needs is in place."""
        before = self._swapped_in()
        answer = self._client.post("/kv/prefetch", json={"tokens": list(tokens)})
        answer.raise_for_status()
        wanted = before + answer.json()["blocks"]
        self._wait(lambda: self._swapped_in() >= wanted)

    def settle(self) -> None:
        """Wait until nothing more is written behind, and have the disk's pages dropped from memory."""
        seen = -1.0
        while seen != (seen := self._sum("kv_swapped_blocks_total", 'direction="out"')):
            time.sleep(1.0)
        for path in self._disk.glob("*.slots"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _swapped_in(self) -> float:
        return self._sum("kv_swapped_blocks_total", 'direction="in"')

    def _sum(self, name: str, label: str) -> float:
        lines = self._client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"exaserve_engine_{name}") and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    @staticmethod
    def _wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _REQUEST_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TierBenchError("what was announced did not come")
            time.sleep(_POLL_SECONDS)


@contextmanager
def running(folder: Path, model: Path, options: Mapping[str, int], threads: int) -> Iterator[Engine]:
    """Start an engine as an agent would; it ends with the block. Raises `TierBenchError`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    runtime = Path(tempfile.mkdtemp(dir=folder))
    context = LaunchContext(
        replica_id="bench",
        attempt=1,
        served_model_name="m",
        model_dir=model,
        host="127.0.0.1",
        ports=(port,),
        api_key=secrets.token_hex(16),
        runtime_dir=runtime,
        kv_disk_dir=folder / "kv",
    )
    launch = TorchAdapter().build_launch({"threads": threads, **options}, context)
    headers = {"authorization": f"Bearer {context.api_key}"}
    with (
        (runtime / "log").open("wb") as log,
        subprocess.Popen(launch.argv, env=dict(launch.env), stdout=log, stderr=log) as process,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=_REQUEST_SECONDS
        ) as client,
    ):
        try:
            _wait_until_ready(client, process)
            yield Engine(client, folder / "kv")
        finally:
            process.terminate()


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass  # the port is not open yet
        time.sleep(_POLL_SECONDS)
    raise TierBenchError("the engine did not come up")


@dataclass(frozen=True, slots=True)
class Sessions:
    """What is asked for."""

    prompts: tuple[tuple[int, ...], ...]
    more: tuple[int, ...]

    @staticmethod
    def draw(count: int, tokens: int) -> Sessions:
        """Draw prompts that have nothing in common."""
        numbers = random.Random(7)  # noqa: S311 - test data
        prompts = tuple(tuple(numbers.randrange(VOCABULARY) for _ in range(tokens)) for _ in range(count))
        return Sessions(prompts, tuple(numbers.randrange(VOCABULARY) for _ in range(_MORE_TOKENS)))

    def next_turn(self, number: int, turns: int = 1) -> tuple[int, ...]:
        """The prompt of a session's later turn."""
        return self.prompts[number] + self.more * turns


def measure_next_turns(
    engine: Engine, sessions: Sessions, tier: str, *, announced: bool = False
) -> list[float]:
    """Seconds to the first token of each session's next turn. Raises `TierBenchError`."""
    for prompt in sessions.prompts:
        engine.ask(prompt)
    engine.settle()
    seconds = []
    # The last ones are still in their blocks.
    for number in range(len(sessions.prompts) // 2):
        turn = sessions.next_turn(number)
        if announced:
            engine.announce(turn)
        answer = engine.ask(turn)
        _check_source(answer, tier, len(sessions.prompts[number]))
        seconds.append(answer.seconds)
    return seconds


def _check_source(answer: Answer, tier: str, tokens: int) -> None:
    whole = (tokens - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
    wanted = {name: whole if name == tier else 0 for name in ("accelerator", "host", "disk")}
    found = {name: min(count, whole) for name, count in answer.cached.items()}
    if found != wanted:
        raise TierBenchError(f"a turn was to find {wanted} and found {dict(answer.cached)}")


def measure_repeated_turns(engine: Engine, sessions: Sessions) -> list[float]:
    """Seconds to the first token of turns whose blocks never left. Raises `TierBenchError`."""
    seconds = []
    for number in range(len(sessions.prompts) // 2):
        engine.ask(sessions.next_turn(number))
        answer = engine.ask(sessions.next_turn(number, turns=2))
        _check_source(answer, "accelerator", len(sessions.prompts[number]))
        seconds.append(answer.seconds)
    return seconds


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all engines, one after another."""
    model = folder / "model"
    model.mkdir()
    make_model(model, seed=3, dtype="float32")
    sessions = Sessions.draw(arguments.sessions, arguments.tokens)
    blocks = (arguments.tokens // _BLOCK_TOKENS + 8) * arguments.sessions // 2
    seconds: dict[str, list[float]] = {}
    with running(folder, model, {"num_blocks": blocks}, arguments.threads) as engine:
        seconds["recompute"] = measure_next_turns(engine, sessions, "none")
        seconds["accelerator"] = measure_repeated_turns(engine, sessions)
    for name, tier in (("host", "host"), ("disk", "disk"), ("disk_announced", "disk")):
        options = {"num_blocks": blocks, f"kv_{tier}_bytes": _TIER_BYTES}
        found_in = "accelerator" if name == "disk_announced" else tier
        with running(folder, model, options, arguments.threads) as engine:
            seconds[name] = measure_next_turns(engine, sessions, found_in, announced=name == "disk_announced")
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "sessions": arguments.sessions,
        "prefix_tokens": arguments.tokens,
        "blocks": blocks,
        "ttft_seconds": {name: round(value, 4) for name, value in medians.items()},
        "speedup_over_recompute": {
            name: round(medians["recompute"] / value, 1)
            for name, value in medians.items()
            if name != "recompute"
        },
        "load_average": round(os.getloadavg()[0], 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 0, or 1 if that could not be measured."""
    parser = argparse.ArgumentParser(prog="bench.tiers", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of each first turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="exaops-tiers-") as folder:
        try:
            figures = measure(Path(folder), arguments)
        except (TierBenchError, httpx.HTTPError) as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps(figures, indent=None if arguments.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
