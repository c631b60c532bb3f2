"""Which nodes a resync looks at: those whose mark changed, those that are gone, now and then all."""

from __future__ import annotations

from exaserve_ops.controllers.wishes import READ_ANYWAY_RESYNCS, SentWishes


def test_first_resync_looks_at_every_node() -> None:
    assert sorted(SentWishes().changed({"a": (1,), "b": ()})) == ["a", "b"]


def test_later_resync_looks_only_at_what_changed_or_is_new() -> None:
    wishes = SentWishes()
    wishes.changed({"a": (1,), "b": ()})
    assert wishes.changed({"a": (1,), "b": ()}) == []
    assert sorted(wishes.changed({"a": (2,), "b": (), "c": ()})) == ["a", "c"]


def test_node_that_is_gone_is_looked_at_once_more() -> None:
    wishes = SentWishes()
    wishes.changed({"a": (1,), "b": ()})
    wishes.keep("b", 3, ())
    assert wishes.changed({"a": (1,)}) == ["b"]
    wishes.drop("b")
    assert wishes.of("b") is None
    assert wishes.changed({"a": (1,)}) == []


def test_now_and_then_every_node_is_looked_at_whatever_its_mark() -> None:
    wishes, marks = SentWishes(), {"a": (1,), "b": (2,)}
    looks = [len(wishes.changed(marks)) for _ in range(2 * READ_ANYWAY_RESYNCS)]
    assert looks.count(2) == 2
    assert looks.count(0) == len(looks) - 2
