"""What people paste on the capacity page: whatever it is, a page comes back and says why not."""

from __future__ import annotations

import html

import pytest
from django.test import Client
from django.urls import reverse

LOAD = {"memory_gib": "80", "prompt_tokens": "384", "output_tokens": "128", "weights_gib": "1"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('{"model_type": "\\ud800"}', "which is no character"),
        ("[" * 20_000, "nested too deeply"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "no more than 10,000"),
    ],
)
def test_config_that_cannot_be_shown_or_counted_is_refused(viewer: Client, config: str, told: str) -> None:
    answer = viewer.get(reverse("capacity"), {**LOAD, "config": config, "replicas": "1"})
    assert answer.status_code == 200
    assert told in html.unescape(answer.content.decode())
