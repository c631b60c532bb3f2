"""A whole allocation joins at once, with one token and, where need be, one host name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connections

from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.inventory.services import advance_liveness, create_join_token, enrol_node
from exaserve_ops.inventory.services.joining import JoinWish, enrol
from exaserve_ops.lib.errors import ConflictError, DeniedError, InvalidInputError
from tests.fakes.world import NOW

pytestmark = pytest.mark.django_db(transaction=True)

NODES = 256


def test_256_nodes_with_one_host_name_join_with_one_token() -> None:
    token, text = create_join_token(actor="test", now=NOW, max_uses=NODES)
    began = threading.Event()

    def join(_: int) -> str:
        began.wait(10)
        try:
            wish = JoinWish(uuid4(), "localhost", "localhost", name_suffix=True)
            return enrol(wish, token_text=text, now=NOW).name
        except DeniedError:
            return ""
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as pool:
        names = pool.map(join, range(NODES + 8))
        began.set()
        given = list(names)
    assert sorted(filter(None, given)) == sorted(Node.objects.values_list("name", flat=True))
    assert given.count("") == 8
    assert set(filter(None, given)) == {"localhost", *(f"localhost-{n}" for n in range(2, NODES + 1))}
    token.refresh_from_db()
    assert token.uses == NODES
    assert token.used_at is not None


def test_taken_name_is_a_conflict_unless_a_number_behind_it_was_asked_for() -> None:
    _, text = create_join_token(actor="test", now=NOW, max_uses=3)
    enrol_node(token_text=text, node_id=uuid4(), name="gpu-1", hostname="h", now=NOW)
    with pytest.raises(ConflictError, match="--name-suffix"):
        enrol_node(token_text=text, node_id=uuid4(), name="gpu-1", hostname="h", now=NOW)
    assert JoinToken.objects.get().uses == 1
    second = enrol(JoinWish(uuid4(), "gpu-1", "h", name_suffix=True), token_text=text, now=NOW)
    assert second.name == "gpu-1-2"


def test_node_whose_answer_was_lost_gets_it_again_until_it_has_reported() -> None:
    _, text = create_join_token(actor="test", now=NOW)
    wish = JoinWish(uuid4(), "gpu-1", "h")
    first = enrol(wish, token_text=text, now=NOW)
    assert enrol(wish, token_text=text, now=NOW).pk == first.pk
    assert JoinToken.objects.get().uses == 1
    _, other = create_join_token(actor="test", now=NOW, max_uses=5)
    with pytest.raises(ConflictError, match="has joined before"):
        enrol(wish, token_text=other, now=NOW)
    with pytest.raises(DeniedError):
        enrol(wish, token_text=text, now=NOW + timedelta(hours=2))
    advance_liveness(first.pk, "reported", reason="", actor="test", now=NOW)
    with pytest.raises(ConflictError, match="has joined before"):
        enrol(wish, token_text=text, now=NOW)


@pytest.mark.parametrize("uses", [0, -1, 4097])
def test_number_of_uses_is_bounded(uses: int) -> None:
    with pytest.raises(InvalidInputError, match="from 1 to 4096"):
        create_join_token(actor="test", now=NOW, max_uses=uses)
