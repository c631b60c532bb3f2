"""Large weights are hashed outside of requests: those are told how far that is, and come again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.adapters.model_readings import KEPT_SECONDS, ModelReadings
from exaserve_ops.api.ports import model_folder_reader
from exaserve_ops.dashboard import ports
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.services.models import FolderReading, ModelFacts
from tests.fakes.world import JsonClient, make_user

MODELS = "/api/v1/models"


class SlowFolder(ModelFolder):
    """A disk that gives each file's first bytes at once, and the rest when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.times_read = 0

    def read(self, folder: str, progress: Callable[[int], None] = lambda _bytes: None) -> ModelFacts:
        self.times_read += 1

        def slowly(read_bytes: int) -> None:
            progress(read_bytes)
            self.begun.set()
            assert self.go_on.wait(60)

        return super().read(folder, slowly)


@pytest.fixture
def disk() -> Iterator[SlowFolder]:
    disk = SlowFolder()
    yield disk
    disk.go_on.set()


def patient(disk: ModelFolder) -> ModelReadings:
    return ModelReadings(disk, wait_seconds=60)


def ready(disk: SlowFolder, folder: Path, readings: ModelReadings) -> None:
    """Wait until somebody who asks again is answered with the facts."""
    disk.go_on.set()
    for _ in range(600):
        if isinstance(readings.read(str(folder)), ModelFacts):
            return
    raise AssertionError("the folder was not read in a minute")


def test_a_request_for_a_large_folder_is_told_how_far_it_is(disk: SlowFolder, model_folder: Path) -> None:
    readings = ModelReadings(disk, wait_seconds=0.1)
    first = readings.read(str(model_folder))
    assert isinstance(first, FolderReading)
    assert first.total_bytes == sum(file.stat().st_size for file in model_folder.iterdir())
    assert disk.begun.wait(60)
    again = readings.read(str(model_folder))
    assert isinstance(again, FolderReading)
    assert 0 < again.read_ratio < 1
    ready(disk, model_folder, readings)
    assert disk.times_read == 1, "who asks again joins the reading that is under way"


def test_what_was_read_is_kept_until_the_files_change_or_time_has_passed(
    disk: SlowFolder, model_folder: Path
) -> None:
    disk.go_on.set()
    now = [0.0]
    readings = ModelReadings(disk, wait_seconds=60, monotonic=lambda: now[0])
    before = readings.read(str(model_folder))
    assert readings.read(str(model_folder)) == before
    assert disk.times_read == 1
    (model_folder / "tokenizer.json").write_text('{"another": 1}')
    after = readings.read(str(model_folder))
    assert isinstance(after, ModelFacts)
    assert after != before
    now[0] += KEPT_SECONDS + 1
    readings.read(str(model_folder))
    assert disk.times_read == 3


def test_a_folder_without_a_model_is_refused_and_looked_at_anew_when_it_has_one(
    model_folder: Path,
) -> None:
    readings = patient(ModelFolder())
    config = (model_folder / "config.json").read_text()
    (model_folder / "config.json").unlink()
    with pytest.raises(InvalidInputError, match="holds no config"):
        readings.read(str(model_folder))
    (model_folder / "config.json").write_text(config)
    assert isinstance(readings.read(str(model_folder)), ModelFacts)
    with pytest.raises(InvalidInputError, match="give the absolute path"):
        readings.read("relative/folder")


def test_post_answers_202_with_progress_and_201_when_it_is_sent_again(
    operator: JsonClient, disk: SlowFolder, model_folder: Path
) -> None:
    readings = ModelReadings(disk, wait_seconds=0.1)
    model_folder_reader.use(readings)
    body = {"name": "large", "folder": str(model_folder)}
    begun = operator.post(MODELS, body, HTTP_IDEMPOTENCY_KEY="one")
    assert begun.status_code == 202, begun.content
    assert begun["Retry-After"] == "1"
    assert set(begun.json()) == {"read_bytes", "total_bytes", "read_ratio"}
    assert not Model.objects.exists()
    ready(disk, model_folder, readings)
    made = operator.post(MODELS, body, HTTP_IDEMPOTENCY_KEY="one")
    assert made.status_code == 201, made.content
    replayed = operator.post(MODELS, body, HTTP_IDEMPOTENCY_KEY="one")
    assert (replayed.status_code, replayed["Idempotency-Replayed"]) == (201, "true")
    assert Model.objects.get().name == "large"


@pytest.mark.django_db
def test_the_page_shows_how_far_it_is_and_asks_again_with_the_same_form(
    disk: SlowFolder, model_folder: Path
) -> None:
    readings = ModelReadings(disk, wait_seconds=0.1)
    ports.model_folder_reader.use(readings)
    browser = Client()
    browser.force_login(make_user("olga", "operator"))
    form = {"name": "large", "path": str(model_folder)}
    page = browser.post(reverse("model_new"), form)
    assert page.status_code == 202
    text = page.content.decode()
    assert "are read and hashed" in text
    assert "data-again" in text
    assert f'name="path" value="{model_folder}"' in text
    ready(disk, model_folder, readings)
    done = browser.post(reverse("model_new"), form)
    assert done["Location"] == reverse("model", args=[Model.objects.get().pk])
