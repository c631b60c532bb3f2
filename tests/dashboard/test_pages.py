"""Pages: who sees them, what they cost, and what their buttons do."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from pytest_django import DjangoAssertNumQueries

from exaserve_ops.access.models import ApiKey
from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard import urls
from exaserve_ops.dashboard.views.account import REFUSED_ADDRESSES, REFUSED_LOGINS
from exaserve_ops.health.services.incidents import open_incident
from exaserve_ops.inventory.models import JoinToken, Node, SshHostKey
from exaserve_ops.inventory.services.installations import InstallationWish, create_installation
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.replicas import advance_replica, create_replicas
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.telemetry.models import ReplicaMinute
from tests.dashboard.conftest import MemoryReader
from tests.fakes.world import NOW, make_deployment, make_model, make_node, make_user

OPEN_TO_ALL = {"login", "logout"}


@pytest.fixture
def world(operator: Client) -> dict[str, Any]:  # noqa: ARG001 - opens the database
    """One of everything."""
    deployment = make_deployment("chat", replicas=2)
    replica = create_replicas(deployment.pk, 1, why="1 of 2", actor="test", now=NOW)[0]
    session = InferenceSession.objects.create(
        session_id="s-1", model_name="tiny", replica=replica, first_turn_at=NOW, last_turn_at=NOW
    )
    return {
        "node_id": make_node("gpu-1").pk,
        "incident_id": open_incident(
            "mass_silence", scope="fleet", node_ids=[], evidence="all at once", actor="test", now=NOW
        ).pk,
        "installation_id": create_installation(
            InstallationWish("gpu-2.example", "ops", "agent"), actor="test", now=NOW
        ).pk,
        "pin_id": SshHostKey.objects.create(host="gpu-2.example", key_type="ssh-ed25519", blob="AAAA").pk,
        "deployment_id": deployment.pk,
        "replica_id": replica.pk,
        "model_id": deployment.model_id,
        "pk": session.pk,
        "key_id": ApiKey.objects.create(
            name="k", user=make_user("kim"), prefix="xo-abc", sha256="0" * 64, scopes=["api"]
        ).pk,
    }


def addresses(world: dict[str, Any]) -> dict[str, str]:
    """Every page's name and an address of it."""
    found = {}
    for pattern in urls.urlpatterns:
        wanted = pattern.pattern.converters
        found[str(pattern.name)] = reverse(str(pattern.name), kwargs={key: world[key] for key in wanted})
    return found


def test_every_page_but_login_sends_strangers_to_login(world: dict[str, Any]) -> None:
    stranger = Client()
    for name, address in addresses(world).items():
        answers = [stranger.get(address), stranger.post(address)]
        if name in OPEN_TO_ALL:
            assert all(answer.status_code in {200, 302, 405} for answer in answers), name
            continue
        assert all(a.status_code == 302 and a["Location"].startswith("/login") for a in answers), name


def test_every_page_needs_a_permission_and_names_it(world: dict[str, Any]) -> None:
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


def test_a_viewer_reads_every_page(viewer: Client, world: dict[str, Any]) -> None:
    for name, address in addresses(world).items():
        if name in OPEN_TO_ALL | {"styleguide", "live_layout"}:
            continue
        answer = viewer.get(address)
        writes = {
            "node_cordon",
            "node_uncordon",
            "node_retire",
            "key_revoke",
            "host_key_forget",
            "installations_upgrade",
        }
        writes |= {"node_lift_quarantine"}
        writes |= {f"installation_{act}" for act in ("confirm", "act", "abandon", "healing")}
        writes |= {"replica_restart", "replica_replace", "node_drain", "node_undrain"}
        writes |= {"incident_confirm", "incident_dismiss"}
        forms = {"deployment_new", "deployment_scale", "deployment_delete", "model_new"}
        forms |= {"node_join", "installation_new"}
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
        ("replica", "Replace"),
        ("models", "Register a model"),
        ("keys", "Make the key"),
    ],
)
def test_controls_are_there_for_operators_and_absent_for_viewers(
    operator: Client, viewer: Client, world: dict[str, Any], page: str, control: str
) -> None:
    address = addresses(world)[page]
    assert control in operator.get(address).content.decode()
    assert control not in viewer.get(address).content.decode()


