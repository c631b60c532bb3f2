"""A trace is replayed open loop against a real engine process, and what came of it is told."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from bench.replay import Row, main, make_prompt, name_sessions, summarise, write_csv
from bench.traces import TraceRequest
from tests.engines.conftest import MODEL_NAME, EngineProcess


def test_equal_prefixes_become_equal_text_and_others_do_not() -> None:
    one = make_prompt(TraceRequest(0, 1000, 1, (7, 8)), 0, 0.1)
    other = make_prompt(TraceRequest(0, 1000, 1, (7, 9)), 1, 0.1)
    assert len(one.split()) == len(other.split()) == 100
    assert one.split()[:51] == other.split()[:51]
    assert one != other
    assert make_prompt(TraceRequest(0, 50, 1), 0, 1.0) != make_prompt(TraceRequest(0, 50, 1), 1, 1.0)


def test_turns_of_one_conversation_share_a_session_and_strangers_with_one_system_prompt_do_not() -> None:
    requests = [TraceRequest(n, 1, 1, ids) for n, ids in enumerate([(0, 1), (0, 2), (0, 1, 3), (0, 1, 3, 4)])]
    first, stranger, second, third = name_sessions(requests)
    assert first == second == third != stranger


def test_summary_counts_good_failed_and_unsent_requests() -> None:
    rows = [
        Row(0, 0.0, 0.0, "a", 0.5, 1.5, 100, 60, 11, gaps_seconds=(0.1, 0.9)),
        Row(1, 0.0, 0.5, "b", 9.0, 9.5, 100, 0, 2),
        Row(2, 1.0, 1.0, "c", None, 0.1, 0, 0, 0, "HTTP 429"),
    ]
    figures = summarise(rows, 1, ttft_slo=3.0, tpot_slo=0.2)
    assert (figures["requests"], figures["answered"], figures["failed"], figures["dropped"]) == (4, 2, 1, 1)
    assert figures["late"] == 1
    assert figures["goodput_ratio"] == pytest.approx(1 / 4)
    assert figures["cached_ratio"] == pytest.approx(0.3)
    assert figures["errors"] == ["HTTP 429"]
    assert (figures["itl_mean_seconds"], figures["itl_p99_seconds"]) == (pytest.approx(0.5), 0.9)
    assert json.dumps(summarise([], 0, ttft_slo=1, tpot_slo=1))


def test_csv_row_names_are_those_of_the_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_csv(path, [Row(0, 0.0, 0.0, "a", None, 1.5, 100, 60, 11, "broke", (0.1, 0.7, 0.2))])
    with path.open() as file:
        [row] = csv.DictReader(file)
    assert (row["ttft_seconds"], row["error"], row["cached_tokens"]) == ("", "broke", "60")
    assert row["longest_gap_seconds"] == "0.7"
    assert "gaps_seconds" not in row


def test_trace_runs_against_an_engine_and_writes_a_row_for_each_request(
    server: EngineProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 20 * n, "input_length": 1024, "output_length": 60, "hash_ids": [5, n % 2]}
        for n in range(6)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    key, rows = tmp_path / "key", tmp_path / "rows.csv"
    key.write_text(server.api_key)
    where = ["--url", f"http://{server.address}", "--key-file", str(key), "--model", MODEL_NAME]
    assert main([str(trace), *where, "--tokens", "0.1", "--csv", str(rows), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["answered"], figures["failed"], figures["dropped"]) == (6, 0, 0), figures["errors"]
    assert figures["ttft_p99_seconds"] > 0
    assert figures["itl_p50_seconds"] > 0
    with rows.open() as file:
        written = list(csv.DictReader(file))
    assert [int(row["number"]) for row in written] == list(range(6))
    assert all(int(row["prompt_tokens"]) > 50 for row in written)


def test_file_that_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    path.write_text("hello\n")
    with pytest.raises(SystemExit):
        main([str(path), "--url", "http://127.0.0.1:1", "--key-file", str(path), "--model", "m"])
    assert "unknown format" in capsys.readouterr().err
