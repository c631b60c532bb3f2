"""`python -m bench.scrape --json`: what it costs a node to read the metrics of its replicas.

Another process serves real pages over HTTP, each time with other values; this one fetches and reads them
as the agent does, and counts its own CPU time. In the same run, on the same pages, prometheus_client's
parser alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

import urllib3
from prometheus_client.parser import text_string_to_metric_families

from bench.engine_pages import sglang_pages, vllm_pages
from workers.agent.scraper import WINDOW_SECONDS, scrape
from workers.engines.base import EngineAdapter, EngineInstall, EngineSample
from workers.engines.sglang.adapter import SglangAdapter
from workers.engines.vllm.adapter import VllmAdapter
from workers.engines.windows import choose_span, measure_window

REPLICAS = 12
WANTED_CPU_SECONDS = 0.001
WANTED_CORE_RATIO = 0.02
_PAGES = 8
_WARM_UP = 20
_INSTALL = EngineInstall(Path("/nonexistent"), "", "")
_KINDS: dict[str, tuple[Callable[[int], list[str]], EngineAdapter]] = {
    "vllm": (vllm_pages, VllmAdapter(_INSTALL)),
    "sglang": (sglang_pages, SglangAdapter(_INSTALL)),
}


@dataclass(frozen=True, slots=True)
class PageCost:
    """What one engine's page costs, in CPU seconds of the reading process."""

    engine: str
    page_bytes: int
    page_lines: int
    cpu_seconds_per_scrape: float
    """One page: fetched, parsed, and in this project's terms."""
    cpu_seconds_parsing: float
    """Of these, without the fetching."""
    cpu_seconds_per_round: float
    """All that a second of a replica costs: health, the page, and rates and quantiles of its window."""
    core_ratio_of_twelve: float
    """For twelve replicas, once a second each."""
    library_cpu_seconds: float
    """prometheus_client's parser alone, on the same page."""
    times_faster_than_library: float
    """Parsing and normalising against that parser's work alone."""


def serve(pages: Sequence[str], told: Connection) -> None:
    """Serve these pages in turn, and health, until the process is ended."""
    bodies = cycle([page.encode() for page in pages])

    class Pages(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = next(bodies) if self.path == "/metrics" else b'{"status":"ready"}'
            head = (
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            self.wfile.write(head.encode() + body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = True
    told.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def served(pages: Sequence[str]) -> Iterator[urllib3.HTTPConnectionPool]:
    """A connection to another process that serves these pages."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(pages, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(60):
            raise RuntimeError("the page server did not start")
        with urllib3.HTTPConnectionPool("127.0.0.1", ours.recv(), maxsize=1, retries=False) as pool:
            yield pool
    finally:
        process.terminate()
        process.join()


def measure(engine: str, *, scrapes: int) -> PageCost:
    """Measure one engine's page."""
    make, adapter = _KINDS[engine]
    pages = make(_PAGES)
    with served(pages) as pool:

        def fetch() -> EngineSample:
            sample, note = scrape(pool, adapter)
            if sample is None or sample.ttft is None:
                raise RuntimeError(f"no sample: {note}")
            return sample

        samples = [(float(at), fetch()) for at in range(round(WINDOW_SECONDS) + 1)]

        def whole_round() -> None:
            pool.urlopen("GET", adapter.health_path)
            span = choose_span([*samples[1:], (WINDOW_SECONDS + 1.0, fetch())])
            measure_window(span.old, span.new, seconds=span.seconds)

        per_scrape = _cpu_seconds(fetch, scrapes)
        per_round = _cpu_seconds(whole_round, scrapes)
    in_turn = cycle(pages)
    parsing = _cpu_seconds(lambda: adapter.parse_metrics(next(in_turn)), scrapes)
    library = _cpu_seconds(lambda: list(text_string_to_metric_families(next(in_turn))), max(scrapes // 10, 5))
    return PageCost(
        engine=engine,
        page_bytes=len(pages[0]),
        page_lines=pages[0].count("\n"),
        cpu_seconds_per_scrape=round(per_scrape, 6),
        cpu_seconds_parsing=round(parsing, 6),
        cpu_seconds_per_round=round(per_round, 6),
        core_ratio_of_twelve=round(per_round * REPLICAS, 5),
        library_cpu_seconds=round(library, 6),
        times_faster_than_library=round(library / parsing, 1),
    )


def _cpu_seconds(work: Callable[[], object], times: int) -> float:
    """CPU seconds of one call, the median of five parts."""
    for _ in range(min(_WARM_UP, times)):
        work()
    parts = []
    each = max(times // 5, 1)
    for _ in range(5):
        begun = time.process_time()
        for _ in range(each):
            work()
        parts.append((time.process_time() - begun) / each)
    return statistics.median(parts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scrapes", type=int, default=500, help="of each page")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args()
    costs = [measure(engine, scrapes=options.scrapes) for engine in _KINDS]
    worst = max(cost.cpu_seconds_per_scrape for cost in costs)
    core = max(cost.core_ratio_of_twelve for cost in costs)
    result = {
        "cpu_seconds_per_scrape": worst,
        "core_ratio_of_twelve": core,
        "wanted": {
            "cpu_seconds_per_scrape": WANTED_CPU_SECONDS,
            "core_ratio_of_twelve": WANTED_CORE_RATIO,
        },
        "pages": [asdict(cost) for cost in costs],
        "python": platform.python_version(),
    }
    if options.json:
        print(json.dumps(result))
    else:
        for cost in costs:
            print(
                f"{cost.engine:<8}{cost.page_bytes:>8} B {cost.page_lines:>5} lines   "
                f"scrape {cost.cpu_seconds_per_scrape * 1e3:.2f} ms   round "
                f"{cost.cpu_seconds_per_round * 1e3:.2f} ms   twelve {cost.core_ratio_of_twelve:.2%}"
                f" of a core   library {cost.library_cpu_seconds * 1e3:.1f} ms"
            )
    sys.exit(0 if worst <= WANTED_CPU_SECONDS and core <= WANTED_CORE_RATIO else 1)


if __name__ == "__main__":
    main()
