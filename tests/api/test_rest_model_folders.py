"""Folders that models are registered from: what of the control plane's machine never goes to nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.adapters.model_readings import ModelReadings
from exaserve_ops.api.ports import model_folder_reader
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.services.models import ModelFacts
from tests.api.conftest import JsonClient

pytestmark = pytest.mark.django_db


def post(client: JsonClient, folder: Path | str) -> tuple[int, str]:
    model_folder_reader.use(ModelReadings(ModelFolder(), wait_seconds=60))
    answer = client.post("/api/v1/models", {"name": "tiny", "folder": str(folder)})
    return answer.status_code, str(answer.json())


def test_a_folder_without_config_is_refused_before_anything_is_listed(
    operator: JsonClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, listed = os.scandir, []

    def scandir(path: Any) -> Any:
        listed.append(str(path))
        return real(path)

    (tmp_path / "sub").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    for folder in ("/", str(tmp_path)):
        status, told = post(operator, folder)
        assert (status, "holds no config.json" in told) == (400, True)
        assert folder not in listed


def test_what_cannot_be_read_is_bad_input_and_no_fault(
    operator: JsonClient, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    (model_folder / "closed").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    status, told = post(operator, model_folder)
    assert (status, "closed' cannot be read: Permission denied" in told) == (400, True)
    status, told = post(operator, model_folder / ("x" * 300))
    assert (status, "cannot be read" in told) == (400, True)
    assert not Model.objects.exists()


def test_hidden_files_stay_here_and_names_of_keys_and_endless_files_are_refused(model_folder: Path) -> None:
    before = ModelFolder().read(str(model_folder))
    (model_folder / ".env").write_text("TOKEN=1")
    (model_folder / ".git").mkdir()
    (model_folder / ".git" / "config").write_text("x")
    assert ModelFolder().read(str(model_folder)) == before
    for name in ("tls.pem", "server.KEY", "id_rsa", "identity.json"):
        (model_folder / name).write_text("key")
        with pytest.raises(InvalidInputError, match="name of a key"):
            ModelFolder().read(str(model_folder))
        (model_folder / name).unlink()
    (model_folder / "config.json").unlink()
    os.mkfifo(model_folder / "config.json")
    with pytest.raises(InvalidInputError, match=r"no config\.json"):
        ModelFolder().read(str(model_folder))


def test_the_products_own_secrets_are_never_in_a_model(model_folder: Path, tmp_path: Path) -> None:
    inside = model_folder / "var" / "secrets"
    (inside / "deeper").mkdir(parents=True)
    link = tmp_path / "innocent"
    link.symlink_to(inside)
    reader = ModelFolder(private=(inside,))
    for wrong in (model_folder, inside, inside / "deeper", link):
        with pytest.raises(InvalidInputError, match="own secrets"):
            reader.read(str(wrong))
    assert isinstance(ModelFolder(private=(tmp_path / "else",)).read(str(model_folder)), ModelFacts)
