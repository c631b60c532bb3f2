"""The agent's watches: a Hello only for what others were told, and strangers and strays told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.probes import fake_tools
from tests.probes.fake_tools import SAMPLES, sample
from workers.agent.foreign import ForeignWatch, Places, find_misplaced
from workers.agent.hardware import HardwareWatch
from workers.probes.accelerators import AcceleratorProbe, Survey
from workers.probes.devices import AcceleratorProcess
from workers.protocol import names

NODE = "n1"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def probe() -> AcceleratorProbe:
    return AcceleratorProbe(NODE, environ={})


def test_only_a_change_that_others_were_told_is_said_again(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "h100x8")
    told: list[Survey] = []
    watch = HardwareWatch(probe(), told.append)
    warm = sample("h100x8.q.xml").replace("<gpu_temp>38 C", "<gpu_temp>71 C")
    fake_tools.install_nvidia(tools, "h100x8", query=warm)
    assert not watch.look()
    assert {device.temperature_celsius for device in watch.survey.devices} == {71.0}
    fake_tools.install_nvidia(tools, "mig")
    assert watch.look()
    assert [[a.profile for a in survey.accelerators] for survey in told] == [["3g.20gb", "2g.10gb", "1g.5gb"]]


def test_tool_that_dies_is_told_once_and_the_cards_stay(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "h100x8")
    told: list[Survey] = []
    watch = HardwareWatch(probe(), told.append)
    fake_tools.install(tools, "nvidia-smi", {}, otherwise="exit 9")
    assert [watch.look(), watch.look()] == [True, False]
    assert len(told[0].accelerators) == 8
    assert told[0].notes == ("nvidia-smi ended with 9: ",)


def foreign_watch(places: Places, said: list[None]) -> ForeignWatch:
    return ForeignWatch(
        NODE,
        probe(),
        dict,
        lambda: places,
        on_misplaced=lambda: said.append(None),
        describe=lambda found: found,
    )


def test_stranger_is_reported_and_own_replica_is_not(tools: Path) -> None:
    labels = {names.ENV_REPLICA: "r1", names.ENV_NODE: NODE, names.ENV_ATTEMPT: "1"}
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=labels, text=True
    ) as own:
        page = f"GPU-a, {own.pid}, 1024\nGPU-a, {os.getpid()}, 2048\nGPU-a, 4194303, [N/A]\n"
        fake_tools.install_nvidia(tools, "mixed", processes=page)
        said: list[None] = []
        watch = foreign_watch(Places({"r1": ("GPU-b",)}, {}), said)
        found = watch.look()
        assert [(p.pid, p.memory_bytes) for p in found] == [(os.getpid(), 2048 << 20), (4194303, 0)]
        assert (watch.misplaced, said) == ((), [])  # once is no proof
        watch.look()
        assert watch.misplaced == (f"replica r1 (pid {own.pid}) holds memory of GPU-a, not of GPU-b",)
        watch.look()
        assert len(said) == 1
        own.communicate("\n")


def test_replica_is_in_place_on_its_card_or_on_the_card_of_its_slice() -> None:
    processes = [
        AcceleratorProcess("GPU-a", 1),
        AcceleratorProcess("GPU-a", 2),
        AcceleratorProcess("GPU-a", 3),
    ]
    places = Places({"r1": ("MIG-x",), "r2": ("CPU-n1",)}, {"MIG-x": "GPU-a"})
    (sentence,) = find_misplaced(processes, {1: "r1", 2: "r2", 3: "gone"}, places)
    assert "replica r2" in sentence


def test_every_sample_is_used() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    kinds = {path.name.split(".")[0] for path in SAMPLES.iterdir()}
    assert {kind for kind in kinds if kind not in text} == set()
