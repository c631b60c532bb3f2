"""Weights on a node's disk are whole and right, or they are not there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.fakes.node import wait_for
from tests.fakes.weights import (
    PIECE,
    BadSource,
    Store,
    folder_source,
    made_weights,
    put,
    running_store,
    shard_of,
    weights_of,
)
from workers.protocol.weights import WeightsState
from workers.weights.fetching import Fetch, FetchPolicy
from workers.weights.shelf import Shelf
from workers.weights.sources.port import MissingFileError, SourceError


def test_what_is_wanted_comes_whole_and_read_only_and_tells_where_from(store: Store) -> None:
    weights = made_weights()
    store.want(weights.wanted(put(store, weights)))
    held = store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)
    assert held.have_bytes == held.total_bytes == weights.total_bytes
    assert [(s.kind, s.bytes) for s in held.sources] == [("folder", weights.total_bytes)]
    assert all(not p.stat().st_mode & 0o222 for p in store.folder(weights).rglob("*") if p.is_file())
    assert store.keeper.verdict(weights.revision).folder == store.folder(weights)
    assert not list((store.shelf.root / "staged").iterdir())


def test_nothing_is_to_be_seen_before_all_of_it_is_verified(store: Store) -> None:
    weights = made_weights()
    store.know(weights)
    gate = threading.Event()
    source = BadSource(weights.contents, gate=gate)
    store.want(weights.wanted(store.give("file:///slow", source)))
    store.wait_state(weights, WeightsState.FETCHING)
    assert not store.folder(weights).exists()
    verdict = store.keeper.verdict(weights.revision)
    assert verdict.folder is None
    assert "fetching" in verdict.reason
    gate.set()
    store.wait_state(weights, WeightsState.READY)


@pytest.mark.parametrize("place", [0, PIECE - 1, 3 * PIECE, 8 * PIECE])
def test_a_wrong_byte_from_the_nearest_source_is_found_and_the_next_one_asked(
    store: Store, place: int
) -> None:
    weights = made_weights()
    name = next(iter(weights.contents))
    damaged = dict(weights.contents)
    damaged[name] = damaged[name][:place] + bytes([damaged[name][place] ^ 1]) + damaged[name][place + 1 :]
    bad = BadSource(damaged, name="near")
    store.want(weights.wanted(store.give("file:///near", bad), put(store, weights)))
    held = store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)
    assert held.damaged_pieces >= 3, "asked again, and no more than it was patient for"
    assert len(bad.asked) < 20


def test_a_source_that_only_gives_wrong_bytes_ends_in_a_clear_failure_and_not_in_a_loop(store: Store) -> None:
    weights = made_weights()
    store.know(weights)
    bad = BadSource(weights.contents, spoil=lambda _path, _offset, data: bytes(len(data)), name="liar")
    store.want(weights.wanted(store.give("file:///liar", bad)))
    held = store.wait_state(weights, WeightsState.FAILED)
    assert "liar were damaged" in held.reason
    assert held.spoilt
    assert len(bad.asked) <= 12
    assert not store.folder(weights).exists()


def test_two_revisions_of_a_shard_of_one_name_and_size_are_never_mixed(store: Store) -> None:
    one, two = made_weights(1), made_weights(2)
    assert [(f.path, f.size_bytes) for f in one.manifest.files] == [
        (f.path, f.size_bytes) for f in two.manifest.files
    ]
    place = put(store, one)
    store.know(two)
    store.want(one.wanted(place), two.wanted(place))
    store.wait_state(one, WeightsState.READY)
    assert "damaged" in store.wait_state(two, WeightsState.FAILED).reason
    store.want(one.wanted(place), two.wanted(put(store, two, "other")))
    store.wait_state(two, WeightsState.READY)
    assert store.is_right(one)
    assert store.is_right(two)


def test_a_fetch_that_was_cut_off_goes_on_from_verified_pieces(tmp_path: Path) -> None:
    weights = made_weights(shards=4)
    got = threading.Semaphore(6)

    def only_some(_path: str, _offset: int, data: bytes) -> bytes:
        if not got.acquire(blocking=False):
            raise SourceError("gone")
        return data

    with running_store(tmp_path) as store:
        store.know(weights)
        store.want(weights.wanted(store.give("file:///a", BadSource(weights.contents, spoil=only_some))))
        wait_for(lambda: "gone" in getattr(store.held(weights), "reason", ""), "the source to be gone")
    with running_store(tmp_path) as store:
        whole = BadSource(weights.contents)
        store.know(weights)
        store.want(weights.wanted(store.give("file:///a", whole)))
        held = store.wait_state(weights, WeightsState.READY)
        assert store.is_right(weights)
        assert sum(source.bytes for source in held.sources) < weights.total_bytes


def test_what_was_only_written_before_a_reboot_is_read_again(tmp_path: Path) -> None:
    weights = made_weights()
    shelf = Shelf(tmp_path)
    shelf.open()
    shelf.keep_manifest(weights.digest, weights.body)
    staged = shelf.stage(weights.revision)
    for index in range(6):
        piece = staged.row.piece(index)
        content = weights.contents[piece.path]
        staged.write(piece, memoryview(content[piece.offset : piece.offset + piece.length]))
        if index == 2:
            staged.sync()
    path = staged.files / staged.row.piece(4).path
    staged.close()
    with path.open("r+b") as file:  # the disk lost one of those that were not synced
        file.seek(staged.row.piece(4).offset)
        file.write(bytes(PIECE))
    marks = staged.folder / "pieces"
    marks.write_bytes(b"another boot".ljust(64, b"\0") + marks.read_bytes()[64:])
    again = shelf.stage(weights.revision)
    assert list(again.marks.present()) == [0, 1, 2, 3, 5]
    assert again.marks.same_boot
    again.close()
    shelf.close()


def test_a_file_that_lost_its_tail_while_staged_is_fetched_again(tmp_path: Path) -> None:
    weights = made_weights()
    shelf = Shelf(tmp_path)
    shelf.open()
    shelf.keep_manifest(weights.digest, weights.body)
    staged = shelf.stage(weights.revision)
    piece = staged.row.piece(3)
    staged.write(piece, memoryview(weights.contents[piece.path][piece.offset : piece.offset + piece.length]))
    path = staged.files / piece.path
    staged.close()
    os.truncate(path, 10)
    again = shelf.stage(weights.revision)
    assert list(again.marks.present()) == []
    again.close()
    shelf.close()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (shard_of(5 * PIECE, 1)[:-1_000], "describes"),
        (shard_of(5 * PIECE, 1) + bytes(16), "describes"),
        (b"\x05\0\0", "length of its header"),
        ((200_000_000).to_bytes(8, "little") + bytes(5000), "200,000,000"),
    ],
)
def test_weights_that_no_engine_could_load_are_never_put_into_place(
    store: Store, content: bytes, told: str
) -> None:
    weights = weights_of({"model.safetensors": content, "config.json": b"{}"})
    store.want(weights.wanted(put(store, weights)))
    held = store.wait_state(weights, WeightsState.FAILED)
    assert "model.safetensors" in held.reason
    assert told in held.reason
    assert held.spoilt
    verdict = store.keeper.verdict(weights.revision)
    assert verdict.folder is None
    assert verdict.hopeless
    assert not store.folder(weights).exists()


def test_an_index_that_names_a_missing_shard_is_never_put_into_place(store: Store) -> None:
    whole = made_weights()
    contents = {path: c for path, c in whole.contents.items() if "00002-of" not in path}
    weights = weights_of(contents)
    store.want(weights.wanted(put(store, weights)))
    assert "model-00002-of-00002" in store.wait_state(weights, WeightsState.FAILED).reason


def test_a_shorter_shard_at_the_source_is_named_with_both_sizes(store: Store) -> None:
    weights = made_weights()
    place = put(store, weights)
    name = next(iter(weights.contents))
    os.truncate(store.root / "origin" / name, 2 * PIECE)
    store.want(weights.wanted(place))
    held = store.wait_state(weights, WeightsState.FAILED)
    assert name in held.reason
    assert f"{2 * PIECE:,}" in held.reason
    assert held.spoilt


def test_a_source_that_is_away_says_nothing_against_the_weights(store: Store) -> None:
    weights = made_weights()
    place = put(store, weights)
    (store.root / "origin").rename(store.root / "elsewhere")
    store.want(weights.wanted(place))
    assert not store.wait_state(weights, WeightsState.FAILED).spoilt


def test_many_who_ask_make_one_download(store: Store) -> None:
    weights = made_weights()
    store.know(weights)
    source = BadSource(weights.contents, pause_seconds=0.002)
    place = store.give("file:///a", source)
    for _ in range(20):
        store.want(weights.wanted(place, priority=_))
        store.keeper.verdict(weights.revision)
    store.wait_state(weights, WeightsState.READY)
    # Each run of pieces once: what several files have in common is their end, not their pieces.
    assert len(source.asked) == len(set(source.asked))


def test_two_models_at_once_both_come(store: Store) -> None:
    both = [made_weights(n) for n in (1, 2)]
    store.want(*(w.wanted(put(store, w, str(n))) for n, w in enumerate(both)))
    for weights in both:
        store.wait_state(weights, WeightsState.READY)
        assert store.is_right(weights)


def test_paused_keeps_what_is_there_and_cancelled_does_not(store: Store) -> None:
    weights = made_weights(shards=4)
    store.know(weights)
    given = threading.Semaphore(6)

    def six(_path: str, _offset: int, data: bytes) -> bytes:
        if not given.acquire(blocking=False):
            raise SourceError("no more for now")
        return data

    source = BadSource(weights.contents, spoil=six)
    place = store.give("file:///a", source)
    store.want(weights.wanted(place))
    wait_for(lambda: getattr(store.held(weights), "have_bytes", 0) > PIECE, "some pieces")
    store.want(weights.wanted(place, paused=True))
    held = store.wait_state(weights, WeightsState.PAUSED)
    assert 0 < held.have_bytes < weights.total_bytes
    assert not store.keeper._jobs, "nothing is read any more"
    store.want()
    wait_for(lambda: not list((store.shelf.root / "staged").iterdir()), "the staged files to go")


def test_a_manifest_that_is_not_to_be_had_or_is_another_one_is_waited_for(store: Store) -> None:
    weights, other = made_weights(1), made_weights(2)
    store.want(weights.wanted(folder_source(store.root)))
    assert "manifest" in store.wait_state(weights, WeightsState.WAITING).reason
    store.manifests[weights.digest] = other.body
    store.keeper._manifest_tries.clear()
    wait_for(lambda: "refused" in getattr(store.held(weights), "reason", ""), "a refusal")
    assert store.keeper.verdict(weights.revision).folder is None


def test_other_sources_are_tried_at_once(store: Store) -> None:
    weights = made_weights()
    store.know(weights)
    store.want(weights.wanted(folder_source(store.root / "nowhere")))
    assert "does not exist" in store.wait_state(weights, WeightsState.FAILED).reason
    store.want(weights.wanted(put(store, weights)))
    store.wait_state(weights, WeightsState.READY)


def test_a_cap_on_bytes_per_second_is_kept_and_may_be_lifted_on_the_way(store: Store) -> None:
    weights = made_weights(shards=1, shard_bytes=40 * PIECE)
    place = put(store, weights)
    store.want(weights.wanted(place, bytes_per_second=50_000.0))
    # Without the cap it would be over before anybody looked.
    store.wait_state(weights, WeightsState.FETCHING)
    store.want(weights.wanted(place))
    store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)


def test_sources_rest_and_are_given_up_in_bounds(tmp_path: Path) -> None:
    weights = made_weights()
    shelf = Shelf(tmp_path)
    shelf.open()
    shelf.keep_manifest(weights.digest, weights.body)

    def fail(_path: str, _offset: int, _data: bytes) -> bytes:
        raise SourceError("connection reset")

    flaky = BadSource(weights.contents, spoil=fail, name="flaky")
    staged = shelf.stage(weights.revision)
    fetch = Fetch(staged, [flaky], (), policy=FetchPolicy(failures=5, first_rest_seconds=0.001))
    fetch.start()
    wait_for(lambda: fetch.progress().ended, "the end")
    fetch.stop()
    assert "connection reset" in fetch.progress().failure
    assert len(flaky.asked) <= 5 + 4
    staged.close()
    shelf.close()


def test_missing_files_at_one_source_are_no_reason_to_stop(store: Store) -> None:
    weights = made_weights()

    def missing(path: str, _offset: int, data: bytes) -> bytes:
        if "00002" in path:
            raise MissingFileError(f"{path} is not there")
        return data

    near = store.give("file:///near", BadSource(weights.contents, spoil=missing))
    store.want(weights.wanted(near, put(store, weights)))
    store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)
