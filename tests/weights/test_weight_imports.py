"""Models are taken in from hubs, servers and buckets: fetched once, hashed while they come, checked, told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from tests.fakes.hub import COMMIT, OTHER_COMMIT, HubServer
from tests.fakes.node import wait_for
from tests.fakes.weight_servers import FileServer, serving
from tests.fakes.weights import PIECE, Store, Weights, made_weights, running_store, shard_of, weights_of
from workers.protocol import manifest as manifests
from workers.protocol.imports import ImportState, WeightsImport
from workers.protocol.weights import WeightsSource, WeightsState

TOKEN = "hub-token-very-secret"


@pytest.fixture
def model() -> Weights:
    return model_of()


def model_of(seed: int = 1, **changes: bytes | None) -> Weights:
    """A model that can be taken in: shards with their index, config and tokenizer."""
    made = made_weights(seed, shard_bytes=5 * PIECE + 17)
    contents: dict[str, bytes | None] = {**made.contents, "tokenizer.json": b"{}"}
    del contents["original/empty.txt"]
    contents |= changes
    return weights_of({path: content for path, content in contents.items() if content is not None})


def order_of(server: FileServer, kind: str = "hub", **changes: object) -> WeightsImport:
    location = f"{server.address}/o/n" if kind == "hub" else f"{server.address}/m"
    fields: dict[str, object] = {"import_id": "i-1", "kind": kind, "location": location}
    return WeightsImport(**(fields | changes))  # type: ignore[arg-type]  # fields of a test


def below(prefix: str, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{prefix}/{path}": content for path, content in contents.items()}


def secret(store: Store, name: str, text: str) -> None:
    (store.root / "secrets").mkdir(exist_ok=True)
    (store.root / "secrets" / name).write_text(text)
    (store.root / "secrets" / name).chmod(0o600)


def test_a_model_of_a_hub_is_taken_in_by_its_commit_and_told_piece_for_piece(
    store: Store, model: Weights
) -> None:
    extra = {"README.md": b"hello", "pytorch_model.bin": b"x" * 20_000, ".gitattributes": b"x"}
    with serving(HubServer({**model.contents, **extra})) as hub:
        order = order_of(hub)
        store.take_in(order)
        found = store.findings(order)
        assert found.location == f"{hub.location}/resolve/{COMMIT}"
        assert not hub.asked_for("pytorch_model")
    assert (found.manifest_digest, found.manifest) == (model.digest, model.body)
    assert found.config == model.contents["config.json"]
    assert found.parameter_count == 2 * (5 * PIECE + 17)
    assert set(found.shards) == {path for path in model.contents if path.endswith(".safetensors")}
    assert store.is_right(model)
    seen = store.seen(order)
    assert seen is not None
    assert (seen.files_done, seen.have_bytes) == (len(model.contents), model.total_bytes)


def test_each_file_is_fetched_once(store: Store, model: Weights) -> None:
    with serving(HubServer(dict(model.contents))) as hub:
        order = order_of(hub)
        store.take_in(order)
        store.wait_import(order, ImportState.FOUND)
        fetched = hub.asked_for("/resolve/")
    assert sorted(fetched) == sorted(f"o/n/resolve/{COMMIT}/{path}" for path in model.contents)


def test_the_first_node_starts_from_it_and_fetches_nothing_when_it_is_registered(
    store: Store, model: Weights
) -> None:
    with serving(HubServer(dict(model.contents))) as hub:
        order = order_of(hub)
        store.take_in(order)
        store.wait_import(order, ImportState.FOUND)
        asked = len(hub.asked)
        store.know(model)
        store.take_in(wanted=[model.wanted(WeightsSource(kind="hub", location="https://nowhere/o/n"))])
        store.wait_state(model, WeightsState.READY)
        wait_for(lambda: store.seen(order) is None, "the import to be over")
        held = store.wait_state(model, WeightsState.READY)
        assert [(one.kind, one.bytes) for one in held.sources] == [("hub", model.total_bytes)]
        assert len(hub.asked) == asked
    assert store.keeper.verdict(model.revision).folder is not None
    assert not list((store.root / "store" / "imports").iterdir())


def test_a_server_without_a_list_is_asked_for_what_its_index_names(store: Store, model: Weights) -> None:
    with serving(FileServer(below("m", model.contents))) as server:
        order = order_of(server, "http")
        store.take_in(order)
        assert store.findings(order).manifest_digest == model.digest
        assert store.findings(order).location == f"{server.address}/m"


def test_a_server_with_one_file_of_weights_and_no_ranges_is_read_from_the_beginning(store: Store) -> None:
    model = weights_of(
        {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": shard_of(3 * PIECE, 7)}
    )
    with serving(FileServer(below("m", model.contents), ranges=False)) as server:

        def mend(path: str) -> None:
            tries = [one for one, headers in server.asked if one == path and headers["range"] != "bytes=0-0"]
            if len(tries) > 2:
                server.break_after_bytes = 0

        server.on_answer, server.break_after_bytes = mend, 100_000
        order = order_of(server, "http")
        store.take_in(order)
        assert store.findings(order).manifest_digest == model.digest


def test_a_server_that_always_breaks_off_and_gives_no_ranges_is_not_asked_for_ever(store: Store) -> None:
    model = weights_of(
        {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": shard_of(3 * PIECE, 7)}
    )
    with serving(FileServer(below("m", model.contents), ranges=False, break_after_bytes=100_000)) as server:
        order = order_of(server, "http")
        store.take_in(order)
        wait_for(lambda: "tried again" in getattr(store.seen(order), "reason", ""), "the try to end")
        reason = getattr(store.seen(order), "reason", "")
        assert "no ranges" in reason
        assert len([path for path, _ in server.asked if path == "m/model.safetensors"]) <= 10


@pytest.mark.parametrize("name", ["../secret.json", "a/../../secret.json", "/etc/secret.json"])
def test_a_server_is_asked_for_nothing_outside_the_place_that_was_named(
    store: Store, model: Weights, name: str
) -> None:
    index = json.dumps({"weight_map": {"w": name}}).encode()
    contents = {**model.contents, "model.safetensors.index.json": index}
    with serving(FileServer(below("m", contents))) as server:
        for number, files in enumerate(((), ("config.json", name))):
            order = order_of(server, "http", files=files, import_id=f"i-{number}")
            store.take_in(order)
            assert store.wait_import(order, ImportState.FAILED).reason
        assert not [path for path, _ in server.asked if "secret" in path]


def test_a_server_can_be_told_which_files_to_take_and_no_patterns(store: Store, model: Weights) -> None:
    files = tuple(path for path in model.contents if "index" not in path)
    with serving(FileServer(below("m", model.contents))) as server:
        order = order_of(server, "http", files=files)
        store.take_in(order)
        taken = manifests.decode(store.findings(order).manifest, store.findings(order).manifest_digest)
        assert [file.path for file in taken.files] == sorted(files)
        odd = order_of(server, "http", files=("*.json",), import_id="i-2")
        store.take_in(odd)
        assert "name them" in store.wait_import(odd, ImportState.FAILED).reason


def test_a_bucket_is_listed_and_read_with_a_signature(store: Store, model: Weights) -> None:
    with serving(FileServer(below("bucket/models/m", model.contents), access_key="key-id")) as server:
        told = {
            "endpoint": server.address,
            "access_key": "key-id",
            "secret_key": "very-secret",
            "region": "r",
        }
        secret(store, "s3", json.dumps(told))
        order = order_of(server, "s3", location="s3://bucket/models/m", secret="s3")
        store.take_in(order)
        found = store.findings(order)
    assert (found.manifest_digest, found.location) == (model.digest, "s3://bucket/models/m")


def test_a_token_goes_to_the_hub_and_into_no_report(store: Store, model: Weights) -> None:
    with serving(HubServer(dict(model.contents), token=TOKEN)) as hub:
        order = order_of(hub)
        store.take_in(order)
        assert "401" in store.wait_import(order, ImportState.FAILED).reason
        secret(store, "hub", TOKEN)
        again = msgspec.structs.replace(order, secret="hub", attempt=2)
        store.take_in(again)
        store.findings(again)
    assert TOKEN not in repr(store.told)
    assert TOKEN not in repr(store.keeper.report())


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "GatedRepo", "gated"),
        (403, "GatedRepo", "gated"),
        (401, "RepoNotFound", "no such model, or it is private"),
        (403, "", "secret"),
        (404, "RepoNotFound", "no such model"),
    ],
)
def test_a_hub_that_refuses_is_asked_once_and_its_reason_says_what_to_do(
    store: Store, model: Weights, status: int, code: str, said: str
) -> None:
    with serving(HubServer(dict(model.contents), status=status, error_code=code)) as hub:
        order = order_of(hub)
        store.take_in(order)
        reason = store.wait_import(order, ImportState.FAILED).reason
        assert len(hub.asked) == 1
    assert said in reason
    assert str(status) in reason


def test_a_revision_that_does_not_exist_is_said_to(store: Store, model: Weights) -> None:
    with serving(HubServer(dict(model.contents))) as hub:
        order = order_of(hub, revision="v9")
        store.take_in(order)
        assert "no such revision" in store.wait_import(order, ImportState.FAILED).reason


def test_a_hub_that_is_busy_is_left_alone_for_as_long_as_it_asks(store: Store, model: Weights) -> None:
    with serving(HubServer(dict(model.contents))) as hub:
        hub.refuse_first = [(429, {"Retry-After": "90"})]
        order = order_of(hub)
        store.take_in(order)
        wait_for(lambda: "tried again" in getattr(store.seen(order), "reason", ""), "the rest to be told")
        seen = store.seen(order)
        assert seen is not None
        assert "429" in seen.reason
        assert "rest of 90 s" in seen.reason
        assert len(hub.asked) == 1


def test_a_hub_that_stumbles_in_the_middle_is_asked_on(store: Store, model: Weights) -> None:
    with serving(HubServer(dict(model.contents))) as hub:
        hub.break_after_bytes = PIECE + 1000
        order = order_of(hub)
        store.take_in(order)
        wait_for(lambda: len(hub.asked_for("/resolve/")) > 6, "some tries")
        hub.break_after_bytes = 0
        assert store.findings(order).manifest_digest == model.digest
    assert store.is_right(model)


def test_a_hub_that_hangs_up_after_each_answer_without_saying_so_is_no_fault(
    store: Store, model: Weights
) -> None:
    with serving(HubServer(dict(model.contents), hangs_up=True)) as hub:
        order = order_of(hub)
        store.take_in(order)
        assert store.findings(order).manifest_digest == model.digest
        assert len(hub.asked_for("api/models/o/n/revision")) <= 2


def test_bytes_that_are_not_those_that_the_hub_names_are_refused(store: Store, model: Weights) -> None:
    path = next(path for path in model.contents if path.endswith(".safetensors"))
    with serving(HubServer(dict(model.contents), lies={path: "ab" * 32})) as hub:
        order = order_of(hub)
        store.take_in(order)
        reason = store.wait_import(order, ImportState.FAILED).reason
        assert len([one for one in hub.asked_for("/resolve/") if path in one]) == 2
    assert path in reason
    assert "ab" * 32 in reason
    assert not store.shelf.ready()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda shard: shard[:-1000], "and its header describes"),
        (lambda shard: shard + b"\0" * 16, "and its header describes"),
        (lambda shard: shard[:4], "the length of its header alone takes 8"),
        (lambda shard: (200 << 20).to_bytes(8, "little") + shard[8:], "claims a header of 209,715,200"),
        (lambda _shard: b"", "0 bytes"),
    ],
)
def test_shards_that_are_broken_at_their_publisher_are_never_placed(store: Store, spoil, said: str) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - a lambda of the table above
    model = model_of()
    path = "model-00001-of-00002.safetensors"
    spoilt = {**model.contents, path: spoil(model.contents[path])}
    with serving(HubServer(spoilt)) as hub:
        order = order_of(hub)
        store.take_in(order)
        reason = store.wait_import(order, ImportState.FAILED).reason
    assert path in reason
    assert said in reason
    assert not store.shelf.ready()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "config.json is not among"),
        ("tokenizer.json", "tokenizer.json is not among"),
        ("model-00002-of-00002.safetensors", "model-00002-of-00002.safetensors is not there"),
    ],
)
def test_what_is_no_whole_model_is_refused_by_name(
    store: Store, model: Weights, missing: str, said: str
) -> None:
    contents = {path: content for path, content in model.contents.items() if path != missing}
    with serving(HubServer(contents)) as hub:
        order = order_of(hub)
        store.take_in(order)
        assert said in store.wait_import(order, ImportState.FAILED).reason


@pytest.mark.parametrize(
    "path", ["/etc/evil.json", "a//evil.json", "CONFIG.json", "a\\evil.json", "a\n.json"]
)
def test_paths_that_no_model_has_are_refused_before_anything_is_fetched(
    store: Store, model: Weights, path: str
) -> None:
    with serving(HubServer({**model.contents, path: b"{}"})) as hub:
        order = order_of(hub, files=("*",))
        store.take_in(order)
        assert store.wait_import(order, ImportState.FAILED).reason
        assert not hub.asked_for("/resolve/")


@pytest.mark.parametrize("path", ["../evil.json", "a/../../evil.json", ".hidden/x.json"])
def test_paths_that_hide_or_leave_the_folder_are_never_asked_for(
    store: Store, model: Weights, path: str
) -> None:
    with serving(HubServer({**model.contents, path: b"{}"})) as hub:
        order = order_of(hub, files=("*",))
        store.take_in(order)
        assert store.findings(order).manifest_digest == model.digest


def test_files_that_change_while_they_are_read_are_read_again(store: Store, model: Weights) -> None:
    newer = model_of(seed=2)
    with serving(FileServer(below("m", model.contents))) as server:
        order = order_of(server, "http")

        def swap(path: str) -> None:
            if (
                path == "m/tokenizer.json" and [one for one, _ in server.asked].count(path) == 2
            ):  # listed, read
                server.contents = below("m", newer.contents)

        # The tokenizer is among the smallest and so among the last that are read: shards are there by then.
        server.on_answer = swap
        store.take_in(order)
        assert store.findings(order).manifest_digest == newer.digest
    assert store.is_right(newer)


def test_a_branch_that_moved_meanwhile_is_taken_as_it_is_now(tmp_path: Path, model: Weights) -> None:
    newer = model_of(seed=2)
    with serving(HubServer(dict(model.contents))) as hub:
        hub.break_after_bytes = PIECE
        order = order_of(hub)
        with running_store(tmp_path) as store:
            store.take_in(order)
            wait_for(lambda: hub.asked_for("/resolve/"), "it to be fetched")
        hub.break_after_bytes = 0
        hub.branches = {"main": OTHER_COMMIT}
        hub.contents = dict(newer.contents)
        with running_store(tmp_path) as store:
            store.take_in(order)
            assert store.findings(order).manifest_digest == newer.digest


def test_nothing_is_asked_at_addresses_of_the_node_itself_unless_they_are_allowed(
    store: Store, model: Weights
) -> None:
    store.allow_local = False
    contents = {**model.contents, **below("m", model.contents)}
    for kind in ("hub", "http", "s3"):
        with serving(HubServer(contents)) as hub:
            secret(store, "s3", json.dumps({"endpoint": hub.address, "access_key": "a", "secret_key": "b"}))
            place = {"location": "s3://bucket/m", "secret": "s3"} if kind == "s3" else {}
            order = order_of(hub, kind, import_id=f"i-{kind}", **place)
            store.take_in(order)
            reason = store.wait_import(order, ImportState.FAILED).reason
            assert "127.0.0.1" in reason
            assert "weights_local_sources" in reason
            assert not hub.asked


def test_an_import_that_has_no_room_says_so_before_its_first_byte(tmp_path: Path, model: Weights) -> None:
    with (
        serving(HubServer(dict(model.contents))) as hub,
        running_store(tmp_path, limit_bytes=model.total_bytes - 1) as store,
    ):
        order = order_of(hub)
        store.take_in(order)
        wait_for(lambda: "insufficient space" in getattr(store.seen(order), "reason", ""), "the refusal")
        assert not hub.asked_for("/resolve/")


def test_a_cancelled_import_leaves_nothing_behind(store: Store, model: Weights) -> None:
    with serving(HubServer(dict(model.contents))) as hub:
        hub.bytes_per_second = PIECE / 2
        order = order_of(hub)
        store.take_in(order)
        wait_for(lambda: getattr(store.seen(order), "have_bytes", 0), "some bytes")
        store.take_in()
        wait_for(lambda: not list((store.root / "store" / "imports").iterdir()), "the files to go")
    assert store.seen(order) is None
    assert not store.shelf.ready()


def test_a_failed_import_keeps_what_it_has_until_it_is_tried_again(store: Store, model: Weights) -> None:
    index = "model.safetensors.index.json"
    broken = {**model.contents, index: b'{"weight_map": {"w": "model-00003-of-00002.safetensors"}}'}
    with serving(HubServer(broken, commits={OTHER_COMMIT: model.contents})) as hub:
        order = order_of(hub)
        store.take_in(order)
        assert "model-00003-of-00002.safetensors" in store.wait_import(order, ImportState.FAILED).reason
        store.take_in(msgspec.structs.replace(order, paused=True))
        wait_for(lambda: "somebody" in getattr(store.seen(order), "reason", ""), "the pause")
        hub.branches = {"main": OTHER_COMMIT}
        hub.asked.clear()
        again = msgspec.structs.replace(order, attempt=2)
        store.take_in(again)
        assert store.findings(again).manifest_digest == model.digest
        assert hub.asked_for("/resolve/") == [f"o/n/resolve/{OTHER_COMMIT}/{index}"]


def test_two_imports_at_once_do_not_disturb_one_another(store: Store, model: Weights) -> None:
    other = model_of(seed=2)
    with serving(HubServer(dict(model.contents))) as one, serving(HubServer(dict(other.contents))) as two:
        orders = order_of(one), order_of(two, import_id="i-2")
        store.take_in(*orders)
        assert [store.findings(order).manifest_digest for order in orders] == [model.digest, other.digest]
