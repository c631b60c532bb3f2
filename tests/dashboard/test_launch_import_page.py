"""The page that reads a pasted launch: what it shows of it, and what it keeps to itself."""

from __future__ import annotations

import html
import re

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.serving.domain.launch_words import LONGEST
from exaserve_ops.serving.models import Deployment
from tests.fakes.world import make_model

pytestmark = pytest.mark.django_db
SECRET = "correct-horse-battery"
TWO = f"""\
modelSpec:
- {{name: first, modelURL: org/llama, hf_token: {SECRET}, vllmConfig: {{maxModelLen: 4096}}}}
- {{name: second, modelURL: org/llama, env: [{{name: MY_TOKEN, value: {SECRET}}}], vllmConfig: {{seed: 7}}}}
"""


def text_of(page: str) -> str:
    """What the page would send again."""
    shown = re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL)
    assert shown
    return html.unescape(shown[1]).lstrip("\n")


def test_the_page_shows_no_secret_and_another_draft_can_still_be_chosen(operator: Client) -> None:
    make_model("llama")
    first = operator.post(reverse("deployment_import"), {"text": TWO}).content.decode()
    assert SECRET not in first
    assert "2 deployments are described" in first
    second = operator.post(reverse("deployment_import"), {"text": text_of(first), "draft": "1"})
    assert second.status_code == 200
    assert 'value="second"' in second.content.decode()
    assert re.search(r'name="o-seed"[^>]*value="7"', second.content.decode())


@pytest.mark.parametrize(
    "text",
    [f"vllm serve 'm --api-key {SECRET}", f"a: [1\nhf_token: {SECRET}", f"HF_TOKEN={SECRET} python x.py"],
)
def test_what_cannot_be_read_comes_back_to_be_mended_and_without_secrets(operator: Client, text: str) -> None:
    answer = operator.post(reverse("deployment_import"), {"text": text})
    assert answer.status_code == 422
    page = answer.content.decode()
    assert "This cannot be read" in page
    assert SECRET not in page
    assert text_of(page).split()[0] == text.split(maxsplit=1)[0].replace(SECRET, "***")


def test_reading_leaves_nothing_behind(operator: Client) -> None:
    events = Event.objects.count()
    operator.post(reverse("deployment_import"), {"text": TWO})
    assert (Event.objects.count(), Deployment.objects.count()) == (events, 0)


@pytest.mark.parametrize("characters", [LONGEST + 1, 10_000_000])
def test_a_paste_that_is_too_long_is_refused_on_the_page_and_over_rest(
    operator: Client, characters: int
) -> None:
    text = "vllm serve m # " + "x" * characters
    rest = operator.post("/api/v1/deployments/import", {"text": text}, content_type="application/json")
    assert rest.json()["error"]["code"] == ("invalid" if characters < 1_000_000 else "too_large")
    for answer in (operator.post(reverse("deployment_import"), {"text": text}), rest):
        assert 400 <= answer.status_code < 500
        assert len(answer.content) < 4 * LONGEST + 200_000
