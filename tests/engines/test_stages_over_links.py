"""Two stages on two machines, as far as the network goes: namespaces with slow links between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.swarm import lan
from tests.fakes.stages import API_KEY, GANG_KEY, MODEL_NAME, wait_until
from workers.engines.demo_model import HIDDEN
from workers.protocol import names

ROOT = Path(__file__).parents[2]
PORT, RENDEZVOUS = 8000, 8001
MEGABITS = 20.0
SILENCE_SECONDS = 15.0
PROMPT_TOKENS = 1024
ROW_BYTES = HIDDEN * 4
ASK = f"""
import json, sys, urllib.request
address, body = sys.argv[1:]
headers = {{"authorization": "Bearer {API_KEY}", "content-type": "application/json"}}
request = urllib.request.Request(address, body.encode() or None, headers)
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""
pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(lan.why_not()), reason=lan.why_not() or "a network can be made"),
]


@dataclass
class Member:
    """One stage in its namespace."""

    place: lan.Place
    process: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text("utf-8")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What the head answers to somebody in this namespace; empty if it does not."""
        address = f"http://{self.place.address}:{PORT}{path}"
        command = [sys.executable, "-c", ASK, address, json.dumps(body) if body else ""]
        done = subprocess.run(self.place.command(command), check=False, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""


@contextmanager
def members(places: list[lan.Place], model: Path, folder: Path) -> Iterator[list[Member]]:
    """Run one stage in each place; with one place, the whole model."""
    started = []
    environment = {**os.environ, names.ENV_ENGINE_API_KEY: API_KEY, names.ENV_GANG_KEY: GANG_KEY}
    try:
        for number, place in enumerate(places):
            log_path = folder / f"{place.namespace}.log"
            command = [
                *(
                    sys.executable,
                    "-m",
                    "workers.engines.torch_engine",
                    f"--model-dir={model}",
                    "--device=cpu",
                ),
                *(f"--served-model-name={MODEL_NAME}", f"--host={place.address}", f"--port={PORT}"),
                *("--threads=1", f"--silence-seconds={SILENCE_SECONDS}", f"--pipeline-stages={len(places)}"),
                *(f"--stage={number}", f"--rendezvous={places[0].address}:{RENDEZVOUS}"),
            ]
            with log_path.open("wb") as log:
                process = subprocess.Popen(place.command(command), cwd=ROOT, env=environment, stderr=log)
            started.append(Member(place, process, log_path))
        wait_until(lambda: started[0].ask("/health"))
        yield started
    finally:
        for member in started:
            member.process.kill()
            member.process.wait()


def answer(head: Member, **fields: Any) -> list[int]:
    body = {
        "model": MODEL_NAME,
        "prompt": [20 + n % 800 for n in range(PROMPT_TOKENS)],
        "max_tokens": 32,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    tokens: list[int] = json.loads(head.ask("/v1/completions", body))["choices"][0]["token_ids"]
    return tokens


@pytest.mark.timeout(300)
def test_over_slow_links_stages_say_what_one_process_says_and_a_cut_link_ends_both(
    demo_model: Path, tmp_path: Path
) -> None:
    greedy, seeded = {"temperature": 0}, {"temperature": 1.0, "seed": 3}
    with lan.Lan(2, MEGABITS) as network:
        with members(network.places[:1], demo_model, tmp_path) as (whole,):
            expected = [answer(whole, **how) for how in (greedy, seeded)]
        with members(network.places, demo_model, tmp_path) as (head, other):
            before = head.place.sent_bytes()
            assert [answer(head, **how) for how in (greedy, seeded)] == expected
            sent = head.place.sent_bytes() - before
            # Each row once, and what orders, signs of life and packets take beside.
            rows = PROMPT_TOKENS + 2 * 32
            assert rows * ROW_BYTES < sent < 1.3 * rows * ROW_BYTES + 200_000
            cut = other.place.command(["ip", "link", "set", "dev", "eth0", "down"])
            subprocess.run(cut, check=True, capture_output=True)
            assert [member.process.wait(60) for member in (head, other)] == [1, 1]
            for member, lost in ((head, f"stage 1 ({other.place.address})"), (other, "stage 0")):
                assert lost in member.log()
                assert "no sign of life" in member.log()
