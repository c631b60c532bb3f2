"""Nobody is sent to an address that means another machine, or none: at joining, and ever after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from django.test import Client
from pytest_django.fixtures import Settings

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.domain.addresses import ALLOW_SETTING, address_problem
from exaserve_ops.inventory.domain.facts import NodeFacts
from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.inventory.services import create_join_token, record_hello
from exaserve_ops.inventory.services.joining import JoinWish, enrol
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.selectors import refusal_of
from tests.fakes.world import NOW, make_node

pytestmark = pytest.mark.django_db


@pytest.fixture
def spread(settings: Settings) -> None:
    """A fleet over several machines: local addresses mean nothing there."""
    settings.ENV = replace(settings.ENV, allow_local_addresses=False)


def join(address: str, *, peer: str = "127.0.0.1") -> Any:
    _, text = create_join_token(actor="test", now=clock.now())
    body = {
        "token": text,
        "node_id": str(uuid4()),
        "name": "gpu01",
        "address": address,
        "major": 1,
        "minor": 3,
    }
    return Client(REMOTE_ADDR=peer).post("/api/v1/agent/join", body, content_type="application/json")


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "::", "[::]:80", "127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1"),  # noqa: S104 - refused
        *("169.254.30.2", "fe80::1%eth0", "224.0.0.1", "ff02::1", "255.255.255.255"),
        *("10.0.0", "gpu 01", "10.0.0.7:99999", "[10.0.0.7]", "-x.example"),
    ],
)
@pytest.mark.usefixtures("spread")
def test_unusable_address_is_refused_with_what_to_do_and_spends_no_token(address: str) -> None:
    answer = join(address)
    assert answer.status_code == 400
    assert "--address" in answer.content.decode()
    assert not Node.objects.exists()
    assert JoinToken.objects.get().uses == 0


def test_loopback_is_for_agents_of_the_control_planes_own_host() -> None:
    answer = join("127.0.0.1", peer="10.0.0.9")
    assert answer.status_code == 400, "from another host it would mean that host"
    assert ALLOW_SETTING in answer.content.decode()
    assert address_problem("127.0.0.1", allow_local=True) == ""


@pytest.mark.parametrize("address", ["10.0.0.7", "2001:db8::7", "[2001:db8::7]", "gpu01.example", "gpu01"])
def test_usable_address_is_not_refused(address: str) -> None:
    assert address_problem(address, allow_local=False) == ""


def facts(address: str, **more: Any) -> NodeFacts:
    return NodeFacts("n1.local", address, "0.1", "b1", engines=("torch",), labels={"rack": "r1"}, **more)


@pytest.mark.usefixtures("spread")
def test_agent_that_moves_to_an_unusable_address_keeps_the_old_one_and_gets_nothing_new() -> None:
    node = make_node("n1", accelerators=0)
    record_hello(node.pk, facts("0.0.0.0"), now=NOW)  # noqa: S104 - refused
    record_hello(node.pk, facts("0.0.0.0"), now=NOW)  # noqa: S104 - refused
    node.refresh_from_db()
    assert node.address == "10.0.0.1"
    assert "its address cannot be used: 0.0.0.0" in refusal_of(node)
    [event] = Event.objects.filter(event="address_refused")
    assert "--address" in event.reason
    record_hello(node.pk, facts("10.0.0.8"), now=NOW)
    node.refresh_from_db()
    assert (node.address, refusal_of(node)) == ("10.0.0.8", "")
    assert Event.objects.filter(event="moved").count() == 1


@pytest.mark.usefixtures("spread")
def test_simulated_node_may_have_a_loopback_address() -> None:
    node = make_node("n1", accelerators=0)
    record_hello(node.pk, facts("127.64.0.1", simulated=True), now=NOW)
    node.refresh_from_db()
    assert (node.address, node.address_problem) == ("127.64.0.1", "")


def test_two_agents_of_one_host_join_and_a_lost_home_is_told_from_a_taken_name() -> None:
    node = make_node("gpu01", accelerators=0)
    _, text = create_join_token(actor="test", now=NOW, max_uses=9)
    same_place = JoinWish(uuid4(), "gpu01", node.hostname, address=node.address)
    with pytest.raises(ConflictError, match=r"of this very host .* retire the node 'gpu01' first"):
        enrol(same_place, token_text=text, now=NOW)
    with pytest.raises(ConflictError, match="The name 'gpu01' is taken by the node"):
        enrol(replace(same_place, address="10.0.0.99"), token_text=text, now=NOW)
    second = enrol(replace(same_place, name="gpu01-b"), token_text=text, now=NOW)
    record_hello(second.pk, replace(facts(node.address), hostname=node.hostname), now=NOW)
    assert Node.objects.filter(hostname=node.hostname, address=node.address).count() == 2
