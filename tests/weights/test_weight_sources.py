"""Weights come from folders, HTTP servers, hubs and S3 stores; secrets stay on the node."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.fakes.node import wait_for
from tests.fakes.weight_servers import FileServer, serving
from tests.fakes.weights import Store, Weights, made_weights
from workers.protocol.weights import WeightsSource, WeightsState
from workers.weights.secrets import SecretError, Secrets
from workers.weights.sources.opening import open_source
from workers.weights.sources.port import MissingFileError, RefusedError, SourceError

TOKEN = "hub-token-very-secret"


@pytest.fixture
def weights() -> Weights:
    return made_weights()


def server_of(weights: Weights, prefix: str = "m") -> FileServer:
    return FileServer({f"{prefix}/{path}": content for path, content in weights.contents.items()})


def secret(store: Store, name: str, text: str) -> None:
    folder = store.root / "secrets"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o600)


def test_ranges_of_an_http_server_are_fetched_over_kept_connections(store: Store, weights: Weights) -> None:
    store.know(weights)
    with serving(server_of(weights)) as server:
        store.want(weights.wanted(WeightsSource(kind="http", location=f"{server.address}/m/")))
        held = store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)
    assert held.sources[0].kind == "http"
    assert held.sources[0].name == server.address.removeprefix("http://")
    assert all("range" in headers for _, headers in server.asked)


def test_a_server_that_breaks_off_is_asked_for_the_rest(store: Store, weights: Weights) -> None:
    store.know(weights)
    with serving(server_of(weights)) as server:
        server.break_after_bytes = 100_000
        store.want(weights.wanted(WeightsSource(kind="http", location=f"{server.address}/m")))
        wait_for(lambda: len(server.asked) >= 3, "some tries")
        server.break_after_bytes = 0
        store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)


def test_an_origin_that_was_restarted_is_used_again(store: Store, weights: Weights) -> None:
    store.know(weights)
    with serving(server_of(weights)) as server:
        server.status = 503
        store.want(weights.wanted(WeightsSource(kind="http", location=f"{server.address}/m")))
        wait_for(lambda: "503" in getattr(store.held(weights), "reason", ""), "the outage to be told")
        assert store.state(weights) is WeightsState.FETCHING
        server.status = 0
        store.wait_state(weights, WeightsState.READY)


def test_a_server_without_ranges_gives_whole_files(weights: Weights) -> None:
    path, content = next(iter(weights.contents.items()))
    with serving(server_of(weights)) as server:
        server.ranges = False
        source = open_source(
            WeightsSource(kind="http", location=f"{server.address}/m"), Secrets(Path("/x")), allow_local=True
        )
        memory = bytearray(1000)
        with source.open_range(path, 0, 1000) as reader:
            reader.read_into(memoryview(memory))
        assert bytes(memory) == content[:1000]
        with pytest.raises(SourceError, match="gives no ranges"), source.open_range(path, 1000, 1000):
            pass
        source.close()


def test_a_hub_gets_its_token_and_the_place_that_it_sends_on_to_does_not(
    store: Store, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store.know(weights)
    secret(store, "hub", TOKEN + "\n")
    with serving(server_of(weights, "o/n/resolve/c")) as blobs, serving(FileServer({}, token=TOKEN)) as hub:
        hub.redirect_to = blobs.address
        location = f"{hub.address}/o/n/resolve/c"
        store.want(weights.wanted(WeightsSource(kind="hub", location=location, secret="hub")))
        store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)
    assert all(headers["authorization"] == f"Bearer {TOKEN}" for _, headers in hub.asked)
    assert not any("authorization" in headers for _, headers in blobs.asked)
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(store.keeper.report())


@pytest.mark.parametrize("status", [401, 403])
def test_a_hub_that_refuses_is_not_asked_again_and_the_reason_says_why(
    store: Store, weights: Weights, status: int
) -> None:
    store.know(weights)
    with serving(server_of(weights)) as server:
        server.status = status
        store.want(weights.wanted(WeightsSource(kind="hub", location=f"{server.address}/m")))
        reason = store.wait_state(weights, WeightsState.FAILED).reason
        assert len(server.asked) <= 4
    assert str(status) in reason
    assert "secret" in reason


def test_an_address_that_a_redirect_signed_is_never_told(store: Store, weights: Weights) -> None:
    store.know(weights)
    with serving(FileServer({})) as blobs, serving(FileServer({})) as hub:
        hub.redirect_to = blobs.address
        store.want(weights.wanted(WeightsSource(kind="hub", location=f"{hub.address}/m")))
        reason = store.wait_state(weights, WeightsState.FAILED).reason
    assert "404" in reason
    assert "signature" not in reason


def s3_secret(address: str, **changes: str) -> str:
    told = {"endpoint": address, "access_key": "key-id", "secret_key": "s3-very-secret", "region": "r"}
    return json.dumps(told | changes)


def test_objects_of_an_s3_store_are_fetched_with_a_signature(store: Store, weights: Weights) -> None:
    store.know(weights)
    with serving(server_of(weights, "bucket/models/m")) as server:
        server.access_key = "key-id"
        secret(store, "s3", s3_secret(server.address))
        location = "s3://bucket/models/m"
        store.want(weights.wanted(WeightsSource(kind="s3", location=location, secret="s3")))
        held = store.wait_state(weights, WeightsState.READY)
    assert store.is_right(weights)
    assert (held.sources[0].kind, held.sources[0].name) == ("s3", "s3://bucket")
    assert not any("s3-very-secret" in str(headers) for _, headers in server.asked)


def test_an_s3_store_that_refuses_or_lacks_a_file_says_so_in_its_own_words(store: Store) -> None:
    with serving(FileServer({}, access_key="other")) as server:
        secret(store, "s3", s3_secret(server.address))
        told = WeightsSource(kind="s3", location="s3://bucket/m", secret="s3")
        source = open_source(told, Secrets(store.root / "secrets"), allow_local=True)
        with pytest.raises(RefusedError, match="AccessDenied"), source.open_range("a", 0, 10):
            pass
        server.access_key = "key-id"
        with pytest.raises(MissingFileError, match="NoSuchKey"), source.open_range("a", 0, 10):
            pass
        secret(store, "s3", '{"secret_key": "s3-very-secret", "odd": 1}')
        with pytest.raises(RefusedError) as caught:
            open_source(told, Secrets(store.root / "secrets"), allow_local=True)
        assert "very-secret" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_secrets_that_others_can_read_or_that_lie_elsewhere_are_refused(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    (tmp_path / "open").write_text("x")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "empty").touch(mode=0o600)
    for name, told in (
        ("open", "chmod 600"),
        ("empty", "empty"),
        ("none", "mode 600"),
        ("../x", "no name"),
        ("/etc/passwd", "no name"),
        (".hidden", "no name"),
    ):
        with pytest.raises(SecretError, match=told):
            secrets.read(name)


@pytest.mark.parametrize(
    ("kind", "location"),
    [
        ("folder", "https://host/x"),
        ("folder", "file://elsewhere/x"),
        ("http", "file:///x"),
        ("http", "http://"),
        ("s3", "https://bucket/x"),
        ("torrent", "magnet:x"),
    ],
)
def test_a_source_that_this_agent_cannot_use_is_passed_over(kind: str, location: str) -> None:
    with pytest.raises(SourceError):
        open_source(WeightsSource(kind=kind, location=location), Secrets(Path("/nowhere")))


def test_kinds_that_are_not_known_do_not_keep_others_from_being_used(store: Store, weights: Weights) -> None:
    store.know(weights)
    with serving(server_of(weights)) as server:
        sources = (
            WeightsSource(kind="peer", location="peer://x"),
            WeightsSource(kind="http", location=f"{server.address}/m"),
        )
        store.want(weights.wanted(*sources))
        store.wait_state(weights, WeightsState.READY)
