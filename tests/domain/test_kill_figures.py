"""What a benchmark's client saw of kills, in figures."""

from __future__ import annotations

from bench.killing.figures import Kill, summarize
from bench.killing.load import Seen


def stream(at: float, pieces: list[float], *, replica: str = "r0", error: str = "", tries: int = 1) -> Seen:
    """A stream that ended with its last piece."""
    times = [at + piece for piece in pieces]
    return Seen(
        is_stream=True,
        started_at=at,
        ended_at=times[-1] if times else at,
        replica_id=replica,
        pieces_at=times,
        tries=tries,
        error=error,
    )


USUAL = [stream(at, [0.05, 0.07, 0.09]) for at in (1.0, 2.0, 3.0)]
KILL = Kill("replica", 10.0, frozenset({"r0"}))


def test_moved_stream_loses_its_gap_without_the_usual_prefill() -> None:
    moved = stream(9.9, [0.05, 0.08, 0.18, 0.20])  # the kill is at 0.1
    figures = summarize("replica", [KILL], [*USUAL, moved])
    assert (figures["open_requests"], figures["moved_streams"]) == (1, 1)
    assert figures["moved_gap_max_ms"] == 80.0
    assert figures["usual_first_token_p50_ms"] == 50.0
    assert figures["lost_beyond_prefill_max_ms"] == 30.0
    assert figures["late_max_ms"] == 110.0
    assert figures["failed_streams"] == figures["failed_plain"] == figures["failed_new"] == 0


def test_stream_elsewhere_and_stream_without_text_yet_have_not_moved() -> None:
    elsewhere = stream(9.9, [0.05, 0.30], replica="r1")
    waiting = stream(9.9, [0.15, 0.30])
    assert summarize("replica", [KILL], [*USUAL, elsewhere, waiting])["moved_streams"] == 0


def test_failures_are_told_apart_by_when_they_began_and_what_they_were() -> None:
    broken = stream(9.9, [0.05, 0.2], error="broke")
    new = stream(11.0, [0.1], error="refused", tries=3)
    plain = Seen(is_stream=False, started_at=9.5, ended_at=10.5, tries=1, error="closed")
    later = stream(20.0, [0.1], error="of another cause")
    figures = summarize("replica", [KILL], [*USUAL, broken, new, plain, later])
    assert (figures["failed_streams"], figures["failed_plain"], figures["failed_new"]) == (1, 1, 1)
    assert figures["sent_again_by_clients"] == 2
    assert figures["errors"] == ["broke", "closed", "refused"]


def test_kill_of_another_kind_is_no_part_of_it() -> None:
    node = Kill("node", 50.0, frozenset({"r0", "r1"}))
    moved = stream(49.9, [0.05, 0.3])
    assert summarize("replica", [KILL, node], [*USUAL, moved])["moved_streams"] == 0
    assert summarize("node", [KILL, node], [*USUAL, moved])["moved_streams"] == 1


def test_nothing_seen_is_no_figure() -> None:
    figures = summarize("gateway", [], [])
    assert figures["kills"] == 0
    assert figures["late_p50_ms"] is None
    assert figures["lost_beyond_prefill_max_ms"] is None