def test_a_viewer_who_posts_anyway_is_told_what_is_missing(viewer: Client, world: dict[str, Any]) -> None:
    answer = viewer.post(addresses(world)["node_cordon"], {"reason": "why not"})
    assert answer.status_code == 403
    assert "inventory.change_node" in answer.content.decode()
    assert not Node.objects.get().cordoned


@pytest.mark.parametrize("page", ["nodes", "deployments", "replicas", "sessions", "models", "events"])
def test_a_table_costs_the_same_number_of_queries_however_long_it_is(
    operator: Client,
    world: dict[str, Any],
    page: str,
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    deployment = Deployment.objects.get(pk=world["deployment_id"])
    create_replicas(deployment.pk, 30, why="more", actor="test", now=NOW)
    for index in range(12):
        make_node(f"gpu-x{index}")
        make_deployment(f"more-{index}")
        InferenceSession.objects.create(
            session_id=f"s{index}", model_name="m", first_turn_at=NOW, last_turn_at=NOW
        )
    with django_assert_max_num_queries(15):
        operator.get(addresses(world)[page])


@pytest.mark.parametrize("page", ["fleet", "node", "deployment", "replica"])
def test_a_page_of_one_object_stays_in_its_query_budget(
    operator: Client,
    world: dict[str, Any],
    page: str,
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    with django_assert_max_num_queries(18):
        operator.get(addresses(world)[page])


def test_no_page_has_inline_script_or_style(operator: Client, world: dict[str, Any]) -> None:
    for name, address in addresses(world).items():
        answer = operator.get(address)
        if not answer["Content-Type"].startswith("text/html"):
            continue
        text = answer.content.decode()
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=\"|<script(?![^>]*\ssrc=)", text), name
        assert "script-src 'self'" in answer["Content-Security-Policy"], name


def test_the_title_says_the_state(operator: Client, world: dict[str, Any]) -> None:
    Node.objects.update(liveness="dead", liveness_reason="3 heartbeats in a row are missing")
    assert "<title>1 dead · Fleet" in operator.get("/").content.decode()
    page = operator.get(addresses(world)["node"]).content.decode()
    assert "3 heartbeats in a row are missing" in page


def test_empty_pages_say_what_to_do_first(operator: Client) -> None:
    assert "make up" in operator.get(reverse("nodes")).content.decode()
    assert "No node has joined" in operator.get(reverse("fleet")).content.decode()
    assert "No model is registered" in operator.get(reverse("models")).content.decode()
    assert "Register a model first" in operator.get(reverse("deployment_new")).content.decode()


def test_the_theme_is_painted_by_the_server_from_the_first_pixel(operator: Client) -> None:
    operator.cookies["theme"] = "dark"
    assert '<html lang="en" data-theme="dark">' in operator.get("/").content.decode()
    operator.cookies["theme"] = '"><script>'
    assert '<html lang="en">' in operator.get("/").content.decode()


def test_scaling_shows_its_plan_and_changes_nothing_until_confirmed(
    operator: Client, world: dict[str, Any]
) -> None:
    address = addresses(world)["deployment_scale"]
    page = operator.get(address, {"replicas": 5}).content.decode()
    assert "new replica 1" in page
    assert "on gpu-1" in page
    assert Deployment.objects.get().replicas == 2
    generation = re.search(r'name="generation" value="(\d+)"', page)
    assert generation is not None
    answer = operator.post(address, {"replicas": 5, "generation": generation[1], "reason": "evening peak"})
    assert answer.status_code == 302
    assert Deployment.objects.get().replicas == 5
    event = Event.objects.get(event="scaled")
    assert event.actor == "user:olga"
    assert "evening peak" in event.reason


def test_a_plan_that_somebody_overtook_is_refused_with_a_fresh_one(
    operator: Client, world: dict[str, Any]
) -> None:
    Deployment.objects.update(generation=9, replicas=3)
    address = addresses(world)["deployment_scale"]
    answer = operator.post(address, {"replicas": 5, "generation": 1, "reason": ""})
    assert answer.status_code == 409
    assert "at generation 9, not 1" in answer.content.decode()
    assert 'name="generation" value="9"' in answer.content.decode()
    assert Deployment.objects.get().replicas == 3


def test_deleting_needs_a_reason_and_keeps_the_history(operator: Client, world: dict[str, Any]) -> None:
    address = addresses(world)["deployment_delete"]
    operator.post(address, {"generation": 1, "reason": ""})
    assert Deployment.objects.get().status == "active"
    operator.post(address, {"generation": 1, "reason": "replaced by v2"})
    assert Deployment.objects.get().status == "deleting"
    assert operator.get(addresses(world)["deployment"]).status_code == 200


def test_cordoning_needs_a_reason_which_everybody_sees(operator: Client, world: dict[str, Any]) -> None:
    address = addresses(world)["node_cordon"]
    operator.post(address, {"reason": "  "})
    assert not Node.objects.get().cordoned
    operator.post(address, {"reason": "kernel update"})
    assert Node.objects.get().cordoned
    assert "kernel update" in operator.get(addresses(world)["node"]).content.decode()
    operator.post(addresses(world)["node_uncordon"])
    assert not Node.objects.get().cordoned


def test_replacing_a_replica_twice_says_what_happened_instead_of_failing(
    operator: Client, world: dict[str, Any]
) -> None:
    address = addresses(world)["replica_replace"]
    operator.post(address, {"reason": "slow"})
    assert Replica.objects.get(pk=world["replica_id"]).wanted == "stop"
    page = operator.post(address, {"reason": "slow"}, follow=True)
    assert "Not done" in page.content.decode()


def test_restarting_a_failed_replica_raises_its_generation(operator: Client, world: dict[str, Any]) -> None:
    replica = Replica.objects.get(pk=world["replica_id"])
    replica.node = Node.objects.get()
    replica.save()
    advance_replica(replica.pk, "place", reason="", actor="test", now=NOW)
    advance_replica(replica.pk, "seen_failed", reason="5 attempts ended", actor="test", now=NOW)
    operator.post(addresses(world)["replica_restart"], {"reason": "driver fixed"})
    assert Replica.objects.get(pk=replica.pk).generation == replica.generation + 1


def test_a_reload_of_the_answer_makes_no_second_key(operator: Client) -> None:
    shown = re.search(r'name="once" value="([\w-]+)"', operator.get(reverse("keys")).content.decode())
    assert shown is not None
    form = {"name": "load test", "scopes": ["inference"], "days": "7", "once": shown[1]}
    assert operator.post(reverse("keys"), form).status_code == 200
    assert operator.post(reverse("keys"), form).status_code == 302
    assert ApiKey.objects.count() == 1


def test_a_key_is_shown_once(operator: Client) -> None:
    made = operator.post(reverse("keys"), {"name": "load test", "scopes": ["inference"], "days": "7"})
    text = re.search(r"xo-[\w-]{40,}", made.content.decode())
    assert text is not None
    assert "no-store" in made["Cache-Control"]
    assert text[0] not in operator.get(reverse("keys")).content.decode()
    key = ApiKey.objects.get()
    assert key.expires_at is not None
    operator.post(reverse("key_revoke", args=[key.pk]))
    assert ApiKey.objects.get().revoked_at is not None


def test_the_key_of_somebody_else_cannot_be_revoked(operator: Client, world: dict[str, Any]) -> None:
    assert operator.post(addresses(world)["key_revoke"]).status_code == 404
    assert ApiKey.objects.get(pk=world["key_id"]).revoked_at is None


def test_adding_a_node_shows_the_command_with_its_token_once(operator: Client) -> None:
    page = operator.post(reverse("node_join"))
    assert re.search(r"EXAOPS_JOIN_TOKEN=xj-[\w-]{40,}", page.content.decode())
    assert "python -m workers.agent join --url" in page.content.decode()
    assert JoinToken.objects.count() == 1


def test_creating_a_deployment_reads_options_and_names_what_is_wrong(operator: Client) -> None:
    model = make_model()
    make_node("gpu-1")
    form = {
        "name": "chat",
        "model": str(model.pk),
        "replicas": 2,
        "engine": "torch",
        "engine_options": "kv_blocks = 512\nflag=true\nname = x",
        "accelerators_per_replica": 1,
        "drain_seconds": 60,
        "start_seconds": 300,
        "nodes": ["gpu-1"],
    }
    wrong = operator.post(reverse("deployment_new"), form | {"engine_options": "kv_blocks 512"})
    assert wrong.status_code == 422
    assert "is not “name = value”" in wrong.content.decode()
    create_as_planned(operator, form)
    made = Deployment.objects.get()
    assert made.engine_options == {"kv_blocks": 512, "flag": True, "name": "x"}
    assert made.placement == {"nodes": ["gpu-1"]}
    assert operator.post(reverse("deployment_new"), form).status_code == 422


def create_as_planned(operator: Client, form: dict[str, Any]) -> None:
    """Ask for the plan, and confirm it."""
    page = operator.post(reverse("deployment_new"), form | {"step": "plan"})
    assert page.status_code == 200, page.content.decode()
    planned = re.search(r'name="planned" value="(\w+)"', page.content.decode())
    assert planned is not None
    confirmed = operator.post(reverse("deployment_new"), form | {"step": "create", "planned": planned[1]})
    assert confirmed.status_code == 302


def test_a_new_deployment_shows_where_its_replicas_go_before_it_exists(operator: Client) -> None:
    model = make_model()
    make_node("gpu-1", accelerators=1)
    form = {
        "name": "chat",
        "model": str(model.pk),
        "replicas": 2,
        "engine": "torch",
        "memory_mib": 5000,
        "accelerators_per_replica": 1,
        "drain_seconds": 60,
        "start_seconds": 300,
    }
    page = operator.post(reverse("deployment_new"), form | {"step": "plan"}).content.decode()
    assert "on gpu-1" in page
    assert "fits nowhere" in page
    assert not Deployment.objects.exists()
    assert not Event.objects.filter(subject_kind="deployment").exists()
    # What is confirmed is what was read: another form gets its own plan first.
    planned = re.search(r'name="planned" value="(\w+)"', page)
    assert planned is not None
    changed = form | {"replicas": 3, "step": "create", "planned": planned[1]}
    page = operator.post(reverse("deployment_new"), changed).content.decode()
    assert "new replica 3" in page
    assert "what you confirm must be what you read" in page
    assert not Deployment.objects.exists()
    create_as_planned(operator, form)
    assert Deployment.objects.get().replicas == 2


def test_registering_a_folder_without_a_model_says_what_is_missing(operator: Client, tmp_path: Any) -> None:
    answer = operator.post(reverse("model_new"), {"name": "x", "path": str(tmp_path)})
    assert answer.status_code == 422
    assert "config.json" in answer.content.decode()
    assert not Model.objects.exists()


def test_filters_and_pages_live_in_the_address(operator: Client, world: dict[str, Any]) -> None:
    create_replicas(world["deployment_id"], 60, why="more", actor="test", now=NOW)
    first = operator.get(reverse("replicas"), {"state": "pending"}).content.decode()
    assert "?state=pending&amp;page=2" in first
    second = operator.get(reverse("replicas"), {"state": "pending", "page": 2}).content.decode()
    assert "51\u201361 of 61" in second
    assert "Nothing matches" in operator.get(reverse("replicas"), {"state": "nonsense"}).content.decode()


def test_loads_stand_in_the_table_and_are_renewed_never_as_zero(
    operator: Client, world: dict[str, Any], reader: MemoryReader
) -> None:
    node = Node.objects.get()
    Replica.objects.filter(pk=world["replica_id"]).update(node=node)
    page = operator.get(reverse("replicas")).content.decode()
    assert page.count("no data") == 4
    load = {"kv_used_ratio": 0.37, "requests_running": 3, "requests_waiting": 0, "ttft_p95_seconds": None}
    telemetry = {
        "received_at": clock.unix_seconds(),
        "replicas": {str(world["replica_id"]): {"state": "ready", "load": load}},
    }
    reader.nodes[str(node.pk)] = telemetry
    page = operator.get(reverse("replicas")).content.decode()
    assert "37\u202f%" in page
    assert page.count("no data") == 1, "its engine does not say its TTFT"
    row = operator.get(addresses(world)["replica_row"]).content.decode()
    assert "37\u202f%" in row
    asked = {"ids": f"{world['replica_id']},nonsense"}
    assert operator.get(reverse("replica_loads"), asked).json() == {
        str(world["replica_id"]): {"kv": "37\u202f%", "ttft": "\u2013", "running": "3", "waiting": "0"}
    }
    telemetry["received_at"] -= 60
    assert "37\u202f%" not in operator.get(reverse("replicas")).content.decode()


def test_the_chart_of_a_replica_has_gaps_where_nothing_was_recorded(
    operator: Client, world: dict[str, Any]
) -> None:
    address = addresses(world)["replica_figure"]
    assert operator.get(address).json()["data"] == []
    minute = clock.now().replace(second=0, microsecond=0) - timedelta(minutes=5)
    for back in (0, 2):
        ReplicaMinute.objects.create(
            replica_id=world["replica_id"], minute=minute - timedelta(minutes=back), kv_used_ratio_max=0.5
        )
    lines = operator.get(address).json()["data"]
    assert len(lines) == 6
    known = [value for value in lines[0]["y"] if value is not None]
    assert known == [0.5, 0.5]
    at = lines[0]["y"].index(0.5)
    assert lines[0]["y"][at : at + 3] == [0.5, None, 0.5]
    assert not any(lines[1]["y"]), "an engine that said nothing has no line, not one at zero"


def test_long_session_ids_are_cut_and_can_be_copied_whole(operator: Client, world: dict[str, Any]) -> None:
    whole = "13000596-258d-442d-a39e-57b2cadc2613"
    InferenceSession.objects.filter(pk=world["pk"]).update(session_id=whole)
    page = operator.get(reverse("sessions")).content.decode()
    assert ">13000596-2…dc2613<" in page
    assert f'data-copy="{whole}"' in page


def test_an_address_with_a_slash_too_many_leads_to_the_page(operator: Client) -> None:
    answer = operator.get("/nodes/?state=dead")
    assert (answer.status_code, answer["Location"]) == (302, "/nodes?state=dead")
    assert operator.get("/nonsense/").status_code == 404
    assert operator.get("/", PATH_INFO="//evil.example/nodes/").status_code == 404
    assert operator.get("/favicon.ico")["Location"].endswith("/img/icon.svg")
    assert Client().get("/favicon.ico").status_code == 302


def test_a_phone_has_four_entries_and_the_rest_behind_more(operator: Client) -> None:
    page = operator.get(reverse("events")).content.decode()
    bar, rest = page.split('id="more-pages"')
    assert bar.count('class="entry"') == 4
    assert 'aria-current="page"' in rest
    assert 'class="more here"' in bar
    assert 'class="more"' in operator.get(reverse("fleet")).content.decode()


def test_search_finds_by_name_and_id_only_what_the_user_may_see(
    operator: Client, world: dict[str, Any]
) -> None:
    assert "gpu-1" in operator.get(reverse("search"), {"q": "GPU-"}).content.decode()
    page = operator.get(reverse("search"), {"q": str(world["replica_id"])}).content.decode()
    assert reverse("replica", args=[world["replica_id"]]) in page
    assert "Nothing is named" in operator.get(reverse("search"), {"q": "zzz"}).content.decode()


def test_text_from_outside_is_shown_as_text(operator: Client, world: dict[str, Any]) -> None:
    Node.objects.update(liveness="dead", liveness_reason="<script>alert(1)</script>")
    InferenceSession.objects.update(session_id="<img src=x onerror=alert(1)>")
    for page in ("fleet", "nodes", "node", "sessions", "session"):
        text = operator.get(addresses(world)[page]).content.decode()
        assert "<script>alert" not in text, page
        assert "<img src=x" not in text, page


def test_the_style_guide_is_for_debugging_only(operator: Client, settings: Any) -> None:
    assert operator.get(reverse("styleguide")).status_code == 404
    settings.DEBUG = True
    assert operator.get(reverse("styleguide")).status_code == 200


def test_the_layout_is_answered_whole_and_only_when_there_is_one(operator: Client, reader: Any) -> None:
    assert operator.get(reverse("live_layout")).status_code == 404
    reader.layout = b'{"version": 3}'
    assert operator.get(reverse("live_layout")).json() == {"version": 3}


def test_static_plotly_comes_from_the_wheel_and_nothing_else_does() -> None:
    from django.contrib.staticfiles import finders  # noqa: PLC0415 - reads settings at import

    assert finders.find("vendor/plotly.min.js")
    assert finders.find("vendor/widgetbundle.js") is None
    assert finders.find("vendor/../__init__.py") is None


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
