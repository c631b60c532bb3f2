"""Public request traces: read from a file that is given, in the three formats in use.

`mooncake`: JSON lines with `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and
`hash_ids`, one for each 512 tokens of the prompt; equal ids are equal prefixes.
`azure`: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens.
`burstgpt`: CSV with the columns Timestamp (seconds), Model, Request tokens, Response tokens, Total
tokens, Log Type.

`python -m bench.traces FILE --format NAME` makes a small trace of any of them.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TextIO

MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A file that is none of the known formats, or a line of it that cannot be read."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_seconds: float
    """Since the trace's first request."""
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """One for each block of the prompt; equal leading ids are equal beginnings. Empty: not known."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def read_trace(path: Path, *, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace, its format told by its first line. Raises `TraceError` or `OSError`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        lines = itertools.chain([first], file)
        try:
            requests = list(itertools.islice(_reader(first)(lines), limit))
        except (KeyError, ValueError, TypeError) as error:
            raise TraceError(f"{path.name}: {type(error).__name__}: {error}") from error
    if not requests:
        raise TraceError(f"{path.name} has no request")
    requests.sort(key=lambda request: request.at_seconds)
    start = requests[0].at_seconds
    return [_shifted(request, start) for request in requests]


def _reader(first: str) -> type[_Mooncake] | type[_Azure] | type[_BurstGpt]:
    if first.lstrip().startswith("{"):
        return _Mooncake
    names = {name.strip().lower() for name in first.split(",")}
    if {"timestamp", "contexttokens", "generatedtokens"} <= names:
        return _Azure
    if {"timestamp", "request tokens", "response tokens"} <= names:
        return _BurstGpt
    raise ValueError(f"unknown format; the first line is {first[:80]!r}")


class _Mooncake:
    """JSON lines."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[TraceRequest]:
        for line in self._lines:
            if line.strip():
                row = json.loads(line)
                yield TraceRequest(
                    row["timestamp"] / 1000,
                    int(row["input_length"]),
                    int(row["output_length"]),
                    tuple(row["hash_ids"]),
                )


class _Azure:
    """CSV of Azure's LLM inference traces."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rows = csv.DictReader(lines)

    def __iter__(self) -> Iterator[TraceRequest]:
        for row in self._rows:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26].strip() + "+00:00").timestamp()
            yield TraceRequest(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


class _BurstGpt:
    """CSV of BurstGPT; failed requests have no response tokens and are passed over."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rows = csv.DictReader(lines)

    def __iter__(self) -> Iterator[TraceRequest]:
        for row in self._rows:
            output = int(float(row["Response tokens"]))
            if output > 0:
                yield TraceRequest(float(row["Timestamp"]), int(float(row["Request tokens"])), output)


def _shifted(request: TraceRequest, start: float) -> TraceRequest:
    return TraceRequest(
        request.at_seconds - start,
        request.prompt_tokens,
        request.output_tokens,
        request.prefix_ids,
        request.block_tokens,
    )


def attainable_hit_ratio(requests: Sequence[TraceRequest]) -> float:
    """Share of prompt blocks that an unbounded cache shared by all would have, 0-1."""
    seen: set[int] = set()
    total = hits = 0
    for request in requests:
        total += len(request.prefix_ids)
        hits += sum(1 for block in request.prefix_ids if block in seen)
        seen.update(request.prefix_ids)
    return hits / total if total else 0.0


