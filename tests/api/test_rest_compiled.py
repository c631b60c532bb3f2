"""Compiled files over REST: registered by who may register models, listed, replaced, removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from exaserve_ops.adapters.compiled_folder import CompiledFolder
from exaserve_ops.api.ports import compiled_folder_reader
from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.domain import compiled as bounds
from exaserve_ops.serving.models import CompiledSet
from exaserve_ops.weights.domain.held import HeldWeights, StoreSight
from exaserve_ops.weights.services import record_sight
from tests.api.conftest import JsonClient
from tests.fakes.world import NOW, make_model

pytestmark = pytest.mark.django_db


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    (folder / "inductor" / "ab").mkdir(parents=True)
    (folder / "inductor" / "ab" / "kernel.so").write_bytes(b"code" * 100)
    (folder / "triton").mkdir()
    (folder / "triton" / "k.cubin").write_bytes(b"cubin")
    return folder


@pytest.fixture
def address() -> str:
    return f"/api/v1/models/{make_model().pk}/compiled"


def wish(folder: Path, **changes: object) -> dict[str, object]:
    return {"engine": "vllm", "hardware": "NVIDIA H200", "folder": str(folder), "reason": "fast"} | changes


def test_a_folder_is_registered_listed_with_its_nodes_and_removed_each_with_an_event(
    operator: JsonClient, viewer: JsonClient, node: Node, address: str, folder: Path
) -> None:
    answer = operator.post(address, wish(folder))
    assert answer.status_code == 201, answer.json()
    [one] = viewer.get(address).json()["sets"]
    assert (one["engine"], one["hardware"], one["file_count"]) == ("vllm", "NVIDIA H200", 2)
    assert one["total_bytes"] == 405
    assert one["origins"] == [{"kind": "folder", "location": folder.as_uri(), "secret": ""}]
    held = HeldWeights(one["digest"], "ready", 405, 405, wanted=True)
    record_sight(node.pk, StoreSight(1, held=(held,)), names={}, now=NOW)
    [one] = viewer.get(address).json()["sets"]
    assert (one["nodes"], one["ready_nodes"], one["failed_nodes"]) == (1, 1, 0)
    removed = operator.delete(f"{address}/{one['id']}").json()
    assert removed["sets"] == []
    assert "copies in engines' caches on nodes stay" in removed["note"]
    assert operator.delete(f"{address}/{one['id']}").status_code == 404
    events = Event.objects.filter(event__startswith="compiled_").order_by("pk")
    assert [event.event for event in events] == ["compiled_registered", "compiled_removed"]
    assert "fast" in events[0].reason


def test_the_same_engine_and_hardware_again_replaces_and_other_hardware_stands_beside(
    operator: JsonClient, address: str, folder: Path
) -> None:
    operator.post(address, wish(folder))
    (folder / "triton" / "more.cubin").write_bytes(b"more")
    operator.post(address, wish(folder))
    operator.post(address, wish(folder, hardware=""))
    assert {(one.hardware, one.file_count) for one in CompiledSet.objects.all()} == {
        ("NVIDIA H200", 3),
        ("", 3),
    }


def test_files_of_another_engine_are_refused_as_are_names_and_places_that_no_node_could_use(
    operator: JsonClient, address: str, folder: Path
) -> None:
    operator.post(address, wish(folder))
    assert operator.post(address, wish(folder, engine="sglang")).status_code == 409
    for wrong in (
        wish(folder, engine="../torch"),
        wish(folder, hardware="a\nb"),
        wish(folder / "nowhere"),
        wish(Path("triton")),
        wish(folder, origins=[{"kind": "http", "location": "ftp://x/y"}]),
        wish(folder, surprise=1),
        {key: value for key, value in wish(folder).items() if key != "reason"},
    ):
        assert operator.post(address, wrong).status_code == 400, wrong
    assert CompiledSet.objects.count() == 1


def test_a_folder_that_is_empty_too_large_or_leads_elsewhere_is_refused_with_the_reason(
    operator: JsonClient, address: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no file" in str(operator.post(address, wish(tmp_path / "empty")).json())
    (folder / "passwd").symlink_to("/etc/passwd")
    assert "leads out of the folder" in str(operator.post(address, wish(folder)).json())
    (folder / "passwd").unlink()
    monkeypatch.setattr("exaserve_ops.adapters.compiled_folder.MOST_BYTES", 404)
    told = str(operator.post(address, wish(folder)).json())
    assert "405 bytes" in told
    assert bounds.MOST_BYTES > 404
    assert not CompiledSet.objects.exists()


def test_only_what_lies_below_a_named_folder_is_registered_links_followed_and_nothing_that_hides(
    operator: JsonClient, address: str, tmp_path: Path, folder: Path
) -> None:
    var = tmp_path / "var"
    (var / "compiled" / ".hidden").mkdir(parents=True)
    (var / "secrets").mkdir()
    (var / "secrets" / "fleet_secret").write_text("00" * 32)
    (var / "compiled" / ".hidden" / "x").write_text("x")
    (var / "compiled" / "way-out").symlink_to(var / "secrets")
    compiled_folder_reader.use(CompiledFolder((var / "compiled",), private=(var / "secrets",)))
    for wrong in (
        var / "secrets",
        var / "compiled",
        var / "compiled" / "way-out",
        var / "compiled" / ".." / "secrets",
        var / "compiled" / ".hidden",
        folder,
    ):
        told = operator.post(address, wish(wrong))
        assert (told.status_code, "EXAOPS_COMPILED_FOLDERS" in str(told.json())) == (400, True), wrong
    (var / "compiled" / "set").mkdir()
    (var / "compiled" / "set" / "k.so").write_bytes(b"code")
    (var / "compiled" / "set" / ".env").write_text("TOKEN=1")
    answer = operator.post(address, wish(var / "compiled" / "set"))
    assert (answer.status_code, answer.json()["sets"][0]["file_count"]) == (201, 1), "what hides stays here"
    (var / "compiled" / "set" / "env.so").symlink_to(".env")
    assert "hidden file" in str(operator.post(address, wish(var / "compiled" / "set")).json())
    (var / "compiled" / "set" / "env.so").unlink()
    (var / "compiled" / "set" / "tls.pem").write_text("key")
    assert "name of a key" in str(operator.post(address, wish(var / "compiled" / "set")).json())
    compiled_folder_reader.use(CompiledFolder((tmp_path,), private=(var / "secrets",)))
    for wrong in (var, var / "secrets"):
        assert "own secrets" in str(operator.post(address, wish(wrong)).json())


def test_where_no_folder_is_named_it_says_what_to_set(
    operator: JsonClient, address: str, folder: Path
) -> None:
    compiled_folder_reader.use(CompiledFolder(()))
    told = operator.post(address, wish(folder))
    assert (told.status_code, "set EXAOPS_COMPILED_FOLDERS" in str(told.json())) == (400, True)


def test_a_folder_that_cannot_be_read_is_bad_input(
    operator: JsonClient, address: str, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for wrong in (tmp_path / "loop", tmp_path / ("x" * 300)):
        told = operator.post(address, wish(wrong))
        assert (told.status_code, "cannot be read" in str(told.json())) == (400, True), wrong
