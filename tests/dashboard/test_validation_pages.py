"""Pages of validations: the report as it grows, the form, and what may be pressed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.validations import curves_figure, searches_of
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.replicas import create_replicas
from exaserve_ops.validation.domain.asking import Finding
from exaserve_ops.validation.domain.lifecycle import FAILED, PASSED
from exaserve_ops.validation.models import Validation
from exaserve_ops.validation.services import advance_validation, begin_check, make_trial, record_finding
from tests.dashboard.conftest import World
from tests.dashboard.test_rollout_pages import FORM
from tests.fakes.world import NOW, make_node

LEVELS = [
    {"at_once": 1, "tokens_per_second": 50.0, "ttft_p95_seconds": 0.1, "itl_seconds": 0.02},
    {"at_once": 2, "tokens_per_second": 90.0, "ttft_p95_seconds": 0.2, "itl_seconds": 0.02},
]


@pytest.fixture
def validation(world: World) -> Validation:  # noqa: ARG001 - makes it
    found = Validation.objects.get()
    return advance_validation(found.pk, "start", why="", actor="test", now=NOW)


def text(client: Client, name: str, *args: object) -> str:
    answer = client.get(reverse(name, args=args))
    assert answer.status_code == 200
    return str(answer.content.decode())


def test_report_says_what_was_seen_and_what_runs(operator: Client, validation: Validation) -> None:
    record_finding(validation, 1, Finding(PASSED, "llama, 4 layers", why="known"), now=NOW)
    record_finding(validation, 2, Finding(FAILED, "6 files", "all", "shard <2> is short"), now=NOW)
    begin_check(validation, 3, now=NOW)
    page = text(operator, "validation", validation.pk)
    assert "llama, 4 layers" in page
    assert "shard &lt;2&gt; is short" in page
    assert "Is the architecture known" in page
    assert "checking" in page
    assert "hx-get" in page, "it renews itself while it runs"
    advance_validation(validation.pk, "fail", why="failed: weights", actor="test", now=NOW)
    ended = text(operator, "validation_progress", validation.pk)
    assert "No-go." in ended
    assert "hx-get" not in ended, "what has ended is not asked for again"


def test_form_asks_for_a_validation_and_says_what_is_wrong(operator: Client, world: World) -> None:  # noqa: ARG001 - a model
    Validation.objects.all().delete()
    model = Model.objects.order_by("name").first()
    assert model is not None
    address = reverse("validation_new", args=[model.pk])
    assert "Validate" in operator.get(address).content.decode()
    form = {
        "engines": ["torch"],
        "accelerators_per_replica": 1,
        "most_at_once": 8,
        "idle_seconds": 5,
        "most_launches": 3,
        "ttft_limit_seconds": 1.5,
        "itl_limit_seconds": 0.05,
        "nodes": "",
    }
    refused = operator.post(address, form)
    assert refused.status_code == 422
    assert not Validation.objects.exists()
    wrong = operator.post(address, form | {"reason": "x", "engine_options": "no equals sign"})
    assert wrong.status_code == 422
    assert "name = value" in wrong.content.decode()
    much = operator.post(address, form | {"reason": "x", "memory_mib": 2**30 + 1})
    assert "less than or equal to 1073741824" in much.context["form"].errors["memory_mib"][0]
    wide = form | {"reason": "wide", "nodes_per_replica": 2, "engine_options": "pipeline_stages = 2"}
    told = operator.post(address, wide).context["form"].errors["nodes_per_replica"]
    assert "2 nodes of one supernode are needed" in told[0]
    assert not Validation.objects.exists()
    made = operator.post(address, form | {"reason": "new weights", "engine_options": "max_num_seqs = 3"})
    validation = Validation.objects.get()
    assert made["Location"] == reverse("validation", args=[validation.pk])
    assert validation.engine_options == {"torch": {"max_num_seqs": 3}}
    assert (validation.most_launches, validation.ttft_limit_seconds) == (3, 1.5)
    twice = operator.post(address, form | {"reason": "again"})
    assert twice.status_code == 422
    assert "has not ended" in twice.content.decode()


def test_options_of_a_validation_may_be_for_one_engine_alone(operator: Client, world: World) -> None:  # noqa: ARG001 - a model
    Validation.objects.all().delete()
    model = Model.objects.order_by("name").first()
    assert model is not None
    node = make_node("with-vllm")
    node.engines, node.engine_versions = ["torch", "vllm"], {"vllm": "0.33.0"}
    node.save()
    address = reverse("validation_new", args=[model.pk])
    form = {
        "engines": ["torch", "vllm"],
        "accelerators_per_replica": 1,
        "most_at_once": 8,
        "idle_seconds": 5,
        "most_launches": 0,
        "ttft_limit_seconds": 2,
        "itl_limit_seconds": 1,
    }
    lines = "max_num_seqs = 3\nvllm: enforce_eager = true\n vllm : max_num_seqs = 4\n"
    wrong = operator.post(address, form | {"reason": "x", "engine_options": lines + "sglang: page_size = 16"})
    assert wrong.status_code == 422
    assert "“sglang: page_size = 16” is for sglang, which is not tried." in wrong.content.decode()
    lines += "vllm: environment = VLLM_NOTE=a:b"
    made = operator.post(address, form | {"reason": "x", "engine_options": lines})
    assert made.status_code == 302, made.context["form"].errors
    assert Validation.objects.get().engine_options == {
        "torch": {"max_num_seqs": 3},
        "vllm": {"max_num_seqs": 4, "enforce_eager": True, "environment": "VLLM_NOTE=a:b"},
    }


def test_cancelling_wants_a_reason_and_ends_it(operator: Client, validation: Validation) -> None:
    address = reverse("validation_cancel", args=[validation.pk])
    operator.post(address, {"reason": " "})
    validation.refresh_from_db()
    assert validation.status == "running"
    operator.post(address, {"reason": "enough"})
    validation.refresh_from_db()
    assert (validation.status, validation.why) == ("cancelled", "enough")
    page = text(operator, "validation", validation.pk)
    assert "Validate again" in page
    answer = operator.post(address, {"reason": "twice"}, follow=True)
    assert "Not done" in answer.content.decode()


def test_list_counts_outcomes(operator: Client, validation: Validation) -> None:
    record_finding(validation, 1, Finding(PASSED), now=NOW)
    page = text(operator, "validations")
    assert "1 of 16" in page
    assert (
        validation.model.name in text(operator, "model_validations", validation.model_id) or "torch" in page
    )


def test_settings_that_were_tried_stand_in_a_table_and_draw(operator: Client, validation: Validation) -> None:
    row = {
        "sequences": 16, "tokens": 2048, "tokens_per_second": 812.0, "ttft_p95_seconds": 0.4,
        "itl_seconds": 0.02, "memory": "tight", "needed_bytes": 9 << 30, "why": "", "is_best": True,
        "is_nearest": False, "is_own": False, "spread_ratio": 0.04, "rounds": [780.0, 812.0, 845.0],
        "launches": 2,
    }  # fmt: skip
    died = row | {"sequences": 32, "why": "CUDA out of <memory>", "is_best": False, "ttft_p95_seconds": None}
    own = row | {"sequences": 0, "tokens": 0, "tokens_per_second": 700.0, "is_own": True, "is_best": False}
    details = {
        "options": ["max_num_seqs", "max_num_batched_tokens"],
        "settings": [own, row, died],
        "skipped": [{"sequences": 64, "tokens": 2048, "why": "it does not fit"}],
        "at_once": 64,
        "ttft_limit_seconds": 2.0,
        "itl_limit_seconds": 0.1,
    }
    tuning = validation.checks.get(name="tuning")
    record_finding(validation, tuning.position, Finding(PASSED, details=details), now=NOW)
    page = text(operator, "validation", validation.pk)
    for told in (
        "max_num_batched_tokens",
        "Best within the limits",
        "812 ± 4.0",
        "As it was asked for: ",
        "not told",
        "tight, 9",
        "1 more was not launched",
    ):
        assert told in page
    assert "CUDA out of &lt;memory&gt;" in page
    figure = curves_figure(validation.checks.all())
    assert [line["x"] for line in figure["data"]] == [[None, 16], [None, 2048]], (
        "what did not start has no point, nor has what the engine was not told"
    )
    assert {line["mode"] for line in figure["data"]} == {"markers"}
    assert figure["layout"]["xaxis5"]["tickvals"] == [16], "one value has one tick"
    untold = details | {"settings": [row | {"sequences": 0}]}
    validation.checks.filter(name="tuning").update(details=untold)
    assert [line["x"] for line in curves_figure(validation.checks.all())["data"]] == [[2048]], (
        "no panel for what the engine was never told"
    )
    validation.checks.filter(name="tuning").update(details=details)
    narrow = curves_figure(validation.checks.all(), columns=1)["layout"]
    panels = [narrow[f"yaxis{number}"]["domain"] for number in ("", *range(2, 7))]
    assert narrow["xaxis2"]["domain"] == [0.0, 1.0]
    assert all(upper[0] > lower[1] for upper, lower in pairwise(panels)), "no panel is over another"
    assert panels[0][1] <= 1
    assert panels[-1][0] == 0


def test_table_marks_the_nearest_setting_and_the_limits_that_are_broken(
    operator: Client, validation: Validation
) -> None:
    row = {
        "sequences": 16, "tokens": 0, "tokens_per_second": 812.0, "ttft_p95_seconds": 2.5,
        "itl_seconds": 0.02, "memory": "", "needed_bytes": None, "why": "", "is_best": False,
        "is_nearest": True,
    }  # fmt: skip
    far = row | {"sequences": 32, "ttft_p95_seconds": 9.0, "itl_seconds": 0.5, "is_nearest": False}
    details = {
        "options": ["max_num_seqs"], "settings": [far, row], "skipped": [], "at_once": 32,
        "ttft_limit_seconds": 2.0, "itl_limit_seconds": 0.1,
    }  # fmt: skip
    tuning = validation.checks.get(name="tuning")
    record_finding(validation, tuning.position, Finding(PASSED, details=details), now=NOW)
    page = text(operator, "validation", validation.pk)
    assert page.count("Nearest to the limits") == 1
    assert "over the limit of TTFT p95 and of time between tokens" in page
    assert "over the limit of TTFT p95<" in page
    [search] = searches_of(validation.checks.all())
    assert [shown.is_nearest for shown in search.rows] == [False, True]


def make_trial_with_replica(validation: Validation) -> tuple[Deployment, Replica]:
    trial = make_trial(validation, "torch", now=NOW)
    [made] = create_replicas(trial.pk, 1, why="x", actor="test", now=NOW)
    return trial, made


def test_pages_of_a_trial_name_its_validation_and_offer_no_change(
    operator: Client, validation: Validation
) -> None:
    trial, made = make_trial_with_replica(validation)
    for page in (
        text(operator, "deployment", trial.pk),
        text(operator, "replica", made.pk),
        text(operator, "replica_drawer", made.pk),
    ):
        assert "nobody else scales, rolls out, restarts or deletes it" in page
        assert reverse("validation", args=[validation.pk]) in page
        assert '<summary class="button' not in page
    page = text(operator, "deployment", trial.pk)
    for name in ("deployment_scale", "rollout_new", "deployment_delete", "deployment_sleep"):
        assert f'"{reverse(name, args=[trial.pk])}"' not in page
        assert operator.get(reverse(name, args=[trial.pk])).status_code in {302, 405}
    assert "Talk to it" not in page, "no client reaches it"


@pytest.mark.parametrize(
    ("name", "form", "status"),
    [
        ("deployment_scale", {"replicas": 3, "standbys": 1, "reason": "x"}, 409),
        ("deployment_delete", {"reason": "x"}, 409),
        ("deployment_sleep", {"sleep": "yes", "reason": "x"}, 302),
        ("deployment_pool", {"open": "no", "reason": "x"}, 302),
        ("deployment_balance", {"balance_sessions": "on", "balance_from_percent": 80,
                                "balance_gap_percent": 20, "reason": "x"}, 302),
        ("rollout_new", {**FORM, "engine_options": "max_num_seqs = 5"}, None),
        ("replica_restart", {"reason": "x"}, 302),
        ("replica_replace", {"reason": "x"}, 302),
    ],
)  # fmt: skip
def test_what_is_posted_to_a_trial_all_the_same_changes_nothing(
    operator: Client, validation: Validation, name: str, form: dict[str, object], status: int | None
) -> None:
    trial, made = make_trial_with_replica(validation)
    if name == "replica_restart":
        Replica.objects.filter(pk=made.pk).update(status="failed", node=Node.objects.first())
    before = list(Deployment.objects.filter(pk=trial.pk).values()), Event.objects.count()
    subject = made.pk if name.startswith("replica") else trial.pk
    form = {"model": str(trial.model_id), "generation": trial.generation, "name": trial.name, **form}
    answer = operator.post(reverse(name, args=[subject]), form, follow=status == 302)
    assert "only the validation changes or deletes it: cancel the validation" in answer.content.decode()
    if status != 302:
        assert answer.status_code == (status or 200)
    assert (list(Deployment.objects.filter(pk=trial.pk).values()), Event.objects.count()) == before
    made.refresh_from_db()
    assert made.wanted == "run"


def test_curves_have_a_line_for_each_engine_that_told_any(operator: Client, validation: Validation) -> None:
    assert curves_figure(validation.checks.all())["data"] == []
    concurrency = validation.checks.get(name="concurrency")
    record_finding(validation, concurrency.position, Finding(PASSED, details={"levels": LEVELS}), now=NOW)
    context = validation.checks.get(name="context")
    curve = {"curve": [{"tokens": 512, "ttft_seconds": 0.3}]}
    record_finding(validation, context.position, Finding(PASSED, details=curve), now=NOW)
    figure = operator.get(reverse("validation_figure", args=[validation.pk])).json()
    assert [line["y"] for line in figure["data"]] == [[50.0, 90.0], [0.1, 0.2], [0.02, 0.02], [0.3]]
    assert {line["name"] for line in figure["data"]} == {"torch"}
