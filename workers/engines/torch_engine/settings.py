"""What the command line of the engine says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workers.kv.tiers.heat import Eviction

JOIN_SECONDS, SILENCE_SECONDS, STEP_SECONDS = 600.0, 15.0, 300.0
HANDSHAKE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Which stage of a replica over several processes this one is, and how it finds the others."""

    number: int
    count: int
    host: str
    """Address of this process: what it listens on, and what its connections come from."""
    rendezvous: tuple[str, int]
    """Host and port where the first stage is met."""
    key: bytes = field(repr=False)
    """What the stages prove to one another that they belong together with."""
    join_seconds: float = JOIN_SECONDS
    """How long the others may take to come and to load."""
    silence_seconds: float = SILENCE_SECONDS
    """A stage without a sign of life for so long is lost."""
    step_seconds: float = STEP_SECONDS
    """A step that takes longer in the other stages never ends."""
    handshake_seconds: float = HANDSHAKE_SECONDS
    """Within which a connection has proved whose it is, or is closed."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the command line says; `None` means that the engine chooses."""

    model_dir: Path
    model_name: str
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    """What keys and values are kept as: `auto`, `model` or `fp8_e4m3`."""
    attention: str = "auto"
    """How to attend: `auto`, `grouped`, `varlen` or `flex`."""
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    memory_bytes: int | None = None
    """Budget of the whole replica: weights, KV and a fifth for everything else."""
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    threads: int | None = None
    weights_cache: Path | None = None
    """Folder of the node's shared copies of weights; `None`: weights of its own."""
    model_digest: str = ""
    """What the control plane calls the model's content; names the shared copy."""
    weights_holder: Path | None = None
    """Socket of the accelerator's holder, which keeps the one copy; `None`: not with a holder."""
    kv_holder: Path | None = None
    """Socket of the holder whose memory the node's KV pool lies in; `None`: in the host's."""
    kv_pool_dir: Path | None = None
    """Folder of the node's KV pools; `None`: KV memory of its own."""
    kv_pool_bytes: int = 0
    """Size of the node's pool if it has yet to be made; 0: what its replicas bring."""
    kv_min_blocks: int | None = None
    """Guaranteed in the node's pool; `None`: all that this replica brings."""
    kv_max_blocks: int | None = None
    kv_host_bytes: int = 0
    """Host memory for blocks that had to leave where they are computed with; 0: none."""
    kv_disk_bytes: int = 0
    """Disk for blocks that had to leave host memory; 0: none."""
    kv_disk_dir: Path | None = None
    """Folder in which each replica of the node has its file of blocks."""
    kv_eviction: Eviction = "lru"
    replica_id: str = ""
    """Names this replica in the node's pool."""
    attempt: int = 0
    stage: StageSettings | None = None
    """`None`: this process computes the whole model."""