def with_bursts(
    requests: Sequence[TraceRequest], *, prompts: int, every_seconds: float, seed: int
) -> list[TraceRequest]:
    """Add bursts of long prompts, 32 to 96 thousand tokens each, that have nothing in common."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible workload, no secret
    ids = itertools.count(1 + max((max(r.prefix_ids, default=0) for r in requests), default=0))
    end = requests[-1].at_seconds
    added: list[TraceRequest] = []
    start = every_seconds / 2
    while start < end:
        for _ in range(prompts):
            blocks = rng.randrange(64, 192)
            prompt = blocks * MOONCAKE_BLOCK_TOKENS
            prefix_ids = tuple(itertools.islice(ids, blocks))
            added.append(TraceRequest(start + rng.uniform(0, 5), prompt, 128, prefix_ids))
        start += every_seconds
    return sorted([*requests, *added], key=lambda request: request.at_seconds)


def make_conversations(
    *, sessions: int, turns: int, seconds: float, seed: int, shared_tokens: int = 1024
) -> list[TraceRequest]:
    """Make a trace of conversations whose every turn begins with all that was said before.

    A few system prompts of `shared_tokens` are shared by all; turns of a session follow one another
    after a pause. For use where no public trace is at hand.
    """
    rng = random.Random(seed)  # noqa: S311 - a reproducible workload, no secret
    ids = itertools.count(1_000)
    requests: list[TraceRequest] = []
    for _ in range(sessions):
        blocks = [rng.randrange(8) * 100 + i for i in range(shared_tokens // MOONCAKE_BLOCK_TOKENS)]
        blocks = [blocks[0] + i for i in range(len(blocks))] if blocks else []
        at = rng.uniform(0, seconds)
        for _ in range(1 + int(rng.expovariate(1 / turns))):
            blocks += [next(ids) for _ in range(1 + int(rng.expovariate(1 / 2)))]
            output = 1 + int(rng.expovariate(1 / 200))
            prompt = len(blocks) * MOONCAKE_BLOCK_TOKENS - rng.randrange(MOONCAKE_BLOCK_TOKENS)
            requests.append(TraceRequest(at, prompt, output, tuple(blocks)))
            at += 5 + rng.expovariate(1 / 30)
    requests.sort(key=lambda request: request.at_seconds)
    return requests


def _write_mooncake(file: TextIO, requests: Sequence[TraceRequest]) -> None:
    for request in requests:
        row = {
            "timestamp": round(request.at_seconds * 1000),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.prefix_ids),
        }
        file.write(json.dumps(row) + "\n")


def _write_azure(file: TextIO, requests: Sequence[TraceRequest]) -> None:
    writer = csv.writer(file)
    writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
    start = datetime(2023, 11, 16, tzinfo=UTC)
    for request in requests:
        at = start + timedelta(seconds=request.at_seconds)
        # Theirs have a digit more than microseconds.
        writer.writerow([at.strftime("%Y-%m-%d %H:%M:%S.%f0"), request.prompt_tokens, request.output_tokens])


def _write_burstgpt(file: TextIO, requests: Sequence[TraceRequest]) -> None:
    writer = csv.writer(file)
    writer.writerow(["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"])
    for request in requests:
        tokens = (request.prompt_tokens, request.output_tokens)
        writer.writerow([round(request.at_seconds, 3), "ChatGPT", *tokens, sum(tokens), "Conversation log"])


FORMATS: dict[str, Callable[[TextIO, Sequence[TraceRequest]], None]] = {
    "mooncake": _write_mooncake,
    "azure": _write_azure,
    "burstgpt": _write_burstgpt,
}


def write_trace(path: Path, requests: Sequence[TraceRequest], kind: str) -> None:
    """Write a trace in one of the `FORMATS`; only `mooncake` keeps what prompts share. Raises `OSError`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        FORMATS[kind](file, requests)


def main(argv: Sequence[str] | None = None) -> int:
    """Make a trace."""
    parser = argparse.ArgumentParser(prog="bench.traces", description="Make a trace of conversations.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--format", choices=list(FORMATS), default="mooncake")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4, help="of a session, on average")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which sessions begin")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    requests = make_conversations(
        sessions=arguments.sessions, turns=arguments.turns, seconds=arguments.seconds, seed=arguments.seed
    )
    write_trace(arguments.file, requests, arguments.format)
    print(f"{arguments.file}: {len(requests)} requests over {requests[-1].at_seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
