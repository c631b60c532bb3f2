"""A real agent on a host with cards (played by programs on PATH) tells the control plane all of it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fakes.node import Node, make_home, wait_for
from tests.fakes.valkey import running_valkey
from tests.probes import fake_tools
from tests.probes.fake_tools import sample
from workers.probes.nvidia import parse_list
from workers.protocol import v1
from workers.protocol.machine import AcceleratorLoad


def test_hello_has_cards_links_and_notes_and_heartbeats_have_strangers(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    page = sample("h100x8.q.xml").replace("<gpu_temp>38 C", "<gpu_temp>ERR!", 1)
    uuids = [card.uuid for card in parse_list(sample("h100x8.L.txt"))]
    fake_tools.install_nvidia(tools, "h100x8", query=page, processes=f"{uuids[2]}, {os.getpid()}, 512\n")
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": f"{uuids[2]},{uuids[0]}"}
    with running_valkey(tmp_path) as valkey:
        node = Node(make_home(tmp_path / "home", valkey.url), valkey, env)
        node.start()
        try:
            hello = wait_for(lambda: _first_hello(node), "a hello")
            beat = wait_for(lambda: _first_with_stranger(node), "a stranger in a heartbeat")
            loads = wait_for(lambda: _first_loads(node), "loads of cards in a heartbeat")
        finally:
            node.close()
    assert [a.uuid for a in hello.accelerators] == [uuids[2], uuids[0]]
    assert [(a.kind, a.numa_node, a.pcie_width) for a in hello.accelerators] == [("cuda", 0, 16)] * 2
    assert hello.minor == v1.MINOR >= 1
    assert hello.topology is not None
    assert [end.name for end in hello.topology.endpoints[:8]] == uuids
    assert hello.probe_notes == (f"{uuids[0]} temperature: ERR!",)
    assert beat.unknown_processes[0].accelerator_uuid == uuids[2]
    assert {load.uuid for load in loads} == {uuids[0], uuids[2]}, "of its own cards alone"
    assert {load.uuid for load in loads if load.temperature_celsius is None} == {uuids[0]}
    assert beat.unknown_processes[0].memory_bytes == 512 << 20
    assert beat.unknown_processes[0].start_ticks > 0
    assert not beat.unknown_processes[0].left_over
    assert "somebody else started it" in beat.unknown_processes[0].origin


def _first_hello(node: Node) -> v1.Hello | None:
    return next((report for report in node.read() if isinstance(report, v1.Hello)), None)


def _first_loads(node: Node) -> tuple[AcceleratorLoad, ...]:
    beats = (report for report in node.read() if isinstance(report, v1.Heartbeat))
    return next((beat.accelerator_loads for beat in beats if beat.accelerator_loads), ())


def _first_with_stranger(node: Node) -> v1.Heartbeat | None:
    for report in node.read():
        if isinstance(report, v1.Heartbeat) and os.getpid() in [p.pid for p in report.unknown_processes]:
            return report
    return None
