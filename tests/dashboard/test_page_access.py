"""Who sees which page, and what a page says to those who may not."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.dashboard import urls
from exaserve_ops.dashboard.views.account import REFUSED_ADDRESSES, REFUSED_LOGINS
from exaserve_ops.inventory.models import Node
from tests.dashboard.conftest import OPEN_TO_ALL, World, addresses
from tests.fakes.world import make_user


def test_every_page_but_login_sends_strangers_to_login(world: World) -> None:
    stranger = Client()
    for name, address in addresses(world).items():
        answers = [stranger.get(address), stranger.post(address)]
        if name in OPEN_TO_ALL:
            assert all(answer.status_code in {200, 302, 405} for answer in answers), name
            continue
        assert all(a.status_code == 302 and a["Location"].startswith("/login") for a in answers), name


def test_every_page_needs_a_permission_and_names_it(world: World) -> None:
    nobody = Client()
    nobody.force_login(make_user("nobody"))
    for pattern in urls.urlpatterns:
        if pattern.name in OPEN_TO_ALL | {"styleguide"}:
            continue
        permission = getattr(pattern.callback, "required_permission", "")
        assert permission, f"{pattern.name} asks for no permission"
        address = addresses(world)[str(pattern.name)]
        answers = [nobody.get(address), nobody.post(address)]
        refused = [answer for answer in answers if answer.status_code != 405]
        assert refused, pattern.name
        for answer in refused:
            assert answer.status_code == 403, pattern.name
            assert permission in answer.content.decode(), pattern.name


def test_a_viewer_reads_every_page(viewer: Client, world: World) -> None:
    for name, address in addresses(world).items():
        if name in OPEN_TO_ALL | {"styleguide", "live_layout"}:
            continue
        answer = viewer.get(address)
        writes = {
            "node_cordon",
            "node_uncordon",
            "node_retire",
            "key_revoke",
            "key_limits",
            "host_key_forget",
            "installations_upgrade",
        }
        writes |= {
            "node_lift_quarantine",
            "node_end_process",
            "node_kv_limits",
            "deployment_pool",
            "deployment_balance",
            "deployment_sleep",
        }
        writes |= {f"installation_{act}" for act in ("confirm", "act", "abandon", "healing")}
        writes |= {"session_move", "replica_restart", "replica_replace", "node_drain", "node_undrain"}
        writes |= {"incident_confirm", "incident_dismiss"}
        forms = {"deployment_new", "deployment_scale", "deployment_delete", "model_new"}
        writes |= {"rollout_act", "weights_act", "weights_prewarm", "weights_storage"}
        writes |= {"weights_compiled", "weights_compiled_remove", "model_import_act"}
        writes |= {"start_limits_set"}
        forms |= {"model_import_new", "node_join", "installation_new", "rollout_new"}
        forms |= {"deployment_import", "deployment_options"}
        writes |= {"validation_cancel"}
        forms |= {"validation_new"}
        expected = 405 if name in writes else 403 if name in forms else 200
        assert answer.status_code == expected, name


@pytest.mark.parametrize(
    ("page", "control"),
    [
        ("node", "Cordon"),
        ("node", "Drain"),
        ("incident", "Dismiss"),
        ("nodes", "Add a node"),
        ("deployment", "Plan scaling"),
        ("deployments", "New deployment"),
        ("deployments", "Import a launch"),
        ("deployment", "Roll out…"),
        ("rollout", "Pause…"),
        ("validation", "Cancel…"),
        ("model", "Validate…"),
        ("replica", "Replace"),
        ("models", "Register a model"),
        ("model_imports", "Import a model"),
        ("model_import", "Cancel…"),
        ("keys", "Make the key"),
    ],
)
def test_controls_are_there_for_operators_and_absent_for_viewers(
    operator: Client, viewer: Client, world: World, page: str, control: str
) -> None:
    address = addresses(world)[page]
    assert control in operator.get(address).content.decode()
    assert control not in viewer.get(address).content.decode()


def test_a_viewer_who_posts_anyway_is_told_what_is_missing(viewer: Client, world: World) -> None:
    answer = viewer.post(addresses(world)["node_cordon"], {"reason": "why not"})
    assert answer.status_code == 403
    assert "inventory.change_node" in answer.content.decode()
    assert not Node.objects.get().cordoned


def test_the_style_guide_is_for_debugging_only(operator: Client, settings: Any) -> None:
    assert operator.get(reverse("styleguide")).status_code == 404
    settings.DEBUG = True
    assert operator.get(reverse("styleguide")).status_code == 200


def test_wrong_passwords_are_slowed_down_for_that_name_and_address_only(db: None, client: Client) -> None:  # noqa: ARG001 - a fixture
    REFUSED_LOGINS.clear()
    REFUSED_ADDRESSES.clear()
    make_user("alice", "viewer")
    wrong = {"username": "alice", "password": "no"}
    statuses = [client.post("/login", wrong).status_code for _ in range(12)]
    assert statuses == [200] * 10 + [429] * 2
    answer = client.post("/login", wrong)
    assert int(answer["Retry-After"]) > 0
    assert "Too many wrong passwords" in answer.content.decode()
    assert client.post("/login", wrong | {"username": "bob"}).status_code == 200
    assert client.post("/login", wrong, REMOTE_ADDR="10.0.0.9").status_code == 200
    REFUSED_LOGINS.clear()
    REFUSED_ADDRESSES.clear()


def test_text_that_no_database_takes_is_refused_on_every_page(world: World) -> None:
    root, client = make_user("root"), Client()
    root.is_superuser = True
    root.save()
    client.force_login(root)
    for name, address in addresses(world).items():
        if name in OPEN_TO_ALL | {"styleguide"}:
            continue
        fields = {"q": "a\0b", "reason": "a\0b"}
        answers = [client.get(address, fields), client.post(address, fields)]
        statuses = {answer.status_code for answer in answers}
        assert 400 in statuses, name
        assert statuses <= {400, 405}, name
    page = client.get(reverse("sessions"), {"q": "\0"}).content.decode()
    assert "NUL character" in page
