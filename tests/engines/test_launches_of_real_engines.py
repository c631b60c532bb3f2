"""What vLLM and SGLang are started with: no deployment decides where they listen or what they serve."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.launch_forms import FORMS, MODEL, VLLM_CPU, Form, context_for, context_of, launch_of
from workers.engines.base import EngineInstall, EngineOptions, EngineRequest, Launch, NodeRank
from workers.engines.endpoints import Endpoint, find_endpoint
from workers.engines.foreign_launch import first_ports
from workers.engines.registry import ENGINES
from workers.engines.sglang.adapter import SglangAdapter
from workers.engines.vllm.adapter import VllmAdapter
from workers.kv.tiers import heat
from workers.protocol.engines import own
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.option import EngineOption, EngineTable, read_version
from workers.protocol.engines.session_moves import kv_shape, session_moves
from workers.protocol.engines.tables import TABLES

VLLM = VllmAdapter(EngineInstall(Path("/venv/bin/python"), "0.33.0"))
OLD_VLLM = VllmAdapter(EngineInstall(Path("/venv/bin/python"), "0.10.1"))
SGLANG = SglangAdapter(EngineInstall(Path("/venv/bin/python"), "0.5.23"))
ADAPTERS = {"vllm": VLLM, "old vllm": OLD_VLLM, "sglang": SGLANG}


def flags(launch: Launch) -> dict[str, str]:
    words = (argument.partition("=") for argument in launch.argv[3:])
    return {name: value for name, _, value in words}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_port_that_a_launch_names_is_a_leased_one(form: Form) -> None:
    launch, context = launch_of(form), context_of(form)
    text = " ".join([*launch.argv, *launch.env.values()])
    named = {int(port) for port in re.findall(r"(?<=[:=])4\d{4}\b|(?<= )4\d{4}\b", text)}
    elsewhere = {context.rank.master_port} if context.rank else set()
    assert named - elsewhere <= set(context.ports)
    assert named >= elsewhere
    first = first_ports(form.adapter.port_blocks(form.options), context.ports)
    met_elsewhere = {"rendezvous"} if context.rank else set()
    assert named >= {port for purpose, port in first.items() if purpose not in met_elsewhere}


@pytest.mark.parametrize("adapter", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_neither_the_key_nor_the_agents_own_environment_reaches_a_command_line(
    adapter: VllmAdapter | SglangAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    launch = adapter.build_launch({}, context_for(adapter))
    assert "the-key" not in " ".join(launch.argv)
    assert "the-key" in launch.env.values()
    assert "DATABASE_URL" not in launch.env
    assert launch.env["HF_HUB_OFFLINE"] == "1"
    assert launch.env["PYTHONHASHSEED"] == "0"


def test_a_name_with_blanks_and_semicolons_stays_one_argument() -> None:
    launch = VLLM.build_launch({}, replace(context_for(VLLM), served_model_name="a b; rm -rf /"))
    assert "--served-model-name=a b; rm -rf /" in launch.argv
    assert "--enable-prompt-tokens-details" in launch.argv


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("vllm", {"swap_space": 4}, r"swap_space is gone since version 0\.18.*kv_offloading_size"),
        ("old vllm", {"kv_offloading_size": 8}, r"came with version 0\.11\.1.*kv_connector = Offloading"),
        ("old vllm", {"shutdown_timeout": 8}, "came with version 0.17"),
        (
            "vllm",
            {"tensor_parallel": 2},
            "unknown option tensor_parallel; this engine knows .*tensor_parallel_size",
        ),
        ("vllm", {"max_model_len": "32k"}, "max_model_len must be a whole number"),
        ("vllm", {"gpu_memory_utilization": 1.2}, "gpu_memory_utilization must be from 0.01 to 1"),
        ("vllm", {"kv_cache_dtype": "fp16"}, "kv_cache_dtype must be one of auto"),
        ("vllm", {"hf_overrides": "{architectures: []}"}, "hf_overrides is no JSON"),
        ("vllm", {"hf_overrides": '{"a": NaN}'}, "hf_overrides is no JSON"),
        ("vllm", {"hf_overrides": "[1]"}, "hf_overrides must be a JSON object"),
        ("vllm", {"enable_prefix_caching": False, "kv_events": True}, "enable_prefix_caching is off"),
        ("vllm", {"kv_role": "kv_both"}, "kv_role says nothing without kv_connector"),
        ("vllm", {"kv_connector": "Nixl"}, "kv_connector must be one of NixlConnector"),
        (
            "vllm",
            {"kv_connector": "NixlConnector", "kv_offloading_size": 4},
            "chooses a connector of its own",
        ),
        ("vllm", {"kv_offloading_backend": "native"}, "says nothing without kv_offloading_size"),
        ("vllm", {"trust_remote_code": True}, "this node runs no code that comes with a model"),
        ("vllm", {"tensor_parallel_size": 4}, "tensor_parallel_size 4 need 4 accelerators .* has 1"),
        ("vllm", {"extra_arguments": "--port 1"}, "may not hold --port: the agent decides that"),
        ("vllm", {"extra_arguments": "--por=1"}, "may not hold --por: the agent decides that"),
        ("vllm", {"extra_arguments": "--served_model_name x"}, "may not hold --served_model_name"),
        ("vllm", {"extra_arguments": "--mod x"}, "may not hold --mod"),
        ("vllm", {"extra_arguments": "-n2 -r1"}, "may not hold -n2"),
        (
            "vllm",
            {"extra_arguments": "-tp=4"},
            "-tp=4|-tp, which is an option of its own: say tensor_parallel_size",
        ),
        ("vllm", {"extra_arguments": "--no-enable-prefix-caching"}, "say enable_prefix_caching"),
        ("vllm", {"extra_arguments": "--kv-transfer-config.kv_role x"}, "may not hold --kv-transfer-config"),
        ("vllm", {"extra_arguments": "--api-key abcdef"}, "may not hold a secret"),
        ("vllm", {"environment": "VLLM_API_KEY=x"}, "may not hold VLLM_API_KEY"),
        ("vllm", {"environment": "VLLM_PORT=8000"}, "may not hold VLLM_PORT: the agent sets it"),
        (
            "vllm",
            {"environment": "LD_PRELOAD=/tmp/x.so"},
            "may not hold LD_PRELOAD: only names that begin with",
        ),
        ("vllm", {"environment": "CUDA_VISIBLE_DEVICES=0"}, "may not hold CUDA_VISIBLE_DEVICES"),
        ("vllm", {"environment": "VLLM_USE_V1"}, "is not NAME=value"),
        ("sglang", {"extra_arguments": "--dist-init-addr x:1"}, "may not hold --dist-init-addr"),
        ("sglang", {"extra_arguments": "--tp 8"}, "say tp_size"),
        ("sglang", {"tp_size": 8, "dp_size": 3, "enable_dp_attention": True}, "leaves a rest"),
        ("sglang", {"hicache_ratio": 2.0}, "says nothing without enable_hierarchical_cache"),
        ("sglang", {"disable_radix_cache": True, "kv_events": True}, "disable_radix_cache is on"),
        ("sglang", {"trust_remote_code": True}, "this node runs no code that comes with a model"),
    ],
)
def test_what_an_engine_could_not_start_with_is_refused_with_what_to_say_instead(
    engine: str, options: EngineOptions, message: str
) -> None:
    adapter = ADAPTERS[engine]
    known = {name: value for name, value in options.items() if isinstance(value, int | str)}
    context = replace(context_for(adapter, known), accelerator_uuids=("GPU-1",), accelerator_kind="cuda")
    with pytest.raises(EngineOptionError, match=message):
        adapter.build_launch(options, context)


CODE_FLAGS = [(engine, flag) for engine in ("vllm", "sglang") for flag in TABLES[engine].code_flags]
LOADED = ("NCCL_NET_PLUGIN", "OMP_TOOL_LIBRARIES", "TRITON_PTXAS_PATH", "FLASHINFER_NVCC", "NIXL_PLUGIN_DIR")


@pytest.mark.parametrize(("engine", "flag"), CODE_FLAGS)
def test_no_extra_argument_runs_code_that_is_no_part_of_the_engine(engine: str, flag: str) -> None:
    for text in (f"{flag} x", f"{flag}=x", f"{flag[:-2]} x", flag.replace("-", "_").replace("__", "--", 1)):
        with pytest.raises(EngineOptionError, match=r"may not hold .*would run code"):
            ADAPTERS[engine].check_options({"extra_arguments": text})


@pytest.mark.parametrize("name", [*LOADED, "VLLM_NCCL_SO_PATH", "VLLM_LOGGING_CONFIG_PATH"])
def test_no_variable_loads_a_file_as_code(name: str) -> None:
    with pytest.raises(EngineOptionError, match=f"may not hold {name}: it would run code"):
        VLLM.check_options({"environment": f"{name}=/tmp/x.so"})
    VLLM.check_options({"environment": f"{name}=none MOONCAKE_CONFIG_PATH=/etc/m.json"})


def test_options_are_told_from_flags_that_begin_like_them() -> None:
    for flag, name in (
        ("--reasoning-parser x", "reasoning_parser"),
        ("--tool-call-parser x", "tool_call_parser"),
    ):
        with pytest.raises(EngineOptionError, match=f"say {name} = "):
            VLLM.check_options({"extra_arguments": flag})
    with pytest.raises(EngineOptionError, match="VLLM_MODEL_REDIRECT_PATH: the agent sets it"):
        VLLM.check_options({"environment": "VLLM_MODEL_REDIRECT_PATH=/m"})


def test_ranks_of_four_nodes_with_eight_cards_each_meet_at_one_place() -> None:
    options = {"tensor_parallel_size": 8, "pipeline_parallel_size": 4, "max_model_len": 1_000_000}
    base = replace(
        context_for(VLLM, options),
        accelerator_uuids=tuple(f"GPU-{n}" for n in range(8)),
        accelerator_kind="cuda",
    )
    for number in range(4):
        rank = NodeRank(number, 4, "10.0.0.1", 45_000)
        found = flags(VLLM.build_launch(options, replace(base, rank=rank)))
        assert (found["--nnodes"], found["--node-rank"]) == ("4", str(number))
        assert (found["--master-addr"], found["--master-port"]) == ("10.0.0.1", "45000")
        assert ("--headless" in found) is (number > 0)
        assert found["--max-model-len"] == "1000000"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "simulated", "torch"])
def test_ranks_talk_by_the_interface_and_adapters_of_their_node(engine: str) -> None:
    options = {
        "vllm": {"tensor_parallel_size": 2}, "sglang": {"tp_size": 2}, "torch": {"pipeline_stages": 2}
    }.get(engine, {})  # fmt: skip
    adapter = {"vllm": VLLM, "sglang": SGLANG}.get(engine) or ENGINES[engine]
    context = context_for({"sglang": SGLANG}.get(engine, VLLM), {} if engine == "torch" else options)
    rank = NodeRank(0, 2, "10.0.0.1", 45_000, interface="eth1", adapters=("mlx5_0", "mlx5_3"))
    environment = adapter.build_launch(options, replace(context, rank=rank)).env
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert environment["NCCL_IB_HCA"] == "=mlx5_0,mlx5_3"
    unknown = replace(context, rank=replace(rank, interface="", adapters=()))
    environment = dict(adapter.build_launch(options, unknown).env)
    assert not [name for name in environment if name.startswith(("NCCL_", "GLOO_"))]


def test_a_deployment_may_say_better_by_which_way_its_ranks_talk() -> None:
    rank = NodeRank(0, 2, "10.0.0.1", 45_000, interface="eth1")
    options = {"tensor_parallel_size": 2, "environment": "NCCL_SOCKET_IFNAME=ib0"}
    found = VLLM.build_launch(options, replace(context_for(VLLM, options), rank=rank)).env
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("ib0", "eth1")


def test_copies_on_several_nodes_are_refused_rather_than_launched_wrongly() -> None:
    options = {"data_parallel_size": 2}
    context = replace(context_for(VLLM, options), rank=NodeRank(0, 2, "10.0.0.1", 45_000))
    with pytest.raises(EngineOptionError, match="have more replicas"):
        VLLM.build_launch(options, context)


def test_ranks_of_one_machine_find_one_anothers_sockets_by_their_whole_path() -> None:
    options = {"tensor_parallel_size": 2}
    base = context_for(VLLM, options)
    one, two = ("10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.2")
    rank = NodeRank(0, 2, "10.0.0.1", 45_000, hosts=one)

    def folder(hosts: tuple[str, ...], runtime_dir: Path) -> str:
        context = replace(base, rank=replace(rank, hosts=hosts), runtime_dir=runtime_dir)
        return VLLM.build_launch(options, context).env["VLLM_RPC_BASE_PATH"]

    assert folder(one, Path("/run/r1")) == "/run/r1"
    assert folder(two, Path("/run/r1")) == "/run/r1"  # names of machines that may yet be one
    deep = Path("/" + "d" * 70)
    assert folder(two, deep) == "."
    with pytest.raises(EngineOptionError, match="nearer to the root"):
        folder(one, deep)


def test_ranks_that_nodes_cannot_share_evenly_are_refused() -> None:
    options = {"tensor_parallel_size": 3}
    context = replace(context_for(VLLM, options), rank=NodeRank(0, 2, "10.0.0.1", 45_000))
    with pytest.raises(EngineOptionError, match="3 ranks, which 2 nodes cannot share evenly"):
        VLLM.build_launch(options, context)


def test_an_address_of_version_six_is_put_in_brackets_before_a_port() -> None:
    found = flags(SGLANG.build_launch({}, replace(context_for(SGLANG), host="fd00::7")))
    assert found["--dist-init-addr"].startswith("[fd00::7]:")
    assert found["--host"] == "fd00::7"


def test_processors_get_kv_memory_out_of_what_was_set_aside() -> None:
    context = replace(context_for(VLLM), memory_bytes=5 << 30, weights_bytes=1 << 30)
    found = flags(VLLM_CPU.build_launch({}, context))
    assert found["--kv-cache-memory-bytes"] == str(2 << 30)
    told = flags(VLLM_CPU.build_launch({"kv_cache_memory_bytes": 1 << 28}, context))
    assert told["--kv-cache-memory-bytes"] == str(1 << 28)
    old = OLD_VLLM.build_launch({}, context)
    assert "--kv-cache-memory-bytes" not in flags(old)
    assert old.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    with pytest.raises(EngineOptionError, match="multiple of 32 on a CPU, not 16"):
        VLLM_CPU.build_launch({"block_size": 16}, context)


def test_a_connector_is_told_in_one_object_with_a_port_of_its_own() -> None:
    options = {"kv_connector": "NixlConnector", "kv_connector_extra_config": '{"backends": ["UCX"]}'}
    launch = VLLM_CPU.build_launch(options, context_for(VLLM_CPU, options))
    assert json.loads(flags(launch)["--kv-transfer-config"]) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        # What is exported for a move and not fetched comes free in time.
        "kv_connector_extra_config": {"kv_lease_duration": 30, "backends": ["UCX"]},
    }
    ports = first_ports(VLLM_CPU.port_blocks(options), context_for(VLLM_CPU, options).ports)
    assert launch.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(ports["nixl"])


def test_what_was_exported_comes_free_whatever_the_version_and_as_was_asked_for() -> None:
    options: EngineOptions = {"kv_connector": "NixlConnector"}
    assert "VLLM_NIXL_ABORT_REQUEST_TIMEOUT" not in VLLM.build_launch(options, context_for(VLLM, options)).env
    old = OLD_VLLM.build_launch(options, context_for(OLD_VLLM, options))
    assert old.env["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"] == "30"
    asked = options | {"kv_connector_extra_config": '{"kv_lease_duration": 90}'}
    told = json.loads(flags(VLLM.build_launch(asked, context_for(VLLM, asked)))["--kv-transfer-config"])
    assert told["kv_connector_extra_config"] == {"kv_lease_duration": 90}


@pytest.mark.parametrize(
    ("engine", "options", "moves"),
    [
        ("torch", {}, "block_transfer"),
        ("torch", {"pipeline_stages": 2}, "none"),
        ("simulated", {}, "none"),
        ("vllm", {}, "warm_prefill"),
        ("vllm", {"kv_connector": "NixlConnector"}, "export_import"),
        ("vllm", {"kv_connector": "NixlPullConnector", "kv_role": "kv_both"}, "export_import"),
        ("vllm", {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, "warm_prefill"),
        ("vllm", {"kv_connector": "NixlConnector", "pipeline_parallel_size": 2}, "warm_prefill"),
        ("vllm", {"kv_connector": "LMCacheConnectorV1"}, "warm_prefill"),
        ("vllm", {"kv_connector": "NixlConnector", "data_parallel_size": 2}, "none"),
        ("vllm", {"enable_prefix_caching": False}, "none"),
        ("sglang", {}, "warm_prefill"),
        ("sglang", {"disable_radix_cache": True}, "none"),
        ("sglang", {"dp_size": 2}, "none"),
    ],
)
def test_engines_state_what_they_can_do_for_a_session_that_moves(
    engine: str, options: EngineOptions, moves: str
) -> None:
    assert session_moves(engine, options) == moves


def test_replicas_over_several_nodes_send_no_kv() -> None:
    nixl: EngineOptions = {"kv_connector": "NixlConnector"}
    assert session_moves("vllm", nixl, nodes=2) == "warm_prefill"
    tp = nixl | {"tensor_parallel_size": 2}
    context = replace(context_for(VLLM, tp), rank=NodeRank(0, 2, "10.0.0.1", 45_000))
    assert VLLM.build_launch(tp, context).env["EXAOPS_SESSION_MOVES"] == "warm_prefill"


def test_what_moves_sessions_stands_around_every_server_of_vllm() -> None:
    launch = VLLM.build_launch({}, context_for(VLLM))
    around = [word.partition("=")[2] for word in launch.argv if word.startswith("--middleware=")]
    # The last is the outermost: other engines come without the key that the guard asks for.
    assert around == ["exaops_guard.RequireKey", "exaops_moves.app.SessionMoves"]
    assert launch.env["EXAOPS_SESSION_MOVES"] == "warm_prefill"
    tp: EngineOptions = {"tensor_parallel_size": 2}
    other_rank = replace(context_for(VLLM, tp), rank=NodeRank(1, 2, "10.0.0.1", 45_000))
    assert not [w for w in VLLM.build_launch(tp, other_rank).argv if "exaops_moves" in w], "it has no server"
    assert SGLANG.build_launch({}, context_for(SGLANG)).env["EXAOPS_SESSION_MOVES"] == "warm_prefill"


def test_what_keeps_kv_beside_an_engine_is_told_by_its_environment() -> None:
    shared: EngineOptions = {"kvcached": True}
    card = {"accelerator_uuids": ("GPU-1",), "accelerator_kind": "cuda"}
    for adapter in (VLLM, SGLANG):
        env = adapter.build_launch(shared, replace(context_for(adapter, shared), **card)).env
        assert (env["ENABLE_KVCACHED"], env["KVCACHED_AUTOPATCH"]) == ("true", "1")
        assert env["KVCACHED_IPC_NAME"].startswith("exaops-"), "each replica has a name of its own"
        assert env["EXAOPS_ENGINE_NEEDS"] == "kvcached"
        with pytest.raises(EngineOptionError, match="maps memory of accelerators, and this replica has none"):
            adapter.build_launch(shared, context_for(adapter, shared))
        assert "ENABLE_KVCACHED" not in adapter.build_launch({}, context_for(adapter)).env
    kept: EngineOptions = {"kv_connector": "LMCacheConnectorV1", "lmcache_cpu_gb": 12.5}
    behind: EngineOptions = {"enable_lmcache": True, "lmcache_cpu_gb": 12.5}
    for adapter, options in ((VLLM, kept), (SGLANG, behind)):
        env = adapter.build_launch(options, context_for(adapter, options)).env
        assert (env["LMCACHE_LOCAL_CPU"], env["LMCACHE_MAX_LOCAL_CPU_SIZE"]) == ("True", "12.5")
        assert env["EXAOPS_ENGINE_NEEDS"] == "lmcache"


@pytest.mark.parametrize(
    ("engine", "options", "why"),
    [
        (VLLM, {"lmcache_cpu_gb": 4.0}, "is read with kv_connector LMCacheConnectorV1"),
        (VLLM, {"lmcache_cpu_gb": 4.0, "kv_connector": "NixlConnector"}, "is read with kv_connector LMCache"),
        (SGLANG, {"lmcache_cpu_gb": 4.0}, "says nothing without enable_lmcache"),
        (SGLANG, {"enable_lmcache": True, "enable_hierarchical_cache": True}, "keep the same KV: choose one"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    engine: VllmAdapter | SglangAdapter, options: EngineOptions, why: str
) -> None:
    with pytest.raises(EngineOptionError, match=why):
        engine.check_options(options)


def test_kv_looks_alike_only_with_options_alike() -> None:
    options: EngineOptions = {"kv_connector": "NixlConnector", "block_size": 32}
    same = {"block_size": 32, "max_num_seqs": 8, "kv_connector": "NixlConnector"}
    assert kv_shape("vllm", options) == kv_shape("vllm", same)
    for change in ({"block_size": 64}, {"kv_cache_dtype": "fp8"}, {"tensor_parallel_size": 2}):
        assert kv_shape("vllm", options) != kv_shape("vllm", options | change)


def test_each_copy_of_a_replica_has_event_ports_of_its_own() -> None:
    options = {"data_parallel_size": 2, "kv_events": True}
    ports = context_for(VLLM, options).ports
    first, second = VLLM.kv_event_sources(options, ports)
    assert {first.port, first.replay_port, second.port, second.replay_port} <= set(ports)
    assert len({first.port, first.replay_port, second.port, second.replay_port}) == 4
    assert VLLM.kv_event_sources({}, ports) == ()
    told = json.loads(flags(VLLM.build_launch(options, context_for(VLLM, options)))["--kv-events-config"])
    assert told["endpoint"] == f"tcp://[::ffff:127.0.0.1]:{first.port}"


def test_control_paths_are_open_only_where_a_standby_is_to_sleep() -> None:
    assert "VLLM_SERVER_DEV_MODE" not in VLLM.build_launch({}, context_for(VLLM)).env
    options = {"enable_sleep_mode": True}
    on_card = replace(context_for(VLLM, options), accelerator_uuids=("GPU-0",), accelerator_kind="cuda")
    launch = VLLM.build_launch(options, on_card)
    assert launch.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--middleware=exaops_guard.RequireKey" in launch.argv, "these paths ask for the key"
    with pytest.raises(EngineOptionError, match="cannot sleep on a CPU"):
        VLLM.build_launch(options, context_for(VLLM, options))
    assert VLLM.can_sleep(options)
    assert not VLLM.can_sleep({})
    assert SGLANG.can_sleep({"enable_memory_saver": True})


def test_a_version_is_asked_only_on_paths_that_it_has() -> None:
    old = VllmAdapter(EngineInstall(Path("/venv/bin/python"), "0.7.3"))
    assert not old.can_sleep({"enable_sleep_mode": True})
    with pytest.raises(EngineOptionError, match="cannot be asked to sleep"):
        old.sleep_request()
    assert VLLM.sleep_request().path.startswith("/sleep?level=1")
    # It refuses a request without a body.
    assert SGLANG.wake_request() == EngineRequest("/resume_memory_occupation", "POST", b"{}")


def test_an_endpoint_that_went_is_replaced_by_its_successor() -> None:
    table = {"what": (Endpoint("/new", since=(2,)), Endpoint("/old", until=(2,)))}
    found = [find_endpoint(table, "what", version) for version in ((1, 9), (2,), (3, 1), ())]
    assert [request.path if request else "" for request in found] == ["/old", "/new", "/new", "/new"]
    assert find_endpoint(table, "other", (1,)) is None


def test_code_of_a_models_runs_where_the_operator_allows_it() -> None:
    context = replace(context_for(VLLM), allows_remote_code=True)
    assert "--trust-remote-code" in VLLM.build_launch({"trust_remote_code": True}, context).argv


def test_sockets_fit_whatever_the_agents_home_is_or_it_is_said(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-long-name-of-a-folder"] * 4)
    vllm = VLLM.build_launch({}, replace(context_for(VLLM), runtime_dir=deep))
    assert vllm.env["VLLM_RPC_BASE_PATH"] == "."  # relative to where it starts
    with pytest.raises(EngineOptionError, match="start the agent with a home that is nearer to the root"):
        SGLANG.build_launch({}, replace(context_for(SGLANG), runtime_dir=deep))


def test_two_engines_may_share_one_card() -> None:
    options: EngineOptions = {"gpu_memory_utilization": 0.45}
    context = replace(context_for(VLLM, options), accelerator_uuids=("GPU-1",), accelerator_kind="cuda")
    assert flags(VLLM.build_launch(options, context))["--gpu-memory-utilization"] == "0.45"


def test_environment_of_a_deployment_never_replaces_what_the_agent_sets() -> None:
    options: EngineOptions = {
        "environment": "NCCL_DEBUG=INFO 'VLLM_LOGGING_LEVEL=WARNING' OMP_NUM_THREADS=64"
    }
    launch = VLLM.build_launch(options, context_for(VLLM, options))
    assert launch.env["NCCL_DEBUG"] == "INFO"
    assert launch.env["OMP_NUM_THREADS"] == "2"


def test_a_newer_version_is_noted_and_gets_the_newest_rows() -> None:
    table = TABLES["vllm"]
    assert "newer than 0.33" in table.note_of(read_version("0.40.1"))
    assert table.note_of(read_version("0.33.2")) == ""
    assert table.note_of(read_version("0.32.0+cpu")) == ""
    with pytest.raises(EngineOptionError, match="swap_space is gone"):
        VllmAdapter(EngineInstall(Path(sys.executable), "main")).check_options({"swap_space": 4})


def test_the_model_is_the_folder_that_the_agent_verified() -> None:
    for adapter, flag in ((VLLM, "--model"), (SGLANG, "--model-path")):
        assert flags(adapter.build_launch({}, context_for(adapter)))[flag] == str(MODEL)


def test_tables_of_our_own_engines_name_what_these_know() -> None:
    assert own.EVICTIONS == heat.EVICTIONS
    assert ENGINES.keys() <= TABLES.keys()


@pytest.mark.parametrize(
    "option", [(t, o) for t in TABLES.values() for o in t.options], ids=lambda it: it[1].name
)
def test_every_option_says_what_it_is_for_and_what_holds_without_it(
    option: tuple[EngineTable, EngineOption],
) -> None:
    table, row = option
    assert row.help.endswith(".")
    assert row.default
    assert not row.until or row.instead
    assert table.find_flag(row.written) == row
