"""The agent's sources of loads: a page that goes away, a library that hangs, and which cards are ours."""

from __future__ import annotations

import http.server
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes import nvml_library
from workers.agent import accelerator_loads, nvml_child
from workers.agent.accelerator_loads import AcceleratorLoads
from workers.agent.config import AgentConfig, ConfigError
from workers.agent.nvml_child import NvmlChild
from workers.probes.accelerators import Survey, accelerator_info
from workers.probes.devices import Device

FAKE = (sys.executable, str(Path(nvml_library.__file__)))


def survey(*uuids: str, kind: str = "cuda") -> Survey:
    devices = tuple(Device(uuid, kind, ordinal=n, power_watts=9.0) for n, uuid in enumerate(uuids))
    of_others = Device("GPU-of-others", kind, ordinal=99)
    return Survey(tuple(map(accelerator_info, devices)), devices=(*devices, of_others))


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


class Exporter(http.server.ThreadingHTTPServer):
    """A page on loopback that a test sets."""

    status = 200
    page = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ExporterAnswer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/metrics"


class ExporterAnswer(http.server.BaseHTTPRequestHandler):
    server: Exporter

    def do_GET(self) -> None:
        body = self.server.page.encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    server = Exporter()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def temperature(uuid: str, celsius: int) -> str:
    return f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="{uuid}"}} {celsius}\n'


def test_page_is_believed_until_it_is_stale_and_only_for_our_cards(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.page = temperature("GPU-1", 70) + temperature("GPU-of-others", 71)
    loads = AcceleratorLoads(lambda: survey("GPU-1", kind="rocm"), dcgm_url=exporter.url)
    loads.look()
    (seen,) = loads.read()
    assert (seen.uuid, seen.temperature_celsius, seen.power_watts) == ("GPU-1", 70.0, 9.0)
    assert seen.sources == ("dcgm", "amd-smi")
    exporter.status = 503
    loads.look()
    (seen,) = loads.read()
    assert seen.temperature_celsius == 70.0, "one answer that fails is not a card without a temperature"
    monkeypatch.setattr(accelerator_loads, "_STALE_SECONDS", 0.0)
    loads.look()
    assert [(load.temperature_celsius, load.sources) for load in loads.read()] == [(None, ("amd-smi",))]


@pytest.mark.parametrize("page", ["", "<html></html>", "x" * (accelerator_loads._MOST_PAGE_BYTES + 1)])
def test_page_that_is_none_leaves_what_others_tell(exporter: Exporter, page: str) -> None:
    exporter.page = page
    loads = AcceleratorLoads(lambda: survey("GPU-1", kind="rocm"), dcgm_url=exporter.url)
    loads.look()
    assert [load.sources for load in loads.read()] == [("amd-smi",)]


def test_card_that_is_cut_into_slices_is_told_of_as_a_whole() -> None:
    card = Device("GPU-1", "cuda", split=True, power_watts=9.0)
    piece = Device("MIG-1", "cuda", parent_uuid="GPU-1", profile="3g.40gb", power_watts=1.0)
    found = Survey((accelerator_info(piece),), devices=(card, piece))
    loads = AcceleratorLoads(lambda: found, nvml=NvmlChild(1.0, (sys.executable, "-c", "")))
    loads.look()
    assert [(load.uuid, load.power_watts) for load in loads.read()] == [("GPU-1", 9.0)]
    loads.stop()


def test_library_is_asked_in_a_process_that_ends_with_its_agent() -> None:
    child = NvmlChild(0.05, (*FAKE, "2"))
    loads = AcceleratorLoads(lambda: survey("GPU-0", "GPU-1"), nvml=child, interval_seconds=0.05)
    loads.start()
    wait_until(lambda: [load.sources for load in loads.read()] == [("nvml",)] * 2)
    assert [load.used_ratio for load in loads.read()] == [0.4, 0.4]
    process = child._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does when the agent is gone
    assert process.wait(30) == 0
    loads.stop()


def test_library_that_hangs_is_ended_and_the_survey_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    child = NvmlChild(0.05, (*FAKE, "hang"))
    loads = AcceleratorLoads(lambda: survey("GPU-0"), nvml=child)
    loads.look()
    process = child._process
    assert process is not None
    assert process.poll() is None
    monkeypatch.setattr(nvml_child, "SILENT_SECONDS", 0.0)
    loads.look()
    assert process.wait(30) < 0
    assert [load.sources for load in loads.read()] == [("nvidia-smi",)]
    loads.stop()


def test_process_that_does_not_even_die_is_killed_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Held in the kernel by its driver it stays for hours, and is looked at each few seconds."""

    class Undying(subprocess.Popen[bytes]):
        kills = 0

        def kill(self) -> None:
            self.kills += 1

    monkeypatch.setattr(subprocess, "Popen", Undying)
    monkeypatch.setattr(nvml_child, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(nvml_child, "_PAUSE_SECONDS", 0.0)
    child = NvmlChild(0.05, (*FAKE, "hang"))
    for _ in range(2):
        child.check()
        process = child._process
        assert isinstance(process, Undying)
        for _ in range(5):
            child.check()
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) < 0
        assert child._process is process
        assert process.kills == 1
    assert caplog.text.count("event=nvml_silent") == 2, "once for each of the two"
    child.stop()


def test_node_without_such_cards_starts_nothing() -> None:
    child = NvmlChild(0.05, (*FAKE, "2"))
    loads = AcceleratorLoads(lambda: survey("xpu-1", kind="xpu"), nvml=child)
    loads.look()
    assert child._process is None
    assert [load.sources for load in loads.read()] == [("xpu-smi",)]


def test_node_without_the_library_asks_for_it_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    child = NvmlChild(0.05, (sys.executable, "-c", "raise SystemExit(1)"))
    child.check()
    first = child._process
    assert first is not None
    assert first.wait(60) == 1
    child.check()
    assert child._process is first, "not again at once"
    monkeypatch.setattr(nvml_child, "_PAUSE_SECONDS", 0.0)
    child.check()
    assert child._process is not first
    child.stop()
    last = child._process
    child.check()
    assert child._process is last, "nothing is started once it is stopped"


@pytest.mark.parametrize(
    "url", ["http://10.0.0.7:9400/metrics", "https://127.0.0.1/x", "127.0.0.1:9400", "http://[::1", "file:///etc"]
)  # fmt: skip
def test_page_must_be_on_this_host(url: str) -> None:
    with pytest.raises(ConfigError, match="dcgm_url"):
        AgentConfig(dcgm_url=url).checked()
    for good in (
        "http://127.0.0.1:9400/metrics",
        "http://localhost:9400/metrics",
        "http://[::1]:9400/metrics",
    ):
        assert AgentConfig(dcgm_url=good).checked().dcgm_url == good
