"""How a metrics page comes over the wire: packed, in pieces, cut, too large, or no metrics at all."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.tiny_adapter import TinyAdapter
from workers.agent import processes, scraper
from workers.agent.facts import Probe
from workers.agent.probing import Answer, ProbeState, advance
from workers.agent.scraper import Target
from workers.engines.base import EngineSample
from workers.engines.vllm.metrics import parse_metrics

PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\nvllm:num_requests_waiting 17\n"


class Reading(TinyAdapter):
    """Reads pages as vLLM's are read."""

    def parse_metrics(self, page: str) -> EngineSample:
        return parse_metrics(page)


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    told = () if length == -1 else (f"Content-Length: {len(body) if length is None else length}",)
    head = "\r\n".join([f"HTTP/1.1 {status}", *told, "Connection: close", *headers, "", ""])
    return head.encode() + body


def in_chunks(body: bytes, size: int, *, ended: bool = True) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    packed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return packed + (b"0\r\n\r\n" if ended else b"")


@contextmanager
def engine(metrics: bytes, health: bytes = answer(b"{}")) -> Iterator[Target]:
    """Answers with exactly these bytes; each connection serves one request."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with closing(connection):
                connection.settimeout(10)
                asked = b""
                while b"\r\n\r\n" not in asked:
                    more = connection.recv(4096)
                    if not more:
                        break
                    asked += more
                connection.sendall(metrics if asked.startswith(b"GET /metrics") else health)
                connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    label = processes.LaunchLabel("r-1", 1, "launch")
    try:
        yield Target(("r-1", 1), "127.0.0.1", port, Reading(), processes.ProcessId(1, 1), label, "key")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def scrape(metrics: bytes) -> tuple[EngineSample | None, str]:
    with engine(metrics) as target:
        watched = scraper._begin(target)
        watched.owned = True
        with watched.pool:
            outcome = scraper._ask(watched)
        assert outcome.answer is Answer.READY
        return outcome.sample, outcome.note


TEXT = "Content-Type: text/plain; version=0.0.4"
WAYS: dict[str, Callable[[], bytes]] = {
    "plain": lambda: answer(PAGE.encode(), TEXT),
    "packed": lambda: answer(gzip.compress(PAGE.encode()), TEXT, "Content-Encoding: gzip"),
    "packed in chunks": lambda: answer(
        in_chunks(gzip.compress(PAGE.encode()), 7),
        "Content-Encoding: gzip",
        "Transfer-Encoding: chunked",
        length=-1,
    ),
    "windows line ends": lambda: answer(PAGE.replace("\n", "\r\n").encode()),
    "no final line end": lambda: answer(PAGE.rstrip("\n").encode()),
    "openmetrics": lambda: answer(PAGE.encode() + b"# EOF\n", "Content-Type: application/openmetrics-text"),
    "wrong type": lambda: answer(PAGE.encode(), "Content-Type: application/octet-stream"),
    "five megabytes": lambda: answer(b'other_bucket{le="1",x="y"} 1\n' * 180_000 + PAGE.encode()),
}


@pytest.mark.parametrize("way", WAYS)
def test_page_is_read_whole_however_it_comes(way: str) -> None:
    sample, note = scrape(WAYS[way]())
    assert note == ""
    assert sample is not None
    assert (sample.requests_running, sample.requests_waiting) == (3, 17)
    assert sample.notes == ()


@pytest.mark.parametrize("chunked", [False, True], ids=["by length", "chunked"])
def test_body_that_ends_early_loses_its_cut_line_only_and_says_so(*, chunked: bool) -> None:
    body = PAGE.encode()[:-2]  # `17` has become `1`
    if chunked:
        sample, note = scrape(
            answer(in_chunks(body, 9, ended=False), "Transfer-Encoding: chunked", length=-1)
        )
    else:
        sample, note = scrape(answer(body, length=len(body) + 50))
    assert note == ""
    assert sample is not None
    assert (sample.requests_running, sample.requests_waiting) == (3, None)
    assert sample.notes == ("page cut off",)


def test_page_over_the_bound_is_not_read_also_where_it_is_packed() -> None:
    huge = b"m 1\n" * (scraper._MAX_PAGE_BYTES // 4 + 1)
    for metrics in (answer(huge), answer(gzip.compress(huge), "Content-Encoding: gzip")):
        assert scrape(metrics) == (None, f"metrics page over {scraper._MAX_PAGE_BYTES} bytes")


def test_room_that_the_log_tells_goes_before_what_labels_say(tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    log.write_text("INFO GPU KV cache size: 52,800 tokens\n")
    labels = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    for log_file, tokens in ((log, 52_800), (tmp_path / "none.log", 1600), (None, 1600)):
        with engine(answer(labels.encode())) as target:
            watched = scraper._begin(replace(target, log_file=log_file))
            watched.owned = True
            with watched.pool:
                sample = scraper._ask(watched).sample
        assert sample is not None
        assert sample.kv_capacity_tokens == tokens


def test_no_metrics_is_no_data_and_says_which_kind_of_none() -> None:
    gone = answer(b"not found", status="404 Not Found")
    web = answer(b"<html>502</html>", "Content-Type: text/html; charset=utf-8")
    assert scrape(gone) == (None, "metrics disabled (404)")
    sample, note = scrape(web)
    assert sample is None
    assert note.startswith("metrics: a web page came (text/html), no metrics")
    damaged, note = scrape(answer(b"no gzip at all", "Content-Encoding: gzip"))
    assert damaged is None or damaged.requests_running is None


def test_replica_without_metrics_is_ready_and_its_load_unknown() -> None:
    with engine(answer(b"", status="404 Not Found")) as target:
        watched = scraper._begin(target)
        watched.owned = True
        with watched.pool:
            state = advance(ProbeState(), scraper._ask(watched), now=1.0, window_seconds=10.0)
    assert (state.probe, state.samples, state.active_requests) == (Probe.READY, (), None)
    assert state.note == "metrics disabled (404)"


@pytest.mark.parametrize("metrics_only", [False, True])
def test_an_answer_that_never_ends_is_late_and_holds_nobody(
    *, metrics_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraper, "_WHOLE_SECONDS", 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with closing(connection), suppress(OSError):
            connection.sendall(answer(b"", length=10_000_000))
            while not done.wait(0.02):
                connection.sendall(b"#")

    threading.Thread(target=drip, daemon=True).start()
    host, port = listener.getsockname()
    with engine(b"") as target, closing(listener):
        watched = scraper._begin(replace(target, host=host, port=port))
        watched.owned = True
        with watched.pool:
            if metrics_only:
                found = scraper.scrape(watched.pool, target.adapter)
                assert found == (None, "busy: metrics answered late")
            else:
                assert scraper._ask(watched).answer is Answer.TIMEOUT
    done.set()


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (b'{"status": "loading", "progress": 0.47}', "loading, 40 %"),
        (b'{"status": "loading", "progress": 1}', "loading, 100 %"),
        (b'{"status": "loading", "progress": 1e999}', "loading"),
        (b'{"status": "loading", "progress": NaN}', "loading"),
        (b'{"status": "loading", "progress": -3}', "loading"),
        (b'{"status": ["loading"]}', "status 503"),
        (b"[" * 100_000, "status 503"),
        (b"9" * 5000, "status 503"),
    ],
)
def test_whatever_an_engine_says_while_it_starts_is_told_or_left_out(body: bytes, note: str) -> None:
    assert scraper._told(503, body) == note


def test_health_that_breaks_off_is_no_success() -> None:
    with engine(answer(PAGE.encode()), health=answer(b"{", length=10)) as target:
        watched = scraper._begin(target)
        watched.owned = True
        with watched.pool:
            assert scraper._ask(watched).answer is Answer.BROKEN
