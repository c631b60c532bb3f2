"""Public request traces are read in each of their formats, and anything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.traces import (
    FORMATS,
    TraceError,
    TraceRequest,
    attainable_hit_ratio,
    main,
    make_conversations,
    read_trace,
)

MOONCAKE = """\
{"timestamp": 2000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [0, 2]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
50,GPT-4,10,0,10,API log
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncake_lines_have_prefixes_and_are_put_in_order(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, MOONCAKE))
    assert first == TraceRequest(0.0, 600, 7, (0, 2))
    assert second == TraceRequest(1.0, 1000, 5, (0, 1))


def test_azure_rows_have_times_of_100_nanoseconds(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, AZURE))
    assert (first.at_seconds, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_seconds == pytest.approx(4.314579, abs=1e-5)


def test_burstgpt_rows_that_failed_are_passed_over(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, BURSTGPT))
    assert [(r.at_seconds, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0.0, 472, 18),
        (40.5, 1087, 230),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown format"),
        ("a,b\n1,2\n", "unknown format; the first line is 'a,b"),
        ('{"timestamp": 1}\n', "input_length"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "yesterday"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize("kind", list(FORMATS))
def test_made_trace_of_each_format_is_read_back(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made"
    assert main([str(path), "--format", kind, "--sessions", "5", "--seed", "7"]) == 0
    made = make_conversations(sessions=5, turns=4, seconds=60.0, seed=7)
    assert f"{len(made)} requests" in capsys.readouterr().out
    read = read_trace(path)
    assert [(r.prompt_tokens, r.output_tokens) for r in read] == [
        (r.prompt_tokens, r.output_tokens) for r in made
    ]
    start = made[0].at_seconds
    assert [r.at_seconds for r in read] == pytest.approx([r.at_seconds - start for r in made], abs=2e-3)
    assert [r.prefix_ids for r in read] == [r.prefix_ids if kind == "mooncake" else () for r in made]


def test_attainable_hits_count_what_any_earlier_prompt_had() -> None:
    requests = [TraceRequest(0, 1, 1, (1, 2)), TraceRequest(1, 1, 1, (1, 3)), TraceRequest(2, 1, 1, (1, 3))]
    assert attainable_hit_ratio(requests) == pytest.approx(3 / 6)
    assert attainable_hit_ratio([TraceRequest(0, 1, 1)]) == 0.0


def test_made_conversations_are_the_same_each_time_and_each_turn_begins_with_the_last() -> None:
    made = make_conversations(sessions=20, turns=4, seconds=60, seed=3)
    assert made == make_conversations(sessions=20, turns=4, seconds=60, seed=3)
    assert attainable_hit_ratio(made) > 0.3
    for request in made:
        assert (len(request.prefix_ids) - 1) * 512 < request.prompt_tokens <= len(request.prefix_ids) * 512
