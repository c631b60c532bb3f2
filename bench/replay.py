"""`python -m bench.replay TRACE --url URL --key-file FILE --model NAME`: a public trace, open loop.

Requests are sent when the trace says, whether or not earlier ones were answered, so a server that is too
slow cannot slow the load down. Prompts are made up to the trace's lengths; equal prefix ids of a trace
become equal text, so that prefix caches work as they did there. Prints TTFT, time per token, ITL, goodput
and what was found in cache; `--csv` writes a row for each request. `python -m bench.traces` makes a trace
of any format where no public one is at hand.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.chat_client import ChatClient, ChatError
from bench.traces import TraceError, TraceRequest, read_trace

_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week",
    "company", "system", "program", "question", "work", "number", "night",
)  # fmt: skip
_LATE_SECONDS = 0.1
"""A request sent later than this after its moment says that the load generator was too slow."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request, as it went. Times in seconds; `error` is empty for an answer that came whole."""

    number: int
    planned_at_seconds: float
    sent_at_seconds: float
    session_id: str
    ttft_seconds: float | None
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: str = ""
    gaps_seconds: tuple[float, ...] = ()
    """Between each two pieces of the answer; in the file only their longest is told."""

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of each token after the first."""
        if self.ttft_seconds is None or self.completion_tokens <= 1:
            return None
        return (self.total_seconds - self.ttft_seconds) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace is made to fit a smaller server."""

    speed: float = 1.0
    tokens: float = 1.0
    """Of prompts and answers, against the trace's."""
    most_output_tokens: int = 4096


def make_prompt(request: TraceRequest, number: int, tokens: float) -> str:
    """Text of about the wanted number of tokens, a word each; equal prefix ids give equal text."""
    wanted = max(1, round(request.prompt_tokens * tokens))
    block = max(1, round(request.block_tokens * tokens))
    words: list[str] = []
    for prefix_id in request.prefix_ids:
        rng = random.Random(prefix_id)  # noqa: S311 - the same text for the same id, no secret
        words += rng.choices(_WORDS, k=block)
        if len(words) >= wanted:
            break
    if len(words) < wanted:
        words += random.Random(f"request {number}").choices(_WORDS, k=wanted - len(words))  # noqa: S311 - likewise
    return " ".join(words[:wanted])


def name_sessions(requests: Sequence[TraceRequest]) -> list[str]:
    """A session for each request: that of an earlier prompt that it goes on from, else a new one."""
    session_of: dict[int, str] = {}
    names: list[str] = []
    for number, request in enumerate(requests):
        known = [session_of[block] for block in request.prefix_ids[1:] if block in session_of]
        name = known[-1] if known else f"replay-{number}"
        for block in request.prefix_ids[1:]:  # the first is a system prompt, which many share
            session_of.setdefault(block, name)
        names.append(name)
    return names


class Replay:
    """Sends a trace to one server and keeps what came of it."""

    def __init__(self, client: ChatClient, scale: Scale, *, most_open: int) -> None:
        self._client = client
        self._scale = scale
        self._pool = ThreadPoolExecutor(most_open, thread_name_prefix="replay")
        self._slots = threading.Semaphore(most_open)
        self.dropped = 0
        """Requests that could not be sent because as many as may be were open: the load was not open loop."""

    def run(self, requests: Sequence[TraceRequest]) -> list[Row]:
        """Send all; return the rows in the trace's order."""
        sessions = name_sessions(requests)
        began = time.monotonic()
        answers: list[Future[Row]] = []
        for number, request in enumerate(requests):
            planned = request.at_seconds / self._scale.speed
            time.sleep(max(0.0, began + planned - time.monotonic()))
            if not self._slots.acquire(blocking=False):
                self.dropped += 1
                continue
            answers.append(self._pool.submit(self._ask, number, request, sessions[number], planned, began))
        rows = [answer.result() for answer in answers]
        self._pool.shutdown()
        return rows

    def _ask(self, number: int, request: TraceRequest, session: str, planned: float, began: float) -> Row:
        sent = time.monotonic()
        prompt = make_prompt(request, number, self._scale.tokens)
        most = max(1, min(self._scale.most_output_tokens, round(request.output_tokens * self._scale.tokens)))
        messages = [{"role": "user", "content": prompt}]
        try:
            turn = self._client.ask(messages, session_id=session, max_tokens=most)
        except ChatError as error:
            seconds = time.monotonic() - sent
            return Row(number, planned, sent - began, session, None, seconds, 0, 0, 0, str(error)[:200])
        finally:
            self._slots.release()
        return Row(
            number,
            planned,
            sent - began,
            session,
            turn.ttft_seconds,
            turn.seconds,
            turn.prompt_tokens,
            turn.cached_tokens,
            turn.completion_tokens,
            gaps_seconds=turn.gaps_seconds,
        )


