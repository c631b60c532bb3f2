"""A verdict over a model's files holds for as long as the files look the same."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from workers.agent.facts import ModelCheck
from workers.agent.journal import Journal
from workers.agent.model_files import ModelVerifier
from workers.protocol.wish import ModelFile, ModelRef

CONTENT = b"weights" * 1000


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def model(weights: Path) -> ModelRef:
    file = ModelFile(path=weights.name, size_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    return ModelRef(name="m", digest="sha256:m", source=weights.parent.as_uri(), files=(file,))


class Verifying:
    """A verifier whose verdicts are waited for."""

    def __init__(self, folder: Path) -> None:
        self._told = threading.Event()
        self.verifier = ModelVerifier(Journal(folder / "journal.sqlite3"), on_verdict=self._told.set)

    def check(self, model: ModelRef) -> tuple[ModelCheck, str]:
        assert self.verifier.verdict(model, 1)[0] is ModelCheck.UNKNOWN
        self._told.clear()
        self.verifier.start(model, 1)
        assert self._told.wait(10)
        return self.verifier.verdict(model, 1)


@pytest.fixture
def verifying(tmp_path: Path) -> Verifying:
    return Verifying(tmp_path)


def swap(path: Path, content: bytes) -> None:
    """Put other bytes of the same size in place, a moment later."""
    times = path.stat()
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def test_files_that_change_after_the_check_are_checked_again(
    verifying: Verifying, model: ModelRef, weights: Path
) -> None:
    assert verifying.check(model) == (ModelCheck.GOOD, "")
    swap(weights, b"Weights" * 1000)
    check, reason = verifying.check(model)
    assert check is ModelCheck.BAD
    assert "SHA-256" in reason


def test_files_that_are_mended_are_good_again(verifying: Verifying, model: ModelRef, weights: Path) -> None:
    weights.write_bytes(b"half")
    assert verifying.check(model)[0] is ModelCheck.BAD
    weights.write_bytes(CONTENT)
    assert verifying.check(model) == (ModelCheck.GOOD, "")


def test_missing_file_is_a_verdict_until_it_comes(
    verifying: Verifying, model: ModelRef, weights: Path
) -> None:
    weights.unlink()
    assert verifying.check(model)[0] is ModelCheck.BAD
    assert verifying.verifier.verdict(model, 1)[0] is ModelCheck.BAD
    weights.write_bytes(CONTENT)
    assert verifying.check(model) == (ModelCheck.GOOD, "")
