"""Pages and REST of installations: wishes are recorded, secrets sealed, failures said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

import pytest
import redis
from django.conf import settings
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse

from exaserve_ops.access.models import IdempotencyRecord
from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.adapters.ssh_credentials import KEPT_SECONDS, CredentialVault
from exaserve_ops.api import ports as api_ports
from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard import ports
from exaserve_ops.inventory.domain.installation import Credentials, HostKey
from exaserve_ops.inventory.models import NodeInstallation, SshHostKey
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.inventory.services import installations as services
from exaserve_ops.inventory.services.installations import InstallationWish
from tests.dashboard.conftest import MemoryReader
from tests.fakes.world import NOW, JsonClient, client_with_key, make_node, make_user

pytestmark = pytest.mark.django_db

SECRET = "correct horse battery staple"
LIST = "/api/v1/nodes/installations"
KEY = HostKey("ssh-ed25519", "AAAAC3", "SHA256:abc")


@pytest.fixture
def vault(redis_client: redis.Redis) -> CredentialVault:
    vault = CredentialVault(redis_client, settings.ENV.fleet_secret)
    ports.credential_vault.use(vault)
    ports.model_folder_reader.use(ModelFolder())
    api_ports.credential_vault.use(vault)
    return vault


@pytest.fixture
def operator(vault: CredentialVault) -> Client:  # noqa: ARG001 - pages hand credentials to it
    client = Client()
    client.force_login(make_user("olga", "operator"))
    return client


@pytest.fixture
def rest(vault: CredentialVault) -> Callable[[str], JsonClient]:  # noqa: ARG001 - as above
    return lambda role: client_with_key(make_user(f"rest-{role}", role))


def shown(client: Client, row: NodeInstallation) -> str:
    return client.get(reverse("installation", args=[row.pk])).content.decode()


def offered(row: NodeInstallation) -> NodeInstallation:
    return services.record_offer(row.pk, KEY, pinned=False, actor="controller:installations", now=NOW)


def form(**changes: object) -> dict[str, object]:
    fields = {"host": "gpu-1", "port": 22, "user": "root", "auth": "password", "password": SECRET}
    return fields | {"folder": "exaserve-agent"} | changes


def test_form_records_the_wish_and_seals_the_password(
    operator: Client, vault: CredentialVault, redis_client: redis.Redis
) -> None:
    answer = operator.post(reverse("installation_new"), form())
    row = NodeInstallation.objects.get()
    assert answer["Location"] == reverse("installation", args=[row.pk])
    assert (row.host, row.node_name, row.status, row.asked_by) == ("gpu-1", "gpu-1", "new", "user:olga")
    assert vault.find(str(row.pk)) == Credentials(password=SECRET)
    [name] = redis_client.keys("exaops:ssh:*")
    assert SECRET.encode() not in cast("bytes", redis_client.get(name))
    assert 0 < redis_client.ttl(name) <= KEPT_SECONDS
    for table in (NodeInstallation, Event):
        assert SECRET not in str(list(table.objects.values()))
    assert SECRET not in shown(operator, row)


def test_credentials_belong_to_one_installation_and_one_fleet(
    vault: CredentialVault, redis_client: redis.Redis
) -> None:
    vault.keep("a", Credentials(password=SECRET))
    redis_client.rename("exaops:ssh:a", "exaops:ssh:b")
    assert vault.find("b") is None
    vault.keep("a", Credentials(password=SECRET))
    assert CredentialVault(redis_client, b"x" * 32).find("a") is None
    vault.forget("a")
    assert vault.find("a") is None
    assert SECRET not in repr(Credentials(password=SECRET))


def test_form_says_what_is_missing(operator: Client) -> None:
    page = operator.post(reverse("installation_new"), form(auth="key", password="", host="a b"))
    assert page.status_code == 422
    assert "Choose the file of the private key." in page.content.decode()
    upload = SimpleUploadedFile("id", b"\xff\xfe")
    page = operator.post(reverse("installation_new"), form(auth="key", key_file=upload))
    assert "This is no private key in OpenSSH or PEM form." in page.content.decode()
    page = operator.post(reverse("installation_new"), form(host="a b"))
    assert "give a host name or an address" in page.content.decode()
    page = operator.post(reverse("installation_new"), form(restart_when_dead="on"))
    assert "Choose the ssh-agent of the controllers" in page.content.decode()
    assert not NodeInstallation.objects.exists()


def test_fingerprint_is_shown_compared_and_pinned(operator: Client) -> None:
    row = make_installation()
    offered(row)
    page = shown(operator, row)
    assert "SHA256:abc" in page
    assert "Is this the machine?" in page
    confirm = reverse("installation_confirm", args=[row.pk])
    operator.post(confirm, {"fingerprint": "SHA256:other"})
    assert not SshHostKey.objects.exists()
    operator.post(confirm, {"fingerprint": "SHA256:abc"})
    pin = SshHostKey.objects.get()
    assert (pin.host, pin.port, pin.key_type, pin.confirmed_by) == ("gpu-1", 22, "ssh-ed25519", "user:olga")
    row.refresh_from_db()
    assert row.status == "queued"


def make_installation(**changes: object) -> NodeInstallation:
    wish = InstallationWish(**({"host": "gpu-1", "user": "root", "auth": "password"} | changes))  # type: ignore[arg-type]  # any field
    return services.create_installation(wish, actor="user:olga", now=NOW)


def failed(row: NodeInstallation, log: str) -> NodeInstallation:
    offered(row)
    services.confirm_host_key(row.pk, KEY.fingerprint, actor="user:olga", now=NOW)
    row = services.begin_run(row.pk, actor="controller:installations", now=NOW)
    step = services.begin_step(row.pk, row.run, "python", now=NOW)
    services.append_step_log(step, log)
    services.end_step(step, "failed", "no Python <b>3.11</b>", now=NOW)
    return services.advance_installation(row.pk, "broke", reason="no Python", actor="c", now=NOW)


def test_failed_run_shows_its_log_as_text_and_is_tried_again_with_new_credentials(
    operator: Client, vault: CredentialVault
) -> None:
    row = failed(make_installation(), "<script>alert(1)</script>\n")
    page = shown(operator, row)
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "no Python &lt;b&gt;3.11" in page
    act = reverse("installation_act", args=[row.pk])
    operator.post(act, {"action": "install", "password": ""})
    row.refresh_from_db()
    assert row.status == "failed"
    operator.post(act, {"action": "install", "password": SECRET})
    row.refresh_from_db()
    assert (row.status, vault.find(str(row.pk))) == ("new", Credentials(password=SECRET))


def test_what_did_not_work_out_is_asked_for_anew_with_its_form_filled_in(
    operator: Client, vault: CredentialVault
) -> None:
    row = failed(make_installation(folder="agents", python="/opt/none/python"), "")
    vault.keep(str(row.pk), Credentials(password="wrong"))
    address = f"{reverse('installation_new')}?instead_of={row.pk}"
    assert address in shown(operator, row)
    page = operator.get(address).content.decode()
    assert 'value="/opt/none/python"' in page
    assert "wrong" not in page.replace("wrong password", "")
    answer = operator.post(address, form(folder="agents", python=""))
    anew = NodeInstallation.objects.exclude(pk=row.pk).get()
    assert answer["Location"] == reverse("installation", args=[anew.pk])
    row.refresh_from_db()
    assert (row.status, anew.status, anew.python) == ("abandoned", "new", "")
    assert (vault.find(str(row.pk)), vault.find(str(anew.pk))) == (None, Credentials(password=SECRET))


def test_an_agent_that_has_joined_is_not_given_up_for_another_form(operator: Client) -> None:
    row = failed(make_installation(), "")
    services.keep_facts(row.pk, {}, node_id=make_node("gpu-1").pk)
    address = f"{reverse('installation_new')}?instead_of={row.pk}"
    assert address not in shown(operator, row)
    assert operator.post(address, form(folder="another")).status_code == 302
    row.refresh_from_db()
    assert row.status == "failed"
    assert operator.get(f"{reverse('installation_new')}?instead_of=nonsense").status_code == 200


def test_a_run_that_broke_off_counts_the_steps_it_did_not_reach(operator: Client) -> None:
    page = shown(operator, failed(make_installation(), ""))
    assert '<progress value="0" max="13"' in page
    assert "user:olga" not in page


def test_progress_is_polled_while_it_moves_and_the_page_renewed_when_it_settles(operator: Client) -> None:
    row = make_installation()
    address = reverse("installation_progress", args=[row.pk])
    moving = operator.get(f"{address}?unsettled=yes")
    assert 'hx-trigger="every 1s"' in moving.content.decode()
    assert "HX-Refresh" not in moving
    offered(row)
    assert operator.get(f"{address}?unsettled=yes")["HX-Refresh"] == "true"


def test_long_log_keeps_its_beginning_and_its_end() -> None:
    row = make_installation()
    step = services.begin_step(row.pk, 1, "environment", now=NOW)
    services.append_step_log(step, "first\n")
    for _ in range(30):
        services.append_step_log(step, "x" * 8192)
    services.append_step_log(step, "last\n")
    step.refresh_from_db()
    assert step.log.startswith("first\n")
    assert step.log.endswith("last\n")
    assert len(step.log) <= services.LOG_HEAD_CHARACTERS + services.LOG_TAIL_CHARACTERS
    assert "the middle is left out" in step.log


def test_rest_asks_confirms_and_forgets_and_keeps_no_secret(
    rest: Callable[[str], JsonClient], vault: CredentialVault
) -> None:
    client = rest("operator")
    body = {"host": "gpu-1", "user": "root", "auth": "password", "password": SECRET}
    made = client.post(LIST, body, HTTP_IDEMPOTENCY_KEY="once")
    assert made.status_code == 201, made.json()
    again = client.post(LIST, body, HTTP_IDEMPOTENCY_KEY="once")
    assert again.json()["id"] == made.json()["id"]
    assert SECRET not in made.content.decode() + str(list(IdempotencyRecord.objects.values()))
    row = NodeInstallation.objects.get()
    assert vault.find(str(row.pk)) == Credentials(password=SECRET)
    offered(row)
    wrong = client.post(f"{LIST}/{row.pk}/confirm", {"fingerprint": "SHA256:other"})
    assert wrong.status_code == 409
    right = client.post(f"{LIST}/{row.pk}/confirm", {"fingerprint": "SHA256:abc"})
    assert (right.json()["status"], right.json()["steps"]) == ("queued", [])
    assert client.post(f"{LIST}/{row.pk}/act", {"action": "upgrade"}).status_code == 409
    given_up = client.post(f"{LIST}/{row.pk}/abandon", {})
    assert given_up.json()["status"] == "abandoned"
    assert vault.find(str(row.pk)) is None
    pin = SshHostKey.objects.get()
    assert client.delete(f"/api/v1/nodes/host-keys/{pin.pk}").status_code == 403
    assert rest("admin").delete(f"/api/v1/nodes/host-keys/{pin.pk}").status_code == 204


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"password": ""}, "password"),
        ({"auth": "key"}, "private_key"),
        ({"port": 0}, "port"),
        ({"x": 1}, "x"),
    ],
)
def test_rest_names_the_field_that_is_wrong(
    rest: Callable[[str], JsonClient], change: dict[str, object], field: str
) -> None:
    body = {"host": "gpu-1", "user": "root", "auth": "password", "password": SECRET} | change
    answer = rest("operator").post(LIST, body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["fields"]
    assert SECRET not in answer.content.decode()


def test_token_for_an_allocation_shows_how_to_start_all_of_it(operator: Client) -> None:
    page = operator.post(reverse("node_join"), {"uses": 256, "hours": "8"}).content.decode()
    assert "it enrols 256 nodes" in page
    assert re.search(r"srun .*workers\.agent up --per-task --name-suffix", page)


def test_retired_node_is_history_its_name_free_and_its_keys_worthless(operator: Client) -> None:
    node = make_node("gpu-1")
    services.retire_node(node.pk, reason="gone", actor="user:olga", now=NOW)
    services.retire_node(node.pk, reason="gone", actor="user:olga", now=NOW)
    node.refresh_from_db()
    assert (node.liveness, node.cordoned, node.key_epoch) == ("retired", True, 2)
    assert node.name.startswith("gpu-1 (retired")
    assert not nodes_in_service().exists()
    ports.live_reader.use(MemoryReader())
    assert "gpu-1" not in operator.get(reverse("nodes")).content.decode()
    assert "gpu-1" in operator.get(reverse("nodes"), {"state": "retired"}).content.decode()
    assert make_node("gpu-1").pk != node.pk
