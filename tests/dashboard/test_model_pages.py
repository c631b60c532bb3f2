"""Pages of models."""

from __future__ import annotations

from typing import Any

from django.test import Client
from django.urls import reverse

from exaserve_ops.serving.models import Model


def test_registering_a_folder_without_a_model_says_what_is_missing(operator: Client, tmp_path: Any) -> None:
    answer = operator.post(reverse("model_new"), {"name": "x", "path": str(tmp_path)})
    assert answer.status_code == 422
    assert "config.json" in answer.content.decode()
    assert not Model.objects.exists()
