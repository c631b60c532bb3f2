from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from workers.agent.device_env import DEVICE_VARIABLES
from workers.engines.base import EngineOptions, LaunchContext, NodeRank, SharesDeviceMemory
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
        ("torch", {"pipeline_stages": 0}, "pipeline_stages must be from 1 to 64"),
        (
            "torch",
            {"pipeline_stages": 2, "kv_host_bytes": 1 << 20},
            "kv_host_bytes asks for KV below the blocks",
        ),
        ("torch", {"pipeline_stages": 2, "kv_disk_bytes": 1 << 20}, "leave out it or pipeline_stages"),
        ("torch", {"pipeline_stages": 2, "kv_min_blocks": 8}, "needs all layers in one process"),
        ("torch", {"pipeline_stages": 2, "kv_pool": "node"}, "kv_pool asks for the node's pool"),
        ("torch", {"extra_arguments": "--stage 1"}, "may not hold --stage: the agent decides that"),
        ("torch", {"extra_arguments": "--rendezvous=a:1"}, "may not hold --rendezvous"),
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


def test_each_member_of_a_replica_gets_its_stage_and_the_key_by_environment() -> None:
    for number in range(2):
        rank = NodeRank(number, 2, "10.0.0.7", 41_001, key="xg-of-this-start")
        context = replace(CONTEXT, rank=rank, start_seconds=7200.0)
        launch = ENGINES["torch"].build_launch({"pipeline_stages": 2}, context)
        assert "--join-seconds=7200.0" in launch.argv  # as long as the agent itself has patience
        assert f"--stage={number}" in launch.argv
        assert "--pipeline-stages=2" in launch.argv
        assert "--rendezvous=10.0.0.7:41001" in launch.argv
        assert launch.env["EXAOPS_GANG_KEY"] == "xg-of-this-start"
        assert "xg-of-this-start" not in " ".join(launch.argv)
        assert "xg-of-this-start" not in repr(rank)


@pytest.mark.parametrize(
    ("stages", "nodes", "message"),
    [
        (2, 1, "pipeline_stages 2 takes as many nodes, and this replica has 1"),
        (1, 2, "pipeline_stages 1 takes as many nodes, and this replica has 2"),
        (3, 2, "pipeline_stages 3 takes as many nodes, and this replica has 2"),
    ],
)
def test_there_are_as_many_stages_as_nodes(stages: int, nodes: int, message: str) -> None:
    rank = None if nodes == 1 else NodeRank(0, nodes, "10.0.0.7", 41_001, key="k")
    with pytest.raises(EngineOptionError, match=message):
        ENGINES["torch"].build_launch({"pipeline_stages": stages}, replace(CONTEXT, rank=rank))


def test_stages_share_weights_of_a_node_but_never_blocks() -> None:
    adapter = ENGINES["torch"]
    assert isinstance(adapter, SharesDeviceMemory)
    assert adapter.shares_device_memory({"pipeline_stages": 2})
    assert not adapter.shares_device_memory({"pipeline_stages": 2, "weights": "private"})
