"""Whether MPS can be used is asked of its daemon, and told with what to do where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.probes import fake_mps, fake_tools
from workers.probes.accelerators import NO_MPS, AcceleratorProbe, Survey
from workers.probes.mps import MpsProbe, MpsState, read_complaint
from workers.probes.tools import Answer


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    fake_mps.install(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def survey(probe: MpsProbe) -> Survey:
    return AcceleratorProbe("n", environ={}, mps=probe).survey()


def test_daemon_that_answers_makes_a_node_ready(tools: Path, tmp_path: Path) -> None:
    fake_tools.install_nvidia(tools, "h100x8")
    probe = MpsProbe(tmp_path / "pipes", tmp_path / "logs")
    assert not survey(probe).mps.ready
    fake_mps.start_daemon(tmp_path / "pipes", servers="")
    assert survey(probe).mps == MpsState(ready=True)


def test_absent_daemon_is_told_with_the_command_that_starts_it(tools: Path, tmp_path: Path) -> None:
    fake_tools.install_nvidia(tools, "h100x8")
    probe = MpsProbe(tmp_path / "pipes", tmp_path / "logs")
    assert "nobody listens there" in survey(probe).mps.note
    fake_mps.start_daemon(tmp_path / "pipes")
    fake_mps.kill_daemon(tmp_path / "pipes")
    note = survey(probe).mps.note
    assert "Cannot find MPS control daemon process" in note
    assert f"CUDA_MPS_PIPE_DIRECTORY={tmp_path / 'pipes'}" in note
    assert note.endswith("nvidia-cuda-mps-control -d")


def test_slice_has_a_daemon_of_its_own(tools: Path, tmp_path: Path) -> None:
    fake_tools.install_nvidia(tools, "mig")
    probe = MpsProbe(tmp_path / "pipes", tmp_path / "logs")
    part = next(a for a in survey(probe).accelerators if a.parent_uuid)
    fake_mps.start_daemon(probe.folder_of(part.uuid))
    assert probe.look(part.uuid).ready
    assert not probe.look("MIG-another").ready
    assert not probe.look().ready
    assert survey(probe).mps.ready, "one of its slices can be shared"
    assert f"CUDA_VISIBLE_DEVICES={'MIG-another'}" in probe.look("MIG-another").note


@pytest.mark.usefixtures("tools")
def test_node_without_cuda_cards_is_not_asked(tmp_path: Path) -> None:
    fake_mps.start_daemon(tmp_path / "pipes")
    assert survey(MpsProbe(tmp_path / "pipes", tmp_path / "logs")).mps == NO_MPS


def test_program_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not on this host's PATH" in MpsProbe(tmp_path, tmp_path).look().note


@pytest.mark.parametrize(
    ("text", "problem", "complaint"),
    [
        ("4711\n4712\n", "", ""),
        ("", "", ""),
        ("Cannot find MPS control daemon process\n", "", "Cannot find MPS control daemon process"),
        (
            "",
            "it ended with 1: Cannot find MPS control daemon process",
            "Cannot find MPS control daemon process",
        ),
        ("", "it did not answer within 3 s", "it did not answer within 3 s"),
        (
            "An instance of this daemon is already running\n",
            "",
            "An instance of this daemon is already running",
        ),
    ],
)
def test_answers_are_read_as_what_they_say(text: str, problem: str, complaint: str) -> None:
    assert read_complaint(Answer(text, problem)) == complaint
