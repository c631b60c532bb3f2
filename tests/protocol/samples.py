"""One message of every kind, every field set: what the golden bytes hold.

A message that gained fields gets a sample of the new minor version beside the old one, which stays
as it was. Run `python -m tests.protocol.samples` afterwards: it writes the files that do not exist
yet and never changes one that does.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from workers.protocol import digests, kv_pools, v1
from workers.protocol.hardware import AcceleratorInfo, Topology, TopologyEndpoint, TopologyLink
from workers.protocol.imports import ImportSeen, ImportState, WeightsImport
from workers.protocol.machine import AcceleratorLoad, RdmaRate
from workers.protocol.observed import (
    AgentLiveness,
    ExitInfo,
    HostTelemetry,
    InterfaceRate,
    KvSwaps,
    KvTier,
    MemoryHolder,
    MemoryWait,
    ObservedState,
    ReplicaObserved,
    ReplicaTelemetry,
    UnknownProcess,
)
from workers.protocol.weights import (
    SwarmComplaint,
    SwarmOrder,
    SwarmParent,
    SwarmPull,
    SwarmSeen,
    SwarmStream,
    WeightsFrom,
    WeightsHeld,
    WeightsReport,
    WeightsSource,
    WeightsState,
    WeightsWanted,
)
from workers.protocol.wish import GangMember, ModelFile, ModelRef, MpsLimits, ReplicaSpec, WantedState

FOLDER = Path(__file__).with_name("golden")
NODE_ID = "11111111-2222-4333-8444-555555555555"
NODE_KEY = digests.node_key(b"golden-fleet-secret-of-32-bytes!", NODE_ID, 1)

_MODEL = ModelRef(
    name="tiny-llama",
    digest="sha256:00ff",
    source="file:///models/tiny",
    files=(ModelFile(path="config.json", size_bytes=12, sha256="ab" * 32),),
)
_SPEC_1_0 = ReplicaSpec(
    replica_id="r-1",
    deployment="demo",
    generation=7,
    wanted=WantedState.DRAIN,
    model=_MODEL,
    engine="torch",
    engine_options={"dtype": "float32", "blocks": 64, "share": 0.5, "eager": True},
    accelerator_uuids=("GPU-1",),
    memory_bytes=1 << 30,
    drain_seconds=30.0,
    start_seconds=120.0,
)
_SPEC_1_2 = msgspec.structs.replace(_SPEC_1_0, stall_seconds=45.0)
_SPEC_1_4 = msgspec.structs.replace(_SPEC_1_2, mps=MpsLimits(thread_percent=25, memory_bytes=1 << 31))
_SPEC_1_5 = msgspec.structs.replace(
    _SPEC_1_4, model=msgspec.structs.replace(_MODEL, manifest_digest="sha256:" + "cd" * 32)
)
_SPEC = msgspec.structs.replace(
    _SPEC_1_5,
    member=GangMember(
        number=1,
        count=2,
        epoch=3,
        head_address="10.0.0.7:41000",
        rendezvous="10.0.0.7:41001",
        hosts=("10.0.0.7", "10.0.0.8"),
        adapters=("mlx5_0", ""),
        key="xg-sample",
    ),
    asleep=True,
)
_TELEMETRY = ReplicaTelemetry(
    window_seconds=10.0,
    age_seconds=0.5,
    requests_running=2,
    requests_waiting=1,
    kv_used_ratio=0.25,
    kv_total_blocks=512,
    kv_block_tokens=16,
    requests_per_second=1.5,
    prompt_tokens_per_second=100.0,
    generation_tokens_per_second=50.0,
    prefix_hit_ratio=0.75,
    ttft_p50_seconds=0.1,
    ttft_p95_seconds=0.2,
    ttft_p99_seconds=0.3,
    itl_p50_seconds=0.01,
    itl_p95_seconds=0.02,
    generation_tokens_total=1000.0,
    requests_total=10.0,
    prefix_query_tokens_total=2000.0,
    prefix_hit_tokens_total=1500.0,
    notes=("1 line dropped",),
)
_REPLICA_1_0 = ReplicaObserved(
    replica_id="r-1",
    generation=7,
    state=ObservedState.READY,
    attempt=2,
    restarts=1,
    reason="because",
    pid=4711,
    address="127.0.0.1:41000",
    ports=(41000, 41001),
    uptime_seconds=12.5,
    start_took_seconds=3.5,
    retry_in_seconds=1.0,
    active_requests=3,
    last_exit=ExitInfo(attempt=1, code=None, signal=9, duration_seconds=4.0, log_tail=("bye",)),
    telemetry=_TELEMETRY,
)
_EXIT = ExitInfo(
    attempt=1, code=None, signal=9, duration_seconds=4.0, log_tail=("bye",), why="stalled: no token came"
)
_REPLICA_1_3 = msgspec.structs.replace(_REPLICA_1_0, last_exit=_EXIT, stalled=True, held_by_pids=(4712,))
_TELEMETRY_1_4 = msgspec.structs.replace(
    _TELEMETRY,
    kv_tiers=(
        KvTier(name="accelerator", used_blocks=128, capacity_blocks=512),
        KvTier(name="disk", used_blocks=0, capacity_blocks=0, off_reason="the disk is full"),
    ),
    kv_swaps=KvSwaps(
        blocks_in=1,
        blocks_out=2,
        bytes_in=3,
        bytes_out=4,
        fetch_waits=5,
        checksum_failures=6,
        preemptions_recompute=7,
        preemptions_swap=8,
    ),
    kv_thrash_reason="40% of what came in left again",
    prefix_miss_tokens_total={"evicted": 16.0},
)
_REPLICA = msgspec.structs.replace(_REPLICA_1_3, telemetry=_TELEMETRY_1_4, memory_used_bytes=1 << 29)

_ACCELERATOR_1_0 = AcceleratorInfo(
    uuid="GPU-1", kind="cuda", name="H200", memory_bytes=150_000_000_000, ordinal=3
)
_HELLO_1_0 = v1.Hello(
    node_id=NODE_ID,
    boot_id="boot-1",
    major=1,
    minor=0,
    agent_version="0.1.0",
    hostname="gpu01",
    address="10.0.0.7",
    accelerators=(_ACCELERATOR_1_0,),
    engines=("simulated", "torch"),
    cpu_count=16,
    memory_bytes=1 << 37,
    labels={"rack": "r1"},
    simulated=True,
    reconnect=True,
)
_SLICE = msgspec.structs.replace(
    _ACCELERATOR_1_0,
    parent_uuid="GPU-0",
    profile="3g.40gb",
    pci_bus_id="0000:3b:00.0",
    numa_node=1,
    pcie_generation=5,
    pcie_width=16,
    unreadable=("name",),
)
_SLICE_1_3 = msgspec.structs.replace(_SLICE, pcie_generation_now=1, pcie_width_now=8)
_TOPOLOGY = Topology(
    endpoints=(
        TopologyEndpoint(name="GPU-1", accelerator=True, numa_node=1, cpus="0-31"),
        TopologyEndpoint(name="mlx5_0", accelerator=False),
    ),
    links=(TopologyLink(a=0, b=1, kind="PIX", rank=100),),
)

_HELLO_1_1 = msgspec.structs.replace(
    _HELLO_1_0, minor=1, accelerators=(_SLICE,), topology=_TOPOLOGY, probe_notes=("memory: ERR!",)
)
_HELLO_1_3 = msgspec.structs.replace(
    _HELLO_1_1, minor=3, accelerators=(_SLICE_1_3,), split_cards=(_ACCELERATOR_1_0,)
)
_SLICE_1_4 = msgspec.structs.replace(_SLICE_1_3, shares_memory=True)
_HELLO = msgspec.structs.replace(
    _HELLO_1_3, minor=4, accelerators=(_SLICE_1_4,), mps_ready=True, mps_note="no daemon answers"
)

_UNKNOWN_1_0 = UnknownProcess(
    pid=5, replica_id="r-0", accelerator_uuid="GPU-1", memory_bytes=1024, command="python"
)
_UNKNOWN = msgspec.structs.replace(
    _UNKNOWN_1_0, start_ticks=77, user="ops", left_over=True, origin="its environment says so"
)
_HEARTBEAT_1_2 = v1.Heartbeat(
    node_id=NODE_ID,
    boot_id="boot-1",
    lease_epoch=3,
    sequence=99,
    sent_at_seconds=1_700_000_000.5,
    applied_revision=12,
    liveness=AgentLiveness(
        intake_age_seconds=2.0,
        intake_restarts=1,
        reconcile_age_seconds=0.25,
        reconcile_restarts=2,
        reconcile_error="none",
    ),
    replicas=(_REPLICA_1_3,),
    unknown_processes=(_UNKNOWN_1_0,),
    host=HostTelemetry(
        cpu_used_ratio=0.5,
        memory_used_bytes=1,
        memory_total_bytes=2,
        disk_free_bytes=3,
        load1=0.7,
        network_receive_bytes_per_second=4.0,
        network_send_bytes_per_second=5.0,
    ),
)
_HEARTBEAT_1_3 = msgspec.structs.replace(_HEARTBEAT_1_2, unknown_processes=(_UNKNOWN,))
_POOL = kv_pools.KvPool(
    pool_id="ab" * 16,
    block_tokens=16,
    block_bytes=4096,
    extent_blocks=16,
    capacity_blocks=64,
    free_blocks=16,
    damaged_blocks=16,
    fragmentation_ratio=0.25,
    reclaimed_extents=2,
    members=(
        kv_pools.KvPoolMember(
            replica_id="r-1",
            attempt=2,
            alive=True,
            leased_blocks=32,
            guaranteed_blocks=16,
            ceiling_blocks=64,
            brought_blocks=16,
            live_blocks=20,
            cached_blocks=4,
            asked_back_blocks=16,
            waiting_requests=3,
            short_blocks=12,
            preempted_requests=1,
            returned_extents=5,
            cached_by_age_blocks=(4, 0, 0, 0, 0),
        ),
    ),
    cell_extents=2,
    # As `pack_map` packed it once: what a library compresses to may change.
    map=bytes.fromhex("78016364fccff0c1858181819181010013780237"),
)
_HEARTBEAT_1_4 = msgspec.structs.replace(_HEARTBEAT_1_3, replicas=(_REPLICA,), kv_pools=(_POOL,))
_WEIGHTS_1_5 = WeightsReport(
    revision=5,
    disk_total_bytes=4 << 40,
    disk_free_bytes=1 << 40,
    used_bytes=2 << 40,
    problem="the disk is read-only",
    held=(
        WeightsHeld(
            revision="sha256:00ff",
            state=WeightsState.FETCHING,
            total_bytes=140_000_000_000,
            have_bytes=70_000_000_000,
            bytes_per_second=2.5e9,
            eta_seconds=28.0,
            reason="from 2 sources",
            wanted=True,
            in_use=True,
            sources=(WeightsFrom(kind="http", bytes=4194304, name="store.example"),),
            damaged_pieces=1,
            unused_seconds=12.5,
        ),
    ),
)
_HEARTBEAT_1_5 = msgspec.structs.replace(_HEARTBEAT_1_4, weights=_WEIGHTS_1_5)
_MEMORY_WAIT = MemoryWait(
    place="GPU-1",
    needed_bytes=60 << 30,
    free_bytes=12 << 30,
    total_bytes=80 << 30,
    waited_seconds=4.5,
    at_most_seconds=300.0,
    holders=(
        MemoryHolder(kind="stranger", pid=123, replica_id="r-9", command="python", memory_bytes=68 << 30),
    ),
)
_TELEMETRY_1_6 = msgspec.structs.replace(
    _TELEMETRY_1_4,
    lower_bounds=("ttft_p99_seconds",),
    queue_p50_seconds=0.25,
    queue_p95_seconds=0.5,
    waiting_by_reason={"capacity": 2.0},
    sleep_state="awake",
    kv_cached_tokens=4096,
    kv_capacity_tokens=8192,
    kv_capacity_is_estimate=True,
    external_hit_ratio=0.75,
    external_hit_tokens_total=552.0,
    preemptions_total=3.0,
    preemptions_per_second=0.5,
    outcomes_total={"stop": 7.0, "abort": 1.0},
    connector_totals={"nixl bytes": 1_180_000.0},
    generation_tokens_by_model={"base": 10.0, "tuned": 5.0},
)
_REPLICA_1_6 = msgspec.structs.replace(_REPLICA, telemetry=_TELEMETRY_1_6, memory_wait=_MEMORY_WAIT)
_SWARM = SwarmSeen(
    pulls=(
        SwarmPull(
            stripe=1,
            parent="node-2",
            stage="flowing",
            bytes_per_second=1e9,
            starved_ratio=0.25,
            lasted_seconds=9.5,
            bottleneck="disk",
            why="it had nothing new",
        ),
    ),
    complaints=(SwarmComplaint(parent="node-3", bad_pieces=1, unreachable=True),),
    streams=(SwarmStream(child="node-4", bytes_per_second=5e8, capped_ratio=0.5),),
    pieces=33_000,
    have_pieces=16_500,
)
_HOST_1_5 = _HEARTBEAT_1_5.host
assert _HOST_1_5 is not None
_HEARTBEAT_1_6 = msgspec.structs.replace(
    _HEARTBEAT_1_5,
    host=msgspec.structs.replace(
        _HOST_1_5,
        interfaces={"eth0": InterfaceRate(receive_bytes_per_second=4.0, send_bytes_per_second=5.0)},
        disk_read_bytes_per_second=6.0,
        disk_write_bytes_per_second=7.0,
        cpu_stalled_ratio=0.25,
        memory_stalled_ratio=0.125,
        io_stalled_ratio=0.5,
    ),
    replicas=(_REPLICA_1_6,),
    weights=msgspec.structs.replace(
        _WEIGHTS_1_5,
        held=(msgspec.structs.replace(_WEIGHTS_1_5.held[0], swarm=_SWARM, spoilt=True),),
        imports=(
            ImportSeen(
                import_id="i-1",
                state=ImportState.FETCHING,
                attempt=2,
                reason="from the hub",
                location="https://hub.example/o/n/resolve/00ff",
                files=12,
                files_done=3,
                total_bytes=140_000_000_000,
                have_bytes=70_000_000_000,
                bytes_per_second=2.5e9,
                eta_seconds=28.0,
                findings_digest="ab" * 32,
            ),
        ),
    ),
)
_HOST_1_6 = _HEARTBEAT_1_6.host
assert _HOST_1_6 is not None
_HEARTBEAT = msgspec.structs.replace(
    _HEARTBEAT_1_6,
    replicas=(
        msgspec.structs.replace(
            _REPLICA_1_6,
            member_number=1,
            epoch=3,
            rendezvous="10.0.0.7:41001",
            sleep_state="asleep",
            sleep_note="no room",
            woke_in_seconds=2.5,
        ),
    ),
    host=msgspec.structs.replace(
        _HOST_1_6,
        interfaces={
            "eth0": InterfaceRate(
                receive_bytes_per_second=4.0, send_bytes_per_second=5.0, link_bytes_per_second=12.5e9
            )
        },
        cpu_busiest_ratio=0.75,
        rdma={
            "mlx5_0/1": RdmaRate(
                receive_bytes_per_second=8.0, send_bytes_per_second=9.0, link_bytes_per_second=25e9
            )
        },
    ),
    accelerator_loads=(
        AcceleratorLoad(
            uuid="GPU-1",
            ordinal=1,
            sources=("dcgm", "nvml"),
            age_seconds=2.5,
            used_ratio=0.5,
            memory_used_bytes=60 << 30,
            memory_total_bytes=80 << 30,
            pcie_receive_bytes_per_second=1e9,
            pcie_send_bytes_per_second=2e9,
            pcie_link_bytes_per_second=63.016e9,
            pcie_replays=3,
            nvlinks=18,
            nvlinks_up=17,
            nvlink_receive_bytes_per_second=3e9,
            nvlink_send_bytes_per_second=4e9,
            nvlink_both_bytes_per_second=7e9,
            nvlink_link_bytes_per_second=451.554e9,
            nvlink_errors=2,
            power_watts=650.5,
            power_limit_watts=700.0,
            temperature_celsius=71.0,
            held_back_by=("power cap",),
            ecc_uncorrected=1,
            last_xid=94,
            notes=("power: GPU is lost",),
        ),
    ),
)
_APPLY_DESIRED = v1.ApplyDesired(
    command_id="c-1", lease_epoch=3, deadline_seconds=60.0, revision=12, replicas=(_SPEC,)
)

_MOVE_SESSION_1_4 = v1.MoveSession(
    command_id="c-7",
    lease_epoch=3,
    deadline_seconds=60.0,
    replica_id="r-1",
    attempt=2,
    session_id="s ü",
    transfer_id="0f" * 16,
    transfer_key="a1" * 32,
    target="http://10.0.0.2:41000",
    bytes_per_second=5e8,
)
_SESSION_SENT_1_4 = v1.SessionSent(
    node_id=NODE_ID,
    command_id="c-7",
    code="no_room",
    reason="full",
    blocks=9,
    sent_blocks=7,
    sent_bytes=7168,
    target_tokens=144,
    seconds=0.25,
    turn_began=True,
)

_APPLY_WEIGHTS_1_5 = v1.ApplyWeights(
    command_id="c-9",
    lease_epoch=3,
    deadline_seconds=60.0,
    revision=5,
    weights=(
        WeightsWanted(
            revision="sha256:00ff",
            manifest_digest="sha256:" + "cd" * 32,
            total_bytes=140_000_000_000,
            name="tiny-llama",
            sources=(WeightsSource(kind="hub", location="https://hub.example/x", secret="hub-token"),),
            paused=True,
            bytes_per_second=1e9,
            priority=100,
        ),
    ),
)

_LOG_CHUNK_1_0 = v1.LogChunk(node_id=NODE_ID, replica_id="r-1", attempt=2, lines=("a", "ü"), dropped_lines=4)

REPORTS: dict[str, v1.Report] = {
    "hello": _HELLO,
    "heartbeat": _HEARTBEAT,
    "command_result": v1.CommandResult(
        node_id=NODE_ID, command_id="c-1", outcome="refused", reason="older epoch"
    ),
    "session_sent": msgspec.structs.replace(_SESSION_SENT_1_4, carrier="shared_memory"),
    "import_findings": v1.ImportFindings(
        node_id=NODE_ID, import_id="i-1", digest="ab" * 32, index=1, count=3, data=b"\x00\xff"
    ),
    "log_chunk": msgspec.structs.replace(_LOG_CHUNK_1_0, is_backlog=True),
}

_APPLY_WEIGHTS_1_5 = v1.ApplyWeights(
    command_id="c-9",
    lease_epoch=3,
    deadline_seconds=60.0,
    revision=5,
    weights=(
        WeightsWanted(
            revision="sha256:00ff",
            manifest_digest="sha256:" + "cd" * 32,
            total_bytes=140_000_000_000,
            name="tiny-llama",
            sources=(WeightsSource(kind="hub", location="https://hub.example/x", secret="hub-token"),),
            paused=True,
            bytes_per_second=1e9,
            priority=100,
        ),
    ),
)

COMMANDS: dict[str, v1.Command] = {
    "apply_desired": _APPLY_DESIRED,
    "apply_weights": msgspec.structs.replace(
        _APPLY_WEIGHTS_1_5,
        imports=(
            WeightsImport(
                import_id="i-1",
                kind="hub",
                location="https://hub.example/o/n",
                secret="hub-token",
                revision="v1",
                files=("*.safetensors", "config.json"),
                attempt=2,
                paused=True,
                name="tiny-llama",
            ),
        ),
        weights=(
            msgspec.structs.replace(
                _APPLY_WEIGHTS_1_5.weights[0],
                swarm=SwarmOrder(
                    epoch=7,
                    key="4d" * 32,
                    valid_seconds=7200.0,
                    stripes=((SwarmParent(node_id="node-2", host="10.0.0.2", port=7000),),),
                ),
                engine_cache="vllm",
            ),
        ),
    ),
    "request_hello": v1.RequestHello(
        command_id="c-2", lease_epoch=3, deadline_seconds=60.0, reason="lease expired"
    ),
    "tail_log": v1.TailLog(
        command_id="c-3",
        lease_epoch=3,
        deadline_seconds=60.0,
        replica_id="r-1",
        seconds=30.0,
        backlog_lines=50,
    ),
    "end_process": v1.EndProcess(
        command_id="c-5", lease_epoch=3, deadline_seconds=60.0, pid=4711, start_ticks=77
    ),
    "set_kv_limits": v1.SetKvLimits(
        command_id="c-6",
        lease_epoch=3,
        deadline_seconds=60.0,
        replica_id="r-1",
        minimum_blocks=32,
        ceiling_blocks=64,
    ),
    "move_session": msgspec.structs.replace(_MOVE_SESSION_1_4, way="warm_prefill"),
    "let_session_go": v1.LetSessionGo(
        command_id="c-8", lease_epoch=3, deadline_seconds=60.0, replica_id="r-1", attempt=2, session_id="s"
    ),
    "forget_replica": v1.ForgetReplica(
        command_id="c-4", lease_epoch=3, deadline_seconds=60.0, replica_ids=("r-1", "r-2")
    ),
}

OLDER: dict[str, v1.Report | v1.Command] = {
    "v1.0-hello": _HELLO_1_0,
    "v1.1-hello": _HELLO_1_1,
    "v1.3-hello": _HELLO_1_3,
    "v1.0-heartbeat": msgspec.structs.replace(_HEARTBEAT_1_2, replicas=(_REPLICA_1_0,)),
    "v1.2-heartbeat": _HEARTBEAT_1_2,
    "v1.3-heartbeat": _HEARTBEAT_1_3,
    "v1.0-apply_desired": msgspec.structs.replace(_APPLY_DESIRED, replicas=(_SPEC_1_0,)),
    "v1.4-session_sent": _SESSION_SENT_1_4,
    "v1.0-log_chunk": _LOG_CHUNK_1_0,
    "v1.4-move_session": _MOVE_SESSION_1_4,
    "v1.4-heartbeat": _HEARTBEAT_1_4,
    "v1.5-heartbeat": _HEARTBEAT_1_5,
    "v1.6-heartbeat": _HEARTBEAT_1_6,
    "v1.5-apply_desired": msgspec.structs.replace(_APPLY_DESIRED, replicas=(_SPEC_1_5,)),
    "v1.4-apply_desired": msgspec.structs.replace(_APPLY_DESIRED, replicas=(_SPEC_1_4,)),
    "v1.5-apply_weights": _APPLY_WEIGHTS_1_5,
    "v1.2-apply_desired": msgspec.structs.replace(_APPLY_DESIRED, replicas=(_SPEC_1_2,)),
}
"""What golden files of an earlier minor mean, where the message has gained fields since."""
_MINOR_OF_SAMPLE = {
    "hello": 4, "heartbeat": 7, "end_process": 3, "set_kv_limits": 4, "apply_desired": 7, "move_session": 7,
    "let_session_go": 4, "session_sent": 5, "apply_weights": 6, "import_findings": 6,
    "log_chunk": 7,
}  # fmt: skip
"""The minor version that last added to a message; 0 for the others."""


def file_name(kind: str) -> str:
    """The golden file of a sample, without its ending."""
    return f"v1.{_MINOR_OF_SAMPLE.get(kind, 0)}-{kind}"


def encoded() -> dict[str, bytes]:
    """Each sample as it goes over the wire."""
    reports = {
        name: v1.encode_report(report, node_id=NODE_ID, node_key=NODE_KEY) for name, report in REPORTS.items()
    }
    commands = {
        name: v1.encode_command(command, node_id=NODE_ID, node_key=NODE_KEY)
        for name, command in COMMANDS.items()
    }
    return reports | commands


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in encoded().items():
        path = FOLDER / f"{file_name(name)}.bin"
        if not path.exists():
            path.write_bytes(data)
