"""The Django admin: every model shown, wishes written through services, nothing else written at all."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client

from exaserve_ops.access.models import ApiKey, Scope
from exaserve_ops.access.selectors import find_valid_key
from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.inventory.services import enrol_node
from exaserve_ops.lib import clock
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.deployments import scale_deployment
from exaserve_ops.serving.services.replicas import advance_replica, create_replicas, place_replica
from tests.fakes.routes import all_routes
from tests.fakes.world import NOW, make_deployment, make_model, make_node, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def root() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root", password="a long enough password"))
    return client


def staff(role: str) -> Client:
    user = make_user(f"staff-{role}", role)
    user.is_staff = True
    user.save()
    client = Client()
    client.force_login(user)
    return client


def text_of(response: Any) -> str:
    return str(response.content.decode())


def change_form(deployment: Deployment, **changes: Any) -> dict[str, Any]:
    fields = {"replicas": deployment.replicas, "drain_seconds": 60, "start_seconds": 300, "nodes": ""}
    return fields | {"read_generation": deployment.generation} | changes


def placed(deployment: Deployment, node: Node, *events: str) -> Replica:
    [replica] = create_replicas(deployment.pk, 1, why="test", actor="test", now=NOW)
    uuid = node.accelerators.all()[0].uuid
    place_replica(replica.pk, Placement(str(node.pk), node.name, (uuid,), "test"), actor="test", now=NOW)
    for event in events:
        replica = advance_replica(replica.pk, event, reason="", actor="test", now=NOW)
    return replica


def test_lists_and_searches_open_and_run_no_inline_script(root: Client, node: Node) -> None:
    placed(make_deployment(), node, "seen_ready")
    ours = [m for m in admin.site._registry if m.__module__.startswith("exaserve_ops.")]
    assert len(ours) >= 12
    for model in ours:
        address = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        page = root.get(address + "?q=n1")
        assert page.status_code == 200, address
        row = model._default_manager.first()
        pages = [page] if row is None else [page, root.get(f"{address}{row.pk}/change/")]
        for shown in pages:
            assert shown.status_code == 200, address
            assert "script-src 'self'" in shown["Content-Security-Policy"]
            html = text_of(shown)
            assert not re.search(r"<script(?![^>]*\bsrc=)[^>]*>", html), f"{address} has an inline script"
            assert not re.search(r"\son\w+=", re.sub(r"<p>.*?</p>", "", html)), (
                f"{address} has an inline handler"
            )


def test_scaling_in_the_admin_goes_through_the_service(root: Client, deployment: Deployment) -> None:
    address = f"/admin/serving/deployment/{deployment.pk}/change/"
    assert 'name="read_generation" value="1"' in text_of(root.get(address))
    for name in ("n1", "n2"):
        make_node(name)
    answer = root.post(address, change_form(deployment, replicas=7, nodes="n1 n2"))
    assert answer.status_code == 302, text_of(answer)
    deployment.refresh_from_db()
    assert (deployment.replicas, deployment.generation) == (7, 2)
    assert deployment.placement == {"nodes": ["n1", "n2"]}
    event = Event.objects.filter(subject_kind="deployment").latest("pk")
    assert (event.actor, event.event) == ("user:root", "changed")


def test_change_made_from_an_old_page_is_refused(root: Client, deployment: Deployment) -> None:
    form = change_form(deployment, replicas=9)
    scale_deployment(deployment.pk, replicas=3, actor="user:other", now=NOW)
    answer = root.post(f"/admin/serving/deployment/{deployment.pk}/change/", form, follow=True)
    assert "somebody changed it meanwhile" in text_of(answer)
    deployment.refresh_from_db()
    assert (deployment.replicas, deployment.generation) == (3, 2)


def test_status_and_name_sent_by_hand_are_not_believed(root: Client, deployment: Deployment) -> None:
    form = change_form(deployment, status="deleted", name="other", generation=99, engine="x")
    root.post(f"/admin/serving/deployment/{deployment.pk}/change/", form)
    deployment.refresh_from_db()
    assert (deployment.status, deployment.name, deployment.generation) == ("active", "chat", 1)
    assert deployment.engine == "torch"


def test_new_deployment_in_the_admin(root: Client) -> None:
    wish = {
        "name": "chat",
        "model": str(make_model().pk),
        "served_name": "",
        "replicas": 2,
        "engine": "torch",
        "engine_options": '{"num_blocks": 64}',
        "replica_memory_bytes": "",
        "accelerators_per_replica": 1,
        "drain_seconds": 60,
        "start_seconds": 300,
        "nodes": "",
        "read_generation": "",
    }
    answer = root.post("/admin/serving/deployment/add/", wish)
    assert answer.status_code == 302, text_of(answer)
    made = Deployment.objects.get()
    assert (made.served_name, made.engine_options) == ("tiny", {"num_blocks": 64})
    assert Event.objects.get(subject_id=made.pk).event == "created"
    assert "exists" in text_of(root.post("/admin/serving/deployment/add/", wish, follow=True))


def test_deleting_in_the_admin_drains(root: Client, deployment: Deployment, node: Node) -> None:
    placed(deployment, node, "seen_ready")
    address = f"/admin/serving/deployment/{deployment.pk}/delete/"
    assert "drained and stopped" in text_of(root.get(address))
    assert root.post(address, {"post": "yes"}).status_code == 302
    deployment.refresh_from_db()
    assert deployment.status == "deleting"
    other = make_deployment("other")
    action = {"action": "delete_selected", "_selected_action": [str(other.pk)], "post": "yes"}
    root.post("/admin/serving/deployment/", action)
    other.refresh_from_db()
    assert other.status == "deleting"


def test_rows_of_controllers_cannot_be_written(root: Client, deployment: Deployment, node: Node) -> None:
    replica = placed(deployment, node, "seen_ready")
    for address in (
        f"/admin/serving/replica/{replica.pk}/",
        f"/admin/audit/event/{Event.objects.latest('pk').pk}/",
        f"/admin/serving/model/{deployment.model_id}/",
        f"/admin/inventory/accelerator/{node.accelerators.all()[0].pk.replace('-', '_2D')}/",
    ):
        change = root.post(address + "change/", {"status": "stopped", "reason": "x", "name": "x"})
        delete = root.post(address + "delete/", {"post": "yes"})
        assert (change.status_code, delete.status_code) == (403, 403), address
    for model in ("serving/replica", "audit/event", "serving/model", "inventory/node", "health/nodelease"):
        assert root.get(f"/admin/{model}/add/").status_code == 403, model
    replica.refresh_from_db()
    assert replica.status == "ready"


def test_actions_on_replicas_use_the_services_and_tell_what_they_refuse(
    root: Client, deployment: Deployment, node: Node
) -> None:
    ready, failed = placed(deployment, node, "seen_ready"), placed(deployment, node, "seen_failed")
    chosen = [str(ready.pk), str(failed.pk)]
    answer = root.post(
        "/admin/serving/replica/", {"action": "restart", "_selected_action": chosen}, follow=True
    )
    assert "only a failed one restarts" in text_of(answer)
    root.post("/admin/serving/replica/", {"action": "replace", "_selected_action": chosen[:1]})
    ready.refresh_from_db()
    failed.refresh_from_db()
    assert (ready.status, failed.generation) == ("draining", 2)
    assert Event.objects.get(event="restarted").actor == "user:root"


def test_cordon_in_the_admin_and_facts_of_agents_left_alone(root: Client, node: Node) -> None:
    form = {
        "cordoned": "on",
        "cordon_reason": "disk",
        "liveness": "dead",
        "address": "1.2.3.4",
        "key_epoch": 9,
    }
    form |= {f"accelerators-{k}": v for k, v in (("TOTAL_FORMS", 0), ("INITIAL_FORMS", 0))}
    answer = root.post(f"/admin/inventory/node/{node.pk}/change/", form)
    assert answer.status_code == 302, text_of(answer)
    node.refresh_from_db()
    assert (node.cordoned, node.cordon_reason) == (True, "disk")
    assert (node.liveness, node.address, node.key_epoch) == ("alive", "10.0.0.1", 1)
    assert Event.objects.latest("pk").event == "cordoned"


def test_node_with_replicas_stays(root: Client, deployment: Deployment, node: Node) -> None:
    replica = placed(deployment, node)
    page = root.post(f"/admin/inventory/node/{node.pk}/delete/", {"post": "yes"}, follow=True)
    assert replica.name in text_of(page)
    assert Node.objects.filter(pk=node.pk).exists()


def test_node_without_replicas_goes_and_leaves_an_event(root: Client, node: Node) -> None:
    assert root.post(f"/admin/inventory/node/{node.pk}/delete/", {"post": "yes"}).status_code == 302
    assert not Node.objects.exists()
    assert Event.objects.latest("pk").event == "deleted"


def test_key_made_in_the_admin_is_shown_once_and_works(root: Client) -> None:
    owner = make_user("ci", "viewer")
    form = {"name": "ci", "user": owner.pk, "scopes": ["api"], "expires_at_0": "", "expires_at_1": ""}
    page = root.post("/admin/access/apikey/add/", form)
    assert page.status_code == 200
    assert "no-store" in page["Cache-Control"]
    found = re.search(r'id="secret">(xo-[\w-]+)<', text_of(page))
    assert found is not None
    key = find_valid_key(found[1], Scope.API, now=clock.now())
    assert key is not None
    assert key.user == owner
    assert found[1] not in text_of(root.get("/admin/access/apikey/"))
    assert found[1] not in str(root.cookies)
    root.post("/admin/access/apikey/", {"action": "revoke", "_selected_action": [str(key.pk)]})
    assert find_valid_key(found[1], Scope.API, now=clock.now()) is None
    assert ApiKey.objects.count() == 1


def test_nobody_makes_a_key_above_their_rights_in_the_admin(root: Client) -> None:
    assert root is not None
    superuser = User.objects.get(username="root")
    form = {"name": "up", "user": superuser.pk, "scopes": ["api"], "expires_at_0": "", "expires_at_1": ""}
    for role in ("operator", "admin"):
        page = staff(role).post("/admin/access/apikey/add/", form)
        assert "You may not make keys for this user" in text_of(page)
    assert not ApiKey.objects.exists()


def test_join_token_made_in_the_admin_lets_one_node_in(root: Client) -> None:
    page = text_of(root.post("/admin/inventory/jointoken/add/", {"note": "rack 1"}))
    found = re.search(r'id="secret">(xj-[\w-]+)<', page)
    assert found is not None
    token = JoinToken.objects.get()
    assert (token.note, token.created_by) == ("rack 1", "user:root")
    node_id = "00000000-0000-4000-8000-000000000001"
    enrol_node(token_text=found[1], node_id=node_id, name="n", hostname="", now=clock.now())  # type: ignore[arg-type]  # text will do
    assert root.get(f"/admin/inventory/jointoken/{token.pk}/delete/").status_code == 200


def test_viewer_on_the_staff_reads_and_writes_nothing(deployment: Deployment) -> None:
    client = staff("viewer")
    assert client.get("/admin/serving/deployment/").status_code == 200
    address = f"/admin/serving/deployment/{deployment.pk}/"
    assert client.post(address + "change/", change_form(deployment, replicas=9)).status_code == 403
    assert client.post(address + "delete/", {"post": "yes"}).status_code == 403
    adds = [r.path for r in all_routes() if r.path.startswith("/admin/") and r.path.endswith("/add/")]
    assert [path for path in adds if client.get(path).status_code != 403] == []
    deployment.refresh_from_db()
    assert deployment.replicas == 2


def test_rollout_is_asked_for_on_a_deployment_and_begins_when_its_plan_is_confirmed() -> None:
    deployment = make_deployment("rolls", replicas=2)
    create_replicas(deployment.pk, 2, why="test", actor="test", now=NOW)
    operator, viewer = staff("operator"), staff("viewer")
    chosen = {"action": "roll_out", "_selected_action": [str(deployment.pk)]}
    assert "Roll out another release" not in viewer.get("/admin/serving/deployment/").content.decode()
    start = operator.post("/admin/serving/deployment/", chosen)["Location"]
    assert viewer.get(start).status_code == 403
    wish = {
        "model": str(deployment.model_id),
        "engine_options": '{"max_num_seqs": 3}',
        "policy": '{"max_surge": 1}',
    }
    zero = operator.post(start, wish | {"policy": '{"max_surge": 0, "max_unavailable": 0}', "reason": "x"})
    assert "allow one of them" in zero.content.decode()
    page = operator.post(start, wish | {"reason": "faster"})
    assert "nothing has been done yet" in page.content.decode()
    assert not Rollout.objects.exists()
    confirmed = wish | {"reason": "faster", "planned": page.context["plan"].digest, "_begin": "1"}
    assert "the plan is another one by now" in (
        operator.post(start, confirmed | {"policy": '{"canary": 2}'}).content.decode()
    )
    assert operator.post(start, confirmed).status_code == 302
    rollout = Rollout.objects.get()
    assert (rollout.status, rollout.asked_by) == ("running", "user:staff-operator")
    chosen = {"action": "pause", "_selected_action": [str(rollout.pk)]}
    viewer.post("/admin/rollouts/rollout/", chosen)
    rollout.refresh_from_db()
    assert rollout.status == "running"
    operator.post("/admin/rollouts/rollout/", chosen)
    rollout.refresh_from_db()
    assert rollout.status == "paused"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000 + "]" * 3000,
        '{"a":' * 40 + "1" + "}" * 40,
        '{"a": "' + "x" * 200_000 + '"}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": 1e999}',
        '{"a": "\\u0000"}',
        '{"a": ',
    ],
    ids=["deep list", "deep object", "long", "digits", "infinity", "null character", "no JSON"],
)
def test_json_that_could_not_be_kept_is_refused_beside_its_field_and_shown_again(
    root: Client, deployment: Deployment, text: str
) -> None:
    refused = "Give JSON of at most"
    wish = {"model": str(deployment.model_id), "reason": "x", "engine_options": "{}", "policy": "{}"}
    start = f"/admin/rollouts/rollout/start/{deployment.pk}/"
    for name in ("engine_options", "policy"):
        answer = root.post(start, wish | {name: text})
        assert refused in answer.context["form"].errors[name][0]
    answer = root.post("/admin/serving/deployment/add/", {"name": "deep", "engine_options": text})
    assert refused in answer.context["adminform"].form.errors["engine_options"][0]
    assert not Deployment.objects.filter(name="deep").exists()


def test_counts_of_thousands_of_digits_are_refused_by_the_policy(
    root: Client, deployment: Deployment
) -> None:
    policy = '{"max_surge": "' + "9" * 5000 + '"}'
    wish = {"model": str(deployment.model_id), "reason": "x", "engine_options": "{}", "policy": policy}
    answer = root.post(f"/admin/rollouts/rollout/start/{deployment.pk}/", wish)
    assert "a share such as 25%" in answer.content.decode()
