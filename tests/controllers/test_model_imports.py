"""Models that a node takes in are registered with what it found, by nobody else, and never half."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain.model_import import CANCELLED, FAILED, FETCHING, REGISTERED, WAITING
from exaserve_ops.serving.models import FoundPart, Model, ModelImport
from exaserve_ops.serving.services.imports import ImportWish, begin_import, cancel_import, retry_import
from exaserve_ops.serving.services.weights import change_storage
from exaserve_ops.weights.domain.wanted import PERSON, Origin
from exaserve_ops.weights.models import WeightsClaim
from tests.fakes.fleet import NOW, ScriptedNode
from tests.fakes.hub import COMMIT, HubServer
from tests.fakes.leader import Leader
from tests.fakes.weight_servers import serving
from tests.fakes.weights import Store, running_store
from tests.fakes.world import make_model
from workers.engines.demo_model import make_demo_model
from workers.protocol import v1
from workers.protocol.imports import ImportSeen, ImportState, WeightsImport
from workers.protocol.weights import WeightsReport

pytestmark = pytest.mark.django_db


class Site:
    """A node whose disk is a real store, scripted to report what the store says."""

    def __init__(self, leader: Leader, node: ScriptedNode, store: Store, hub: HubServer) -> None:
        self.leader, self.node, self.store, self.hub = leader, node, store, hub
        self.revision = 0
        self.orders: tuple[WeightsImport, ...] = ()
        self.look()

    def begin(self, **changes: object) -> ModelImport:
        fields: dict[str, object] = {"name": "big", "origin": Origin("hub", self.hub.location)}
        wish = ImportWish(**(fields | changes))  # type: ignore[arg-type]  # fields of a test
        return begin_import(wish, actor="user:olga", now=NOW, reason="for chat")

    def look(self, *seen: ImportSeen) -> None:
        """One look of the controllers at what the node tells, which then does as it is told."""
        report = WeightsReport(
            revision=self.revision, disk_total_bytes=1000, disk_free_bytes=900, imports=seen
        )
        self.node.beat(weights=report)
        self.leader.work()
        self.leader.imports.step()
        self.leader.weights.step()
        for command in self.node.commands():
            if isinstance(command, v1.ApplyWeights):
                self.revision, self.orders = command.revision, command.imports

    def take_in(self) -> ImportSeen:
        """Have the store do what was ordered, until it has found something."""
        [order] = self.orders
        self.store.take_in(order)
        self.store.findings(order)
        return self.store.wait_import(order, ImportState.FOUND)

    def tell(self, change: Callable[[v1.ImportFindings], v1.ImportFindings] = lambda part: part) -> None:
        for part in list(self.store.told):
            self.node.send(change(msgspec.structs.replace(part, node_id=self.node.node_id)))


@pytest.fixture
def site(leader: Leader, node: ScriptedNode, tmp_path: Path) -> Iterator[Site]:
    make_demo_model(tmp_path / "demo", seed=0)
    contents = {path.name: path.read_bytes() for path in (tmp_path / "demo").iterdir()}
    with serving(HubServer(contents)) as hub, running_store(tmp_path / "node") as store:
        yield Site(leader, node, store, hub)


def test_what_a_node_found_is_registered_and_the_node_is_the_first_to_have_it(site: Site) -> None:
    row = site.begin()
    site.look()
    [order] = site.orders
    assert (order.location, order.kind, order.attempt, order.paused) == (site.hub.location, "hub", 1, False)
    seen = site.take_in()
    site.tell()
    site.look(seen)
    row.refresh_from_db()
    assert row.status == REGISTERED, row.why
    model = Model.objects.get(name="big")
    assert row.model == model
    assert model.source == row.fixed_location == f"{site.hub.location}/resolve/{COMMIT}"
    assert (model.storage, model.origins) == (
        "node",
        [{"kind": "hub", "location": row.fixed_location, "secret": ""}],
    )
    assert model.manifest.digest
    assert model.parameter_count
    assert model.weights_bytes
    assert model.files.count() == row.file_count == row.files_done
    claim = WeightsClaim.objects.get(revision=model.digest)
    assert (str(claim.node_id), claim.owner) == (site.node.node_id, PERSON)
    assert not FoundPart.objects.exists()
    site.look(seen)
    assert site.orders == ()
    assert [event.event for event in Event.objects.filter(subject_kind="model_import").order_by("pk")] == [
        "import_asked",
        "import_registered",
    ]


def test_a_model_that_lies_in_no_folder_is_never_used_in_place(site: Site) -> None:
    site.begin()
    site.look()
    seen = site.take_in()
    site.tell()
    site.look(seen)
    model = Model.objects.get(name="big")
    with pytest.raises(ConflictError, match="lies in no folder"):
        change_storage(model.pk, storage="in_place", actor="test", now=NOW)
    with pytest.raises(InvalidInputError, match="name a place"):
        change_storage(model.pk, storage="node", origins=[], actor="test", now=NOW)


def test_parts_may_come_twice_in_any_order_and_after_others_of_an_earlier_try(site: Site) -> None:
    row = site.begin()
    site.look()
    stale = v1.ImportFindings(
        node_id=site.node.node_id, import_id=str(row.pk), digest="ab" * 32, index=1, count=2, data=b"x"
    )
    site.node.send(stale)
    seen = site.take_in()
    site.tell()
    site.tell()
    site.look(seen)
    row.refresh_from_db()
    assert row.status == REGISTERED


def test_nothing_is_taken_from_a_node_that_was_not_asked_or_of_an_odd_size(site: Site) -> None:
    row = site.begin()
    site.look()
    site.take_in()
    other = "00000000-0000-4000-8000-000000000000"
    for change in (
        {"import_id": other},
        {"import_id": "no id"},
        {"index": -1},
        {"index": 5, "count": 5},
        {"count": 100_000},
        {"digest": "short"},
        {"data": b"x" * 200_000},
    ):
        site.tell(lambda part, change=change: msgspec.structs.replace(part, **change))  # type: ignore[misc]  # bound now
    Node.objects.filter(pk=site.node.node_id).update(name="asked")
    site.leader.work()
    assert not FoundPart.objects.exists()
    row.refresh_from_db()
    assert row.status == WAITING


def test_findings_that_are_not_what_was_announced_register_nothing(site: Site) -> None:
    row = site.begin()
    site.look()
    seen = site.take_in()
    site.tell(lambda part: msgspec.structs.replace(part, data=part.data[:-1] + b"\0"))
    site.look(seen)
    row.refresh_from_db()
    assert (row.status, Model.objects.count()) == (FAILED, 0)
    assert "not findings" in row.why


def test_progress_and_what_is_wrong_are_on_record_until_it_is_tried_again_or_cancelled(site: Site) -> None:
    row = site.begin()
    site.look()
    key = str(row.pk)
    site.look(
        ImportSeen(
            import_id=key,
            state=ImportState.FETCHING,
            files=4,
            files_done=1,
            total_bytes=100,
            have_bytes=40,
            bytes_per_second=20.0,
            eta_seconds=3.0,
        )
    )
    row.refresh_from_db()
    assert (row.status, row.have_bytes, row.files_done, row.eta_seconds) == (FETCHING, 40, 1, 3.0)
    assert row.why == "1 of 4 files are whole"
    site.look(ImportSeen(import_id=key, state=ImportState.WAITING, reason="insufficient space: 9 bytes"))
    row.refresh_from_db()
    assert (row.status, row.why) == (WAITING, "insufficient space: 9 bytes")
    site.look(ImportSeen(import_id=key, state=ImportState.FAILED, reason="it is gated"))
    site.look()
    row.refresh_from_db()
    assert (row.status, row.why, row.bytes_per_second) == (FAILED, "it is gated", 0.0)
    assert [order.paused for order in site.orders] == [True]
    retry_import(row.pk, actor="user:olga", now=NOW, reason="I was let in")
    site.look(ImportSeen(import_id=key, state=ImportState.FAILED, reason="it is gated"))
    row.refresh_from_db()
    assert row.status == WAITING, "what is told of the try before does not count"
    assert [(order.attempt, order.paused) for order in site.orders] == [(2, False)]
    cancel_import(row.pk, actor="user:olga", now=NOW, reason="not needed")
    site.look()
    assert site.orders == ()
    row.refresh_from_db()
    assert row.status == CANCELLED
    with pytest.raises(ConflictError, match="cancelled"):
        retry_import(row.pk, actor="user:olga", now=NOW, reason="after all")


def test_an_old_agent_and_a_dead_node_are_said_to_be_what_it_waits_for(site: Site) -> None:
    row = site.begin()
    site.look()
    site.look()
    row.refresh_from_db()
    assert "older version" in row.why
    site.leader.lose(site.node.node_id)
    site.leader.imports.step()
    row.refresh_from_db()
    assert "does not answer" in row.why


@pytest.mark.parametrize(
    ("kind", "location", "field"),
    [
        ("folder", "file:///models/x", "kind"),
        ("hub", "ftp://hub/o/n", "location"),
        ("hub", "https://user:pw@hub.example/o/n", "location"),
        ("http", "http://169.254.169.254/latest", "location"),
        ("http", "http://[fd00:ec2::254]/x", "location"),
        ("http", "http://127.0.0.1:8000/x", "location"),
        ("hub", "http://localhost/o/n", "location"),
        ("http", "http://[::ffff:127.0.0.1]/x", "location"),
        ("s3", "s3://", "location"),
    ],
)
def test_places_that_nobody_should_ask_are_refused(
    site: Site, settings: Any, kind: str, location: str, field: str
) -> None:
    settings.ENV = dataclasses.replace(settings.ENV, allow_local_addresses=False)
    with pytest.raises(InvalidInputError) as caught:
        site.begin(origin=Origin(kind, location))
    assert caught.value.field == field


def test_a_name_is_imported_once_and_never_over_another_model(site: Site) -> None:
    site.begin()
    with pytest.raises(ConflictError, match="being imported already"):
        site.begin()
    make_model("tiny")
    with pytest.raises(ConflictError, match="registered already"):
        site.begin(name="tiny")


def test_only_a_node_that_can_store_weights_is_asked(site: Site) -> None:
    Node.objects.filter(pk=site.node.node_id).update(cordoned=True)
    with pytest.raises(ConflictError, match="no node"):
        site.begin()
    with pytest.raises(ConflictError, match="cannot take a model in"):
        site.begin(node_id=UUID(site.node.node_id))
    with pytest.raises(InvalidInputError, match="no such node"):
        site.begin(node_id=UUID(int=7))
