from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from workers.agent.device_env import DEVICE_VARIABLES
from workers.engines.base import EngineOptions, LaunchContext
from workers.engines.registry import ENGINES
from workers.protocol.engines.kinds import EngineOptionError

CONTEXT = LaunchContext(
    replica_id="r1",
    attempt=2,
    served_model_name="my model; rm -rf /",
    model_dir=Path("/models/a b"),
    host="127.0.0.1",
    ports=(8123,),
    api_key="secret-key",
    runtime_dir=Path("/run/r1"),
    cpu_threads=2,
)


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("torch", {"quantization": "awq"}, "unknown option quantization; this engine knows .*num_blocks"),
        ("torch", {"num_blocks": 0}, "num_blocks must be from 1 to"),
        ("torch", {"num_blocks": "64"}, "num_blocks must be a whole number"),
        ("torch", {"num_blocks": True}, "num_blocks must be a whole number"),
        ("torch", {"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ("torch", {"extra_arguments": 'unclosed "'}, "extra_arguments cannot be split"),
        ("torch", {"extra_arguments": 5}, "extra_arguments must be text"),
        ("torch", {"extra_arguments": "--host=0.0.0.0"}, "may not hold --host: the agent decides that"),
        ("torch", {"extra_arguments": "--por 1 --x"}, "may not hold --por"),
        ("simulated", {"extra_arguments": "--model-dir /etc"}, "may not hold --model-dir"),
        ("torch", {"extra_arguments": "--api-key abc"}, r"may not hold a secret \(api-key\)"),
        ("simulated", {"ttft_ms": -1}, "ttft_ms must be from 0"),
        ("simulated", {"ttft_ms": "fast"}, "ttft_ms must be a number"),
        ("simulated", {"jitter_ratio": 2}, "jitter_ratio must be from 0 to 1"),
        ("simulated", {"hang": "yes"}, "hang must be true or false"),
    ],
)
def test_bad_option_is_named_with_what_would_be_right(
    engine: str, options: EngineOptions, message: str
) -> None:
    with pytest.raises(EngineOptionError, match=message):
        ENGINES[engine].check_options(options)
    with pytest.raises(EngineOptionError, match=message):
        ENGINES[engine].build_launch(options, CONTEXT)


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_key_and_agents_environment_stay_out_of_the_launch(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    launch = ENGINES[engine].build_launch({}, CONTEXT)
    assert not [part for part in launch.argv if "secret" in part]
    assert launch.env["EXAOPS_ENGINE_API_KEY"] == "secret-key"
    assert launch.env["HOME"] == launch.env["TMPDIR"] == "/run/r1"
    assert launch.env["PATH"] == os.environ["PATH"]
    assert set(launch.env) <= {
        "PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS",
        "EXAOPS_ENGINE_API_KEY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY",
    }  # fmt: skip


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_every_value_is_one_argument_whatever_it_holds(engine: str) -> None:
    launch = ENGINES[engine].build_launch({}, CONTEXT)
    assert "--served-model-name=my model; rm -rf /" in launch.argv
    assert "--model-dir=/models/a b" in launch.argv


def test_adapters_leave_it_to_the_agent_which_devices_an_engine_sees() -> None:
    context = replace(CONTEXT, accelerator_kind="cuda", accelerator_uuids=("GPU-aa", "GPU-bb"))
    launch = ENGINES["torch"].build_launch({}, context)
    assert not DEVICE_VARIABLES & launch.env.keys()
    assert "--device=cpu" not in launch.argv


def test_replica_budget_reaches_the_engine() -> None:
    launch = ENGINES["torch"].build_launch({}, replace(CONTEXT, memory_bytes=1 << 30))
    assert f"--memory-bytes={1 << 30}" in launch.argv
    assert not [part for part in ENGINES["torch"].build_launch({}, CONTEXT).argv if "memory" in part]


def test_options_become_flags_and_extra_arguments_come_last() -> None:
    launch = ENGINES["torch"].build_launch(
        {"num_blocks": 64, "extra_arguments": "--flag 'two words'"}, CONTEXT
    )
    assert "--num-blocks=64" in launch.argv
    assert "--threads=2" in launch.argv
    assert "--device=cpu" in launch.argv
    assert launch.argv[-2:] == ("--flag", "two words")


def test_switch_is_a_flag_only_when_on() -> None:
    build = ENGINES["simulated"].build_launch
    assert "--hang" in build({"hang": True}, CONTEXT).argv
    assert "--hang" not in build({"hang": False}, CONTEXT).argv


def test_what_attention_was_compiled_to_is_kept_for_the_next_launch_where_there_is_a_place() -> None:
    caches = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert not caches & ENGINES["torch"].build_launch({}, CONTEXT).env.keys()
    kept = replace(CONTEXT, engine_cache=Path("/home/engine-cache/torch"))
    env = ENGINES["torch"].build_launch({}, kept).env
    assert {env[name] for name in caches} == {
        "/home/engine-cache/torch/inductor",
        "/home/engine-cache/torch/triton",
    }
