"""The page of session migration: a dry run with names and reasons; and the setting of a deployment."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.departure import Departure
from exaserve_ops.serving.models import Deployment, Release, Replica
from exaserve_ops.sessions.domain.timeline import TurnMark
from exaserve_ops.sessions.models import InferenceSession, Relocation
from exaserve_ops.sessions.services.departures import ask_departure
from tests.dashboard.conftest import MemoryReader
from tests.fakes.world import make_deployment, make_node

pytestmark = pytest.mark.django_db
INSTEAD = '<span class="soft small">instead of 977\u202fKiB of KV</span>'


@pytest.fixture
def replicas() -> list[Replica]:
    deployment = make_deployment(replicas=2)
    made = [
        Replica.objects.create(
            name=f"r-{name}", deployment=deployment, node=make_node(name), memory_bytes=1, status="ready",
            address="127.0.0.1:4000", reach="reached", release=deployment.releases.get(),
        )
        for name in ("a", "b")
    ]  # fmt: skip
    Node.objects.update(liveness="alive")
    return made


def converse(replica: Replica, count: int, tokens: int) -> list[InferenceSession]:
    now = clock.now()
    mark = TurnMark(now.timestamp(), 1.0, 0.5, str(replica.pk), "new", "ok", 640, 0, 8)
    return [
        InferenceSession.objects.create(
            session_id=f"talk-{number}", model_name="m", replica=replica, context_tokens=tokens, turns=3,
            first_turn_at=now, last_turn_at=now - timedelta(seconds=10), latest_turns=[list(mark)] * 5,
        )
        for number in range(count)
    ]  # fmt: skip


def report(reader: MemoryReader, replicas: list[Replica], blocks: int) -> None:
    """Each of them says how much KV memory it has."""
    for replica in replicas:
        load = {"kv_total_blocks": blocks, "kv_block_tokens": 16, "kv_used_ratio": 0.2, "requests_waiting": 0}
        reader.nodes[str(replica.node_id)] = {"replicas": {str(replica.pk): {"load": load}}}


def test_overfilled_replica_shows_what_would_move_and_by_which_rates(
    viewer: Client, reader: MemoryReader, replicas: list[Replica]
) -> None:
    sessions = converse(replicas[0], 12, 1000)
    report(reader, replicas, 10_000 // 16)
    now = clock.now()
    Deployment.objects.get().model.__class__.objects.update(kv_bytes_per_token=1024)
    for _ in range(3):
        Relocation.objects.create(
            session=sessions[0], source=replicas[0], target=replicas[1], status="done", why="by hand",
            sent_bytes=1 << 20, send_seconds=0.01, created_at=now, status_changed_at=now, ended_at=now,
            asked_by="user:olga",
        )  # fmt: skip
    page = viewer.get(reverse("session_moves")).content.decode()
    assert "its replica is 120% full of active sessions, the target 0%" in page
    assert "120%" in page.replace("\u202f", "")
    assert "with its KV" in page
    assert "1\u202f280 tokens/s" in page, "what computing was measured at"
    assert "100\u202fMiB/s" in page, "and sending"
    assert "not measured yet" in page, "within a node nothing was"
    assert "user:olga" in page
    assert not Relocation.objects.exclude(status="done").exists(), "looking changes nothing"


@pytest.mark.parametrize(
    ("engine", "options", "how", "words"),
    [
        (
            "vllm",
            {"kv_connector": "NixlConnector"},
            "with its KV, 977\u202fKiB",
            "KV is sent where that is faster, or else computed before the next turn",
        ),
        (
            "sglang",
            {},
            f"computed there before the next turn {INSTEAD}",
            "the target computes the context before the next turn",
        ),
        (
            "vllm",
            {"enable_prefix_caching": False},
            f"computed there at the next turn {INSTEAD}",
            "the target computes the context at the next turn",
        ),
    ],
)
def test_page_says_how_each_engine_moves_a_session(  # noqa: PLR0917 - what pytest gives
    viewer: Client, replicas: list[Replica], engine: str, options: dict[str, object], how: str, words: str
) -> None:
    Release.objects.update(engine=engine, engine_options=options)
    Deployment.objects.get().model.__class__.objects.update(kv_bytes_per_token=1000)
    converse(replicas[0], 1, 1000)
    Node.objects.filter(pk=replicas[0].node_id).update(drain_status="draining")
    page = viewer.get(reverse("session_moves")).content.decode()
    assert how in page
    assert f"when one moves, {words}" in page
    assert ("sends none" in page) is (engine == "sglang" or "enable_prefix_caching" in options)


def test_moves_say_what_their_kv_went_by(viewer: Client, replicas: list[Replica]) -> None:
    (session,) = converse(replicas[0], 1, 1000)
    now = clock.now()
    facts = {"why": "x", "created_at": now, "status_changed_at": now, "ended_at": now, "status": "done"}
    ends = {"session": session, "source": replicas[0], "target": replicas[1]}
    Relocation.objects.create(**ends, **facts, way="transfer", carrier="nixl", sent_bytes=1 << 20)
    told = {"target_tokens": 480, "send_seconds": 0.5}
    Relocation.objects.create(**ends, **facts, way="prefill", carrier="computed", **told)
    for page in (reverse("session_moves"), reverse("session", args=[session.pk])):
        text = viewer.get(page).content.decode()
        assert "over NIXL" in text
        assert "computed there" in text
    assert "480 tokens in 500\u202fms" in viewer.get(reverse("session_moves")).content.decode()


def test_page_says_what_waits_and_why(viewer: Client, replicas: list[Replica]) -> None:
    assert "Nothing would move" in viewer.get(reverse("session_moves")).content.decode()
    converse(replicas[0], 1, 100)
    Node.objects.update(drain_status="draining")
    page = viewer.get(reverse("session_moves")).content.decode()
    assert "no other replica of its deployment takes conversations now" in page
    assert "What waits" in page


def test_setting_is_changed_with_its_reason_and_says_what_is_wrong(
    operator: Client, viewer: Client, replicas: list[Replica]
) -> None:
    deployment = replicas[0].deployment
    address = reverse("deployment_balance", args=[deployment.pk])
    page = operator.get(reverse("deployment", args=[deployment.pk])).content.decode()
    assert "90% of its KV memory" in page
    asked = {"balance_from_percent": "80", "balance_gap_percent": "20", "reason": "mornings are uneven"}
    refused = operator.post(address, asked | {"balance_from_percent": "5"}, follow=True).content.decode()
    assert "Not done" in refused
    done = operator.post(address, asked | {"balance_sessions": "on"}, follow=True).content.decode()
    assert "are balanced between its replicas" in done
    assert "80% of its KV memory" in done
    assert Event.objects.get(event="changed").reason.endswith("mornings are uneven")
    off = operator.post(address, asked, follow=True).content.decode()
    assert "stay where they are, however full" in off
    Deployment.objects.filter(pk=deployment.pk).update(status="deleting")
    assert "Not done" in operator.post(address, asked, follow=True).content.decode()
    assert viewer.post(address, asked).status_code == 403


def test_draining_replica_says_who_is_left_until_when_and_who_was_left_behind(
    viewer: Client, replicas: list[Replica]
) -> None:
    converse(replicas[0], 2, 100)
    now = clock.now()
    mine = Replica.objects.filter(pk=replicas[0].pk)
    mine.update(
        status="draining",
        wanted="drain",
        status_changed_at=now,
        drain_deadline_at=now + timedelta(seconds=60),
    )
    address = reverse("replica_state", args=[replicas[0].pk])
    page = viewer.get(address).content.decode()
    until = (now + timedelta(seconds=45)).strftime("%H:%M:%S")
    assert f"who has not left by {until} UTC is left behind" in page
    assert "2 of the last ten minutes are here" in page
    mine.update(handed_over_at=now, left_behind=2)
    page = viewer.get(address).content.decode()
    assert "but for 2: their next turns are computed anew elsewhere" in page
    Node.objects.filter(pk=replicas[0].node_id).update(
        drain_status="draining", drain_changed_at=now - timedelta(seconds=5), drain_reason="x"
    )
    node = viewer.get(reverse("node_drain_state", args=[replicas[0].node_id])).content.decode()
    assert "2 active sessions to move" in node
    assert "2 left behind so far" in node


def test_replica_that_a_rollout_has_left_says_why(viewer: Client, replicas: list[Replica]) -> None:
    converse(replicas[0], 1, 100)
    departure = Departure("release 2 takes its place")
    ask_departure([replicas[0].pk], departure, actor="controller:rollouts", now=clock.now())
    page = viewer.get(reverse("replica_state", args=[replicas[0].pk])).content.decode()
    assert "(release 2 takes its place). First turns go elsewhere." in page
