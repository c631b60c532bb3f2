"""What a gateway remembers of owners is recent and bounded."""

from __future__ import annotations

from exaserve_ops.adapters.session_table import SessionEntry
from exaserve_ops.gateway.owners import RecentOwners

FIRST = SessionEntry(b"replica1", 1, 1, 0, 0)
SECOND = SessionEntry(b"replica2", 2, 5, 0, 0)


def test_the_last_word_on_a_session_counts() -> None:
    owners = RecentOwners()
    owners.note("m", "s", FIRST, 0.0)
    owners.note("m", "s", SECOND, 31.0)
    assert owners.find("m", "s", 31.0) == SECOND
    assert owners.find("other", "s", 31.0) is None


def test_entry_is_forgotten_within_a_minute_unless_it_is_heard_of_again() -> None:
    owners = RecentOwners()
    owners.note("m", "s", FIRST, 0.0)
    owners.note("m", "often", FIRST, 0.0)
    assert owners.find("m", "s", 29.0) == FIRST
    owners.note("m", "often", FIRST, 45.0)
    assert owners.find("m", "s", 59.0) == FIRST
    assert owners.find("m", "s", 60.0) is None
    assert owners.find("m", "often", 70.0) == FIRST


def test_nothing_is_left_after_a_long_silence() -> None:
    owners = RecentOwners()
    owners.note("m", "s", FIRST, 0.0)
    assert owners.find("m", "s", 3600.0) is None
    assert len(owners) == 0


def test_memory_is_bounded_and_keeps_the_newest() -> None:
    owners = RecentOwners(most=100)
    for number in range(1000):
        owners.note("m", f"s{number}", FIRST, 0.0)
    assert len(owners) <= 200
    assert all(owners.find("m", f"s{number}", 0.0) for number in range(900, 1000))
