"""`python -m bench.stages --json`: the built-in engine in one process and split over stages, in one run.

A random model of the Llama family is served as one process and as so many stages, each process with one
thread, by the engine's own command line over loopback. Rounds alternate between the two, so that whatever
else the machine does falls on both: the time to a prompt's first token, tokens a second of one stream, and of
several at once. What is told are the best of all rounds, the CPU time of all, and ratios to one process.

All tokens are compared: what stages say has to be what one process says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.swarm.lan import cpu_seconds
from workers.engines.demo_model import make_demo_model
from workers.protocol import names

_READY_SECONDS = 300.0
_POLL_SECONDS = 0.05
_KEY = "xe-bench"


@dataclass
class Contestant:
    """One way to serve the model."""

    stages: int
    address: str
    processes: list[subprocess.Popen[bytes]]
    first_token_ms: list[float] = field(default_factory=list)
    alone_per_second: list[float] = field(default_factory=list)
    together_per_second: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of all its processes, over all rounds."""
    said: list[list[int]] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """The best of all rounds: what else the machine does only ever makes one worse."""
        return {
            "first_token_ms": round(min(self.first_token_ms), 1),
            "tokens_per_second_alone": round(max(self.alone_per_second), 1),
            "tokens_per_second_together": round(max(self.together_per_second), 1),
            "cpu_seconds": round(self.cpu_seconds, 2),
        }


def make_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a random model with the demo model's tokenizer, in float32."""
    make_demo_model(folder)
    told = json.loads((folder / "config.json").read_text("utf-8"))
    config = LlamaConfig(
        vocab_size=told["vocab_size"],
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 128),
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=told.get("eos_token_id"),
    )
    torch.manual_seed(0)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    LlamaForCausalLM(config).save_pretrained(folder)


@contextlib.contextmanager
def contestants(folder: Path, stages: Sequence[int]) -> Iterator[list[Contestant]]:
    """Serve a model in so many ways; all processes end with the block."""
    started: list[Contestant] = []
    try:
        started.extend(_start(folder, count) for count in stages)
        for one in started:
            _wait_ready(one)
        yield started
    finally:
        processes = [process for one in started for process in one.processes]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _start(folder: Path, count: int) -> Contestant:
    http, rendezvous = _free_port(), _free_port()
    keys = {names.ENV_ENGINE_API_KEY: _KEY, names.ENV_GANG_KEY: secrets.token_hex(16)}
    common = [
        *(sys.executable, "-m", "workers.engines.torch_engine", "--device=cpu", "--threads=1"),
        *(f"--model-dir={folder}", "--served-model-name=m", f"--port={http}", f"--pipeline-stages={count}"),
        "--kv-pool=private",
    ]
    processes = []
    for number in range(count):
        own = [] if count == 1 else [f"--stage={number}", f"--rendezvous=127.0.0.1:{rendezvous}"]
        processes.append(
            subprocess.Popen(
                common + own, env=os.environ | keys, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
    return Contestant(count, f"http://127.0.0.1:{http}", processes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_ready(one: Contestant) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{one.address}/health").is_success:
                return
        if time.monotonic() > deadline or any(process.poll() is not None for process in one.processes):
            raise RuntimeError(f"the engine in {one.stages} stages did not start")
        time.sleep(_POLL_SECONDS)


async def play_round(one: Contestant, arguments: argparse.Namespace, seed: int) -> None:
    """Ask for a prompt's first token, for one stream, then for several at once."""
    numbers = random.Random(seed)  # noqa: S311 - test data
    prompts = [
        [numbers.randrange(300, 1000) for _ in range(arguments.prompt)] for _ in range(arguments.streams + 1)
    ]
    headers = {"authorization": f"Bearer {_KEY}"}
    async with httpx.AsyncClient(base_url=one.address, headers=headers, timeout=300.0) as client:
        began = time.perf_counter()
        one.said.append(await _ask(client, prompts[0], 1))
        one.first_token_ms.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        one.said.append(await _ask(client, prompts[0], arguments.answer))
        one.alone_per_second.append(arguments.answer / (time.perf_counter() - began))
        # In cache from now on, so that what follows are steps of one token for each stream.
        await asyncio.gather(*(_ask(client, prompt, 1) for prompt in prompts[1:]))
        began = time.perf_counter()
        one.said += await asyncio.gather(*(_ask(client, prompt, arguments.answer) for prompt in prompts[1:]))
        taken = time.perf_counter() - began
        one.together_per_second.append(arguments.answer * arguments.streams / taken)


async def _ask(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> list[int]:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    said: list[int] = answer.json()["choices"][0]["token_ids"]
    return said


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play all rounds."""
    folder = Path(tempfile.mkdtemp(prefix="bench-stages-"))
    try:
        make_model(folder, arguments)
        with contestants(folder, (1, *arguments.stages)) as ways:
            for number in range(arguments.rounds):
                for one in ways if number % 2 else ways[::-1]:
                    pids = [process.pid for process in one.processes]
                    before = cpu_seconds(pids)
                    asyncio.run(play_round(one, arguments, number))
                    one.cpu_seconds += cpu_seconds(pids) - before
            plain, *staged = ways
            figures = {str(one.stages): one.figures() for one in ways}
            return {
                "figures": figures,
                "ratios": {str(one.stages): _ratios(plain.figures(), one.figures()) for one in staged},
                "differing_answers": sum(
                    mine != theirs
                    for one in staged
                    for mine, theirs in zip(one.said, plain.said, strict=True)
                ),
                "answers": len(plain.said),
                "parameters_millions": round((folder / "model.safetensors").stat().st_size / 4e6, 1),
                "load_average": round(os.getloadavg()[0], 2),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ratios(plain: dict[str, float], staged: dict[str, float]) -> dict[str, float]:
    return {name: round(staged[name] / plain[name], 3) for name in plain}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Returns 0, or 1 if an answer differs."""
    parser = argparse.ArgumentParser(prog="bench.stages", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=48, help="tokens")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    arguments = parser.parse_args(argv)
    result = run(arguments)
    print(json.dumps(result, indent=None if arguments.json else 2))
    return 1 if result["differing_answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
