"""Pages show a replica over several nodes whole: its members where they are, and what ended a start."""

from __future__ import annotations

from django.test import Client
from django.urls import reverse

from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Deployment, Replica
from tests.dashboard.conftest import World
from tests.fakes.gang_records import make_gang_of_two
from tests.fakes.world import make_model, make_node


def test_page_of_a_replica_shows_its_members_and_what_ended_its_start(
    viewer: Client,
    world: World,  # noqa: ARG001 - beside others
) -> None:
    replica = make_gang_of_two()
    page = viewer.get(reverse("replica", args=[replica.pk])).content.decode()
    assert "crash 1 of 6: start 1: node wide-1, member 1 of 2: killed by signal 9 after 4.0 s" in page
    members = page.partition('id="replica-members"')[2].partition("</section>")[0]
    for words in ("wide-0", "wide-1", "0 of 2", "1 of 2", "head", "GPU-wide-0-0", "PID 77", "failed"):
        assert words in members
    assert "start 1 of the whole" in members
    assert "1 crash in a row" in members
    part = viewer.get(reverse("replica_state", args=[replica.pk]), {"part": "members"}).content.decode()
    assert "replica-members" in part
    assert "is started on all its nodes" in page


def test_log_and_last_end_of_each_member_can_be_chosen(
    viewer: Client,
    world: World,  # noqa: ARG001 - beside others
) -> None:
    replica = make_gang_of_two()
    address = reverse("replica", args=[replica.pk])
    head = viewer.get(address).content.decode()
    assert f"/ws/replicas/{replica.pk}/log/?member=0" in head
    assert f'<a href="{address}?member=0#log" aria-current="true">Member 0 on wide-0</a>' in head
    assert f'<a href="{address}?member=1#log">Member 1 on wide-1</a>' in head
    assert "was killed by signal 9" not in head.partition('id="replica-exit"')[2].partition("</div>")[0]
    other = viewer.get(address, {"member": "1"}).content.decode()
    assert f"/ws/replicas/{replica.pk}/log/?member=1" in other
    ending = other.partition('id="replica-exit"')[2].partition("</div>")[0]
    assert "Member 1 on wide-1: <b>Attempt 1</b> was killed by signal 9" in ending
    assert "bye &lt;b&gt;" in ending
    unknown = viewer.get(address, {"member": "7"})
    assert unknown.status_code == 404
    assert "Not shown: it has members 0 to 1: there is no member &#x27;7&#x27;." in unknown.content.decode()
    Node.objects.filter(name="wide-1").update(protocol_minor=6)
    old = viewer.get(address, {"member": "1"}).content.decode()
    assert "wide-1 cannot show it: its agent speaks 1.6" in old
    assert "data-log-lines" not in old
    Deployment.objects.update(engine="torch")
    assert "Stage 1 on wide-1" in viewer.get(address).content.decode()


def test_badge_of_a_replicas_page_comes_with_its_state_and_says_the_same(
    viewer: Client,
    world: World,  # noqa: ARG001 - beside others
) -> None:
    replica = make_gang_of_two()
    page = viewer.get(reverse("replica", args=[replica.pk])).content.decode()
    address = reverse("replica_state", args=[replica.pk])
    assert f'hx-get="{address}?part=now" hx-trigger="live:tick from:body"' in page
    for status in ("ready", "failed"):
        Replica.objects.filter(pk=replica.pk).update(status=status)
        state, badge, said = (
            viewer.get(address, {"part": "now"}).content.decode().partition('<span class="state"')
        )
        assert badge
        assert 'id="replica-badge" hx-swap-oob="true"' in said
        assert status in state
        assert status in said
    in_the_drawer = viewer.get(address).content.decode()
    assert "hx-swap-oob" not in in_the_drawer, "there is no badge beside it"


def test_end_that_is_shown_already_is_left_alone_and_a_new_one_comes(
    viewer: Client,
    world: World,  # noqa: ARG001 - beside others
) -> None:
    replica = make_gang_of_two()
    address = reverse("replica_state", args=[replica.pk])
    asked = {"part": "exit", "member": "1"}
    assert viewer.get(address, asked | {"seen": "1"}).status_code == 204
    shown = viewer.get(address, asked | {"seen": "0"})
    assert "part=exit&amp;member=1&amp;seen=1" in shown.content.decode()
    of_the_head = {"part": "exit", "member": "0", "seen": "0"}
    assert viewer.get(address, of_the_head).status_code == 204
    Replica.objects.filter(pk=replica.pk).update(exit_attempt=1, exit_code=3)
    assert "exited with code 3" in viewer.get(address, of_the_head).content.decode()


def test_page_of_each_node_shows_the_member_that_runs_there_and_counts_it(
    viewer: Client,
    world: World,  # noqa: ARG001 - beside others
) -> None:
    replica = make_gang_of_two()
    for name, tag in (("wide-0", "head of 2"), ("wide-1", "one of 2")):
        node = Node.objects.get(name=name)
        page = viewer.get(reverse("node", args=[node.pk])).content.decode()
        assert tag in page
        assert replica.name in page.partition('id="accelerators"')[2], "who has the card"
        row = viewer.get(reverse("node_row", args=[node.pk])).content.decode()
        counted = row.partition('data-label="Replicas ready"')[2].partition("</td>")[0]
        assert '0<span class="soft">/1</span>' in counted
    table = viewer.get(reverse("replicas")).content.decode()
    assert "+1" in table.partition(f'id="replica-{replica.pk}"')[2].partition("</tr>")[0]
    deployment = viewer.get(reverse("deployment", args=[replica.deployment_id])).content.decode()
    assert "2, all in one supernode" in deployment


def test_form_makes_a_deployment_of_several_nodes_and_shows_the_refusal_beside_the_field(
    operator: Client,
) -> None:
    for name in ("a", "b"):
        make_node(name, supernode="s7")
    form = {
        "name": "wide", "model": str(make_model().pk), "replicas": 1, "engine": "torch",
        "engine_options": "pipeline_stages = 2", "accelerators_per_replica": 1, "nodes_per_replica": 3,
        "memory_mib": 64, "drain_seconds": 60, "start_seconds": 300, "step": "plan",
    }  # fmt: skip
    refused = operator.post(reverse("deployment_new"), form)
    assert refused.status_code == 422
    assert "pipeline_stages 2 need 2 accelerators" in refused.content.decode()
    deep = {"engine_options": "pipeline_stages = 5", "nodes_per_replica": 5}
    too_deep = operator.post(reverse("deployment_new"), form | deep)
    assert too_deep.status_code == 422
    assert "tiny has 2 layers, and each stage needs one: give at most 2" in too_deep.content.decode()
    Node.objects.update(engines=["torch", "vllm"])
    uneven = {"engine": "vllm", "engine_options": "tensor_parallel_size = 3"}
    refused = operator.post(reverse("deployment_new"), form | uneven)
    assert refused.status_code == 422
    assert "which 3 ranks cannot share evenly: give 1, 2 or 4" in refused.content.decode()
    planned = operator.post(reverse("deployment_new"), form | {"nodes_per_replica": 2}).content.decode()
    assert "on a, b" in planned
    assert "all 2 nodes in one rack of supernode s7" in planned
    assert not Deployment.objects.filter(name="wide").exists()