def summarise(rows: Sequence[Row], dropped: int, *, ttft_slo: float, tpot_slo: float) -> dict[str, object]:
    """Figures over all rows; a quantile of nothing is `None`."""
    whole = [row for row in rows if not row.error]
    span = max((row.sent_at_seconds + row.total_seconds for row in rows), default=0.0)
    good = [
        row
        for row in whole
        if row.ttft_seconds is not None
        and row.ttft_seconds <= ttft_slo
        and (row.tpot_seconds is None or row.tpot_seconds <= tpot_slo)
    ]
    prompt = sum(row.prompt_tokens for row in whole)
    ttft = [row.ttft_seconds for row in whole if row.ttft_seconds is not None]
    tpot = [row.tpot_seconds for row in whole if row.tpot_seconds is not None]
    gaps = [gap for row in whole for gap in row.gaps_seconds]
    return {
        "requests": len(rows) + dropped,
        "answered": len(whole),
        "failed": len(rows) - len(whole),
        "dropped": dropped,
        "late": sum(row.sent_at_seconds - row.planned_at_seconds > _LATE_SECONDS for row in rows),
        "seconds": span,
        **{f"ttft_{name}_seconds": value for name, value in _quantiles(ttft).items()},
        **{f"tpot_{name}_seconds": value for name, value in _quantiles(tpot).items()},
        **{f"itl_{name}_seconds": value for name, value in _quantiles(gaps).items()},
        "goodput_requests_per_second": len(good) / span if span else None,
        "goodput_ratio": len(good) / (len(rows) + dropped) if rows or dropped else None,
        "output_tokens_per_second": sum(r.completion_tokens for r in whole) / span if span else None,
        "cached_ratio": sum(row.cached_tokens for row in whole) / prompt if prompt else None,
        "errors": sorted({row.error for row in rows if row.error})[:5],
    }


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    ordered = sorted(values)
    picked = {
        f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)
    }
    return {"mean": statistics.fmean(ordered), **picked}


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write a row for each request. Raises `OSError`."""
    with path.open("w", newline="") as file:
        names = [name for name in Row.__dataclass_fields__ if name != "gaps_seconds"]
        writer = csv.DictWriter(file, [*names, "longest_gap_seconds"], extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({**asdict(row), "longest_gap_seconds": max(row.gaps_seconds, default="")})


def main(argv: Sequence[str] | None = None) -> int:
    """Replay one trace."""
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--url", required=True, help="of the gateway or of an engine")
    parser.add_argument("--key-file", type=Path, required=True, help="file with the API key")
    parser.add_argument("--model", required=True)
    parser.add_argument("--speed", type=float, default=1.0, help="so many times as fast as recorded")
    parser.add_argument("--tokens", type=float, default=1.0, help="lengths against the trace's, such as 0.05")
    parser.add_argument("--most-output-tokens", type=int, default=4096)
    parser.add_argument("--limit", type=int, help="only so many requests")
    parser.add_argument("--most-open", type=int, default=512)
    parser.add_argument("--ttft-slo", type=float, default=3.0, help="seconds")
    parser.add_argument("--tpot-slo", type=float, default=0.1, help="seconds")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args(argv)
    try:
        requests = read_trace(arguments.trace, limit=arguments.limit)
        key = arguments.key_file.read_text().strip()
    except (TraceError, OSError) as error:
        parser.error(str(error))
    scale = Scale(arguments.speed, arguments.tokens, arguments.most_output_tokens)
    replay = Replay(ChatClient(arguments.url, key, arguments.model), scale, most_open=arguments.most_open)
    rows = replay.run(requests)
    if arguments.csv:
        write_csv(arguments.csv, rows)
    figures = summarise(rows, replay.dropped, ttft_slo=arguments.ttft_slo, tpot_slo=arguments.tpot_slo)
    figures |= {"trace": arguments.trace.name, "speed": scale.speed, "tokens": scale.tokens}
    print(json.dumps(figures) if arguments.json else "\n".join(f"{k:<28} {v}" for k, v in figures.items()))
    return 0 if figures["answered"] else 1


if __name__ == "__main__":
    sys.exit(main())
