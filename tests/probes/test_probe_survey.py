"""What a node offers, asked of real programs on PATH that answer as the vendors' tools do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.probes import fake_tools
from tests.probes.fake_tools import SAMPLES, sample
from workers.probes.accelerators import AcceleratorProbe, settle
from workers.probes.tools import VendorTool

NODE = "11111111-2222-4333-8444-555555555555"
CPU = f"CPU-{NODE}"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def probe(**environ: str) -> AcceleratorProbe:
    return AcceleratorProbe(NODE, environ=environ)


def test_node_without_tools_offers_its_cpu(tools: Path) -> None:
    assert not list(tools.iterdir())
    survey = probe().survey()
    assert [a.uuid for a in survey.accelerators] == [CPU]
    assert (survey.topology, survey.notes, survey.complete) == (None, (), True)


def test_eight_cards_with_topology_and_numa(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "h100x8")
    survey = probe().survey()
    assert [(a.kind, a.ordinal, a.numa_node) for a in survey.accelerators] == [
        ("cuda", i, i // 4) for i in range(8)
    ]
    assert survey.accelerators[0].pcie_generation == 5
    assert survey.topology is not None
    assert len(survey.topology.endpoints) == 16
    best = min((link for link in survey.topology.links if link.a == 2), key=lambda link: link.rank)
    assert best.kind == "NV18"
    assert (survey.notes, survey.complete) == ((), True)


def test_slices_are_offered_in_place_of_their_card(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "mig")
    survey = probe().survey()
    assert [(a.kind, a.profile) for a in survey.accelerators] == [
        ("cuda", "3g.20gb"), ("cuda", "2g.10gb"), ("cuda", "1g.5gb"),
    ]  # fmt: skip
    assert {a.numa_node for a in survey.accelerators} == {3}
    assert {a.parent_uuid for a in survey.accelerators} == {survey.devices[0].uuid}


def test_ill_card_offers_no_memory_and_says_so(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "fallen")
    healthy, ill = probe().survey().accelerators
    assert (healthy.memory_bytes, healthy.unreadable) == (46068 << 20, ())
    assert (ill.memory_bytes, ill.unreadable) == (0, ("memory_bytes",))
    notes = probe().survey().notes
    assert "GPU 0000:DB:00.0: GPU is lost" in notes
    assert f"{ill.uuid} memory: [Unknown Error]" in notes


def test_query_that_fails_is_made_up_for_by_columns(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "mixed", query="segmentation fault", columns=SAMPLES / "mixed.query.csv")
    survey = probe().survey()
    assert [a.memory_bytes >> 20 for a in survey.accelerators] == [15109, 40536]
    assert [a.numa_node for a in survey.accelerators] == [0, 1]


@pytest.mark.parametrize(
    ("value", "names"),
    [("", [CPU]), ("-1", [CPU]), ("GPU-af7b61d8", ["Tesla T4"]), ("GPU-af7b6200", ["NVIDIA A100-PCIE-40GB"])],
)
def test_only_visible_cards_are_offered(tools: Path, value: str, names: list[str]) -> None:
    fake_tools.install_nvidia(tools, "mixed")
    found = probe(CUDA_VISIBLE_DEVICES=value).survey().accelerators
    assert [a.uuid if a.kind == "cpu" else a.name for a in found] == names


def test_selection_that_cannot_be_followed_offers_no_card_and_says_why(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "mixed")
    survey = probe(CUDA_VISIBLE_DEVICES="GPU-af7b6").survey()
    assert [a.kind for a in survey.accelerators] == ["cpu"]
    assert "ambiguous" in survey.notes[0]


def test_amd_and_intel_cards_get_names_that_no_other_host_has(tools: Path) -> None:
    rocm = "--showuniqueid --showmeminfo vram --showproductname --showbus --json"
    fake_tools.install(tools, "rocm-smi", {rocm: SAMPLES / "radeon.rocm.json"})
    fake_tools.install(
        tools,
        "xpu-smi",
        {
            "discovery -j": SAMPLES / "max1550.list.json",
            "discovery -d 0 -j": SAMPLES / "max1550.detail0.json",
            "stats -d 0 -j": SAMPLES / "max1550.stats0.json",
            "ps -j": SAMPLES / "max1550.ps.json",
        },
    )
    asked = probe()
    radeon, first, second = asked.survey().accelerators
    assert (radeon.kind, radeon.uuid) == ("rocm", f"ROCM-{NODE}-0000:03:00.0")
    assert (first.kind, first.uuid) == ("xpu", f"XPU-{NODE}-00000000-0000-0029-0000-002f0bd58086")
    assert len(first.uuid) <= 80
    assert (second.memory_bytes, second.unreadable) == (0, ("memory_bytes",))
    assert [(p.accelerator_uuid, p.pid) for p in asked.processes()] == [(first.uuid, 606)]
    memory = probe().memory()
    assert set(memory) == {radeon.uuid, first.uuid}, "one whose tool does not say is not guessed"
    assert memory[first.uuid].total_bytes == first.memory_bytes


def test_amd_smi_is_asked_first_and_tells_processes(tools: Path) -> None:
    fake_tools.install(
        tools,
        "amd-smi",
        {
            "static --json": SAMPLES / "mi300x.amd-static.json",
            "metric --json": SAMPLES / "mi300x.amd-metric.json",
            "process --json": SAMPLES / "mi300x.amd-process.json",
        },
    )
    asked = probe()
    assert [a.uuid for a in asked.survey().accelerators] == [
        "GPU-5a11c0de00000001", f"ROCM-{NODE}-0000:22:00.0",
    ]  # fmt: skip
    assert [(p.accelerator_uuid, p.pid) for p in asked.processes()] == [("GPU-5a11c0de00000001", 31337)]
    devices = {d.uuid: d for d in asked.survey().devices}
    memory = probe().memory()
    assert {uuid: m.used_bytes for uuid, m in memory.items()} == {
        uuid: d.memory_used_bytes for uuid, d in devices.items() if d.memory_used_bytes is not None
    }
    assert memory


def test_missing_driver_leaves_the_cpu_and_is_said(tools: Path) -> None:
    page = sample("driver_missing.txt")
    fake_tools.install(tools, "nvidia-smi", {}, otherwise=f'echo "{page.strip()}"; exit 9')
    survey = probe().survey()
    assert ([a.uuid for a in survey.accelerators], survey.complete) == ([CPU], False)
    assert any(note.startswith("NVIDIA-SMI has failed") for note in survey.notes)


def test_tool_that_stops_answering_takes_no_card_away(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "h100x8")
    asked = probe()
    before = asked.survey()
    fake_tools.install(tools, "nvidia-smi", {}, otherwise="exit 9")
    after = settle(before, asked.survey())
    assert after.accelerators == before.accelerators
    assert after.notes == ("nvidia-smi ended with 9: ",)
    fake_tools.install(tools, "nvidia-smi", {"-L": "No devices were found"}, otherwise="exit 6")
    assert [a.uuid for a in settle(after, asked.survey()).accelerators] == [CPU]


def test_hanging_tool_is_given_up_and_its_process_ended(tools: Path) -> None:
    pid_file = tools / "pid"
    fake_tools.install(
        tools, "vendor", {}, otherwise=f"echo $$ > '{pid_file}'; while :; do read -r x < '{tools}/fifo'; done"
    )
    os.mkfifo(tools / "fifo")
    tool = VendorTool("vendor", timeout_seconds=0.5)
    answer = tool.ask()
    assert (answer.good, answer.text) == (False, "")
    assert "did not answer within 0.5 s" in answer.problem
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIGCONT)


def test_tool_that_still_hangs_is_not_started_again(tools: Path) -> None:
    fake_tools.install(tools, "vendor", {"now": "here"})
    tool = VendorTool("vendor")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as stuck:
        tool._stuck = stuck  # no test can make a process that SIGKILL does not end
        assert tool.ask("now").problem == f"vendor still hangs (pid {stuck.pid})"
        stuck.communicate("\n")
    assert tool.ask("now").text == "here"


def test_probes_never_import_torch() -> None:
    code = "import sys, workers.agent.agent, workers.probes.accelerators; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_memory_in_use_is_read_of_cards_and_of_slices(tools: Path) -> None:
    fake_tools.install_nvidia(tools, "mixed", columns=sample("mixed.query.csv"))
    surveyed = {d.uuid: d.memory_used_bytes for d in probe().survey().devices}
    seen = probe().memory()
    assert seen
    assert {uuid: card.used_bytes for uuid, card in seen.items()} == {uuid: surveyed[uuid] for uuid in seen}
    fake_tools.install_nvidia(tools, "mig")
    slices = [d for d in probe().survey().devices if d.parent_uuid]
    memory = probe().memory()
    assert {d.uuid: (d.memory_bytes, d.memory_used_bytes) for d in slices} == {
        d.uuid: (memory[d.uuid].total_bytes, memory[d.uuid].used_bytes) for d in slices
    }
    fake_tools.install(tools, "nvidia-smi", {}, otherwise="exit 9")
    assert probe().memory() == {}
