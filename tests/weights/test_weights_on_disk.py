"""What the store does with a node's disk: room, damage, leftovers, and who may write there."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.fakes.node import wait_for
from tests.fakes.weights import (
    PIECE,
    BadSource,
    Store,
    made_weights,
    put,
    running_store,
    weights_of,
)
from workers.protocol.weights import WeightsState
from workers.weights.shelf import Shelf
from workers.weights.staging import Staged


def test_one_store_has_one_owner_and_the_lock_goes_with_it(store: Store, tmp_path: Path) -> None:
    wait_for(lambda: not store.keeper.report().problem, "the store")
    second = Store(tmp_path)
    second.keeper.step()
    assert "another agent" in second.keeper.report().problem
    store.keeper.stop()
    third = Store(tmp_path)
    third.keeper.step()
    assert third.keeper.report().problem == ""
    third.shelf.close()


def test_what_does_not_fit_is_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    with running_store(tmp_path, limit_bytes=PIECE) as store:
        weights = made_weights()
        store.know(weights)
        source = BadSource(weights.contents)
        store.want(weights.wanted(store.give("file:///a", source)))
        held = store.wait_state(weights, WeightsState.FAILED)
        assert "insufficient space" in held.reason
        assert f"{weights.total_bytes:,}" in held.reason
        assert source.asked == []
        assert "insufficient space" in store.keeper.verdict(weights.revision).reason


def test_the_least_recently_used_that_nobody_wants_makes_room(tmp_path: Path) -> None:
    one, two, three = made_weights(1), made_weights(2), made_weights(3)
    size = one.total_bytes + 64 * 1024
    with running_store(tmp_path, limit_bytes=2 * size) as store:
        places = {w.revision: put(store, w, str(n)) for n, w in enumerate((one, two, three))}
        store.want(one.wanted(places[one.revision]))
        store.wait_state(one, WeightsState.READY)
        store.want(two.wanted(places[two.revision]))
        store.wait_state(two, WeightsState.READY)
        store.in_use = frozenset({one.revision})
        wait_for(lambda: getattr(store.held(one), "in_use", False), "use")
        store.in_use = frozenset()
        store.want(three.wanted(places[three.revision]))
        store.wait_state(three, WeightsState.READY)
        assert store.held(two) is None, "one was used after it"
        assert not store.folder(two).exists()
        assert store.state(one) is WeightsState.READY


def test_what_replicas_run_from_or_somebody_wants_is_never_evicted(tmp_path: Path) -> None:
    one, two, three = made_weights(1), made_weights(2), made_weights(3)
    with running_store(tmp_path, limit_bytes=2 * one.total_bytes + 128 * 1024) as store:
        places = [put(store, w, str(n)) for n, w in enumerate((one, two, three))]
        store.want(one.wanted(places[0]), two.wanted(places[1]))
        store.wait_state(one, WeightsState.READY)
        store.wait_state(two, WeightsState.READY)
        store.in_use = frozenset({one.revision})
        store.want(two.wanted(places[1]), three.wanted(places[2]))
        assert "insufficient space" in store.wait_state(three, WeightsState.FAILED).reason
        assert store.is_right(one)
        assert store.is_right(two)


def test_a_full_disk_is_said_keeps_what_is_verified_and_goes_on_when_there_is_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = made_weights()
    real = os.pwrite
    full = threading.Event()
    full.set()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if full.is_set() and len(data) > 1000 and offset >= 4 * PIECE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    store.want(weights.wanted(put(store, weights)))
    assert "No space left" in store.wait_state(weights, WeightsState.FAILED).reason
    assert store.keeper.verdict(weights.revision).folder is None
    full.clear()
    store.keeper._retries[weights.revision].not_before = 0.0
    store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)


def test_a_store_that_cannot_be_written_says_so_and_what_is_ready_stays_usable(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    with running_store(tmp_path) as store:
        wait_for(lambda: str(tmp_path / "store") in store.keeper.report().problem, "a problem")
        assert store.keeper.verdict(made_weights().revision).folder is None
        assert "store" in store.keeper.verdict(made_weights().revision).reason


def test_equal_files_of_two_revisions_lie_on_the_disk_once(store: Store) -> None:
    one = made_weights(1)
    other = weights_of({**one.contents, "config.json": b'{"another": 1}'})
    store.want(one.wanted(put(store, one)))
    store.wait_state(one, WeightsState.READY)
    used = store.keeper.report().used_bytes
    store.want(one.wanted(put(store, one)), other.wanted(put(store, other, "other")))
    held = store.wait_state(other, WeightsState.READY)
    assert sum(source.bytes for source in held.sources) < PIECE, "only what differs was read"
    assert store.keeper.report().used_bytes < used + PIECE
    assert store.is_right(other)
    # And each may go without the other.
    store.want(other.wanted(put(store, other, "other")))
    wait_for(lambda: not getattr(store.held(one), "wanted", True), "one to be nobody's")
    store.keeper._inventory.evict(one.revision)
    assert store.is_right(other)


def test_what_touched_weights_since_is_found_before_they_are_used(store: Store) -> None:
    weights = made_weights()
    store.want(weights.wanted(put(store, weights)))
    store.wait_state(weights, WeightsState.READY)
    path = store.folder(weights) / next(iter(weights.contents))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(3 * PIECE)
        file.write(b"rot")
    verdict = store.keeper.verdict(weights.revision)
    assert verdict.folder is None
    assert "touched" in verdict.reason
    wait_for(lambda: store.keeper.verdict(weights.revision).folder, "it to be mended")
    assert store.is_right(weights)
    wait_for(lambda: getattr(store.held(weights), "damaged_pieces", 0) >= 1, "the damage to be told")
    assert [p.name for p in (store.shelf.root / "damaged").iterdir()], "kept for whoever wants to know why"


@pytest.mark.parametrize("change", ["cut", "grown", "gone"])
def test_a_file_of_another_size_is_never_launched_from(store: Store, change: str) -> None:
    weights = made_weights()
    store.want(weights.wanted(put(store, weights)))
    store.wait_state(weights, WeightsState.READY)
    name = next(iter(weights.contents))
    path = store.folder(weights) / name
    path.chmod(0o644)
    if change == "gone":
        path.unlink()
    else:
        os.truncate(path, 100 if change == "cut" else path.stat().st_size + 16)
    verdict = store.keeper.verdict(weights.revision)
    assert verdict.folder is None
    assert name in verdict.reason
    wait_for(lambda: store.keeper.verdict(weights.revision).folder, "it to be mended")
    assert store.is_right(weights)


def test_scrubbing_finds_bytes_that_the_disk_changed_without_a_trace(tmp_path: Path) -> None:
    weights = made_weights()
    with running_store(tmp_path, scrub=1e9) as store:
        store.want(weights.wanted(put(store, weights)))
        store.wait_state(weights, WeightsState.READY)
        path = store.folder(weights) / next(iter(weights.contents))
        before = path.stat()
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(4 * PIECE)
            file.write(b"rot")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert store.keeper.verdict(weights.revision).folder is not None, "nothing to be seen from outside"

        def found() -> int:
            store.keeper._scrub._wake.set()
            return getattr(store.held(weights), "damaged_pieces", 0)

        wait_for(found, "the scrub")
        store.wait_state(weights, WeightsState.READY)
        assert store.is_right(weights)


def test_an_engine_that_runs_keeps_its_files_while_damaged_ones_are_replaced(store: Store) -> None:
    weights = made_weights()
    store.want(weights.wanted(put(store, weights)))
    store.wait_state(weights, WeightsState.READY)
    name = next(iter(weights.contents))
    with (store.folder(weights) / name).open("rb") as held_open:
        store.keeper._take_damage(weights.revision, {name})
        wait_for(lambda: store.keeper.verdict(weights.revision).folder, "it to be mended")
        assert store.is_right(weights)
        assert held_open.read() == weights.contents[name]


def test_leftovers_of_crashes_are_swept_away(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / "staged" / "gone-1").mkdir(parents=True)
    (root / "staged" / "gone-1" / "x").write_text("x")
    (root / "ready" / ("ab" * 32)).mkdir(parents=True)
    (root / "manifests").mkdir()
    (root / "manifests" / ("cd" * 32)).write_text("junk")
    (root / "facts.json").write_text("{broken")
    with running_store(tmp_path) as store:
        wait_for(lambda: not store.keeper.report().problem, "the store")
        assert not (root / "staged" / "gone-1").exists()
        assert not (root / "ready" / ("ab" * 32)).exists()
        assert not list((root / "manifests").iterdir())


def test_staged_files_are_never_written_through_a_link(tmp_path: Path) -> None:
    weights = made_weights()
    shelf = Shelf(tmp_path / "s")
    shelf.open()
    shelf.keep_manifest(weights.digest, weights.body)
    staged = shelf.stage(weights.revision)
    piece = staged.row.piece(0)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (staged.files / piece.path).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        staged.write(piece, memoryview(bytes(piece.length)))
    assert victim.read_text() == "precious"
    assert isinstance(staged, Staged)
    staged.close()
    shutil.rmtree(tmp_path / "s")
