"""Pages of nodes: cordon, join."""

from __future__ import annotations

import re

from django.test import Client
from django.urls import reverse

from exaserve_ops.inventory.models import JoinToken, Node
from tests.dashboard.conftest import World, addresses


def test_cordoning_needs_a_reason_which_everybody_sees(operator: Client, world: World) -> None:
    address = addresses(world)["node_cordon"]
    operator.post(address, {"reason": "  "})
    assert not Node.objects.get().cordoned
    operator.post(address, {"reason": "kernel update"})
    assert Node.objects.get().cordoned
    assert "kernel update" in operator.get(addresses(world)["node"]).content.decode()
    operator.post(addresses(world)["node_uncordon"])
    assert not Node.objects.get().cordoned


def test_adding_a_node_shows_the_command_with_its_token_once(operator: Client) -> None:
    page = operator.post(reverse("node_join"))
    assert re.search(r"EXAOPS_JOIN_TOKEN=xj-[\w-]{40,}", page.content.decode())
    assert "python -m workers.agent join --url" in page.content.decode()
    assert JoinToken.objects.count() == 1
