"""`python -m workers.engines.torch_engine`: the built-in engine as a process."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from workers.engines.openai_server.serve import (
    add_server_arguments,
    configure_logging,
    serve,
    settings_from,
)
from workers.engines.torch_engine.config import ModelConfigError, read_model_config
from workers.engines.torch_engine.engine import TorchEngine
from workers.engines.torch_engine.settings import EngineSettings
from workers.kv.tiers.heat import EVICTIONS
from workers.protocol import names


def positive_integer(text: str) -> int:
    """Parse a flag that must be 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this engine's flags."""
    parser = argparse.ArgumentParser(prog="torch_engine", description=__doc__)
    add_server_arguments(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "model", "fp8_e4m3"))
    parser.add_argument("--attention", default="auto", choices=("auto", "grouped", "varlen", "flex"))
    parser.add_argument("--num-blocks", type=positive_integer, help="KV blocks of 16 tokens")
    parser.add_argument("--kv-memory-bytes", type=positive_integer)
    parser.add_argument(
        "--memory-bytes", type=positive_integer, help="of the whole replica, if KV is not given"
    )
    parser.add_argument("--max-model-len", type=positive_integer, help="in tokens")
    parser.add_argument("--max-num-seqs", type=positive_integer, default=64)
    parser.add_argument("--max-num-batched-tokens", type=positive_integer)
    parser.add_argument("--threads", type=positive_integer)
    parser.add_argument("--weights", default="shared", choices=("shared", "private"))
    parser.add_argument("--weights-cache", type=Path, help="folder of weights that replicas share")
    parser.add_argument("--model-digest", default="", help="names the shared weights")
    parser.add_argument("--holder", type=Path, help="socket of what holds the accelerator's shared memory")
    parser.add_argument("--kv-pool", default="node", choices=("node", "private"))
    parser.add_argument("--kv-pool-dir", type=Path, help="folder of KV pools that replicas share")
    parser.add_argument("--kv-pool-bytes", type=int, default=0, help="of a new pool; 0: what is brought")
    parser.add_argument("--kv-min-blocks", type=positive_integer, help="guaranteed in the pool")
    parser.add_argument("--kv-host-bytes", type=int, default=0, help="host memory below the blocks")
    parser.add_argument("--kv-disk-bytes", type=int, default=0, help="disk below host memory")
    parser.add_argument("--kv-disk-dir", type=Path, help="folder of the replicas' files of blocks")
    parser.add_argument("--kv-eviction", default="lru", choices=EVICTIONS)
    parser.add_argument("--kv-max-blocks", type=positive_integer, help="never more of the pool")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine. Returns 0 after a drain, 1 if loading failed, 2 for bad arguments."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    configure_logging()
    server = settings_from(arguments, parser)
    try:
        config = read_model_config(arguments.model_dir)
    except ModelConfigError as error:
        parser.error(str(error))
    settings = EngineSettings(
        model_dir=arguments.model_dir,
        model_name=arguments.served_model_name,
        device=arguments.device,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        attention=arguments.attention,
        num_blocks=arguments.num_blocks,
        kv_memory_bytes=arguments.kv_memory_bytes,
        memory_bytes=arguments.memory_bytes,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        threads=arguments.threads,
        weights_cache=arguments.weights_cache if arguments.weights == "shared" else None,
        model_digest=arguments.model_digest,
        weights_holder=arguments.holder if arguments.weights == "shared" else None,
        kv_holder=arguments.holder if arguments.kv_pool == "node" else None,
        kv_pool_dir=arguments.kv_pool_dir if arguments.kv_pool == "node" else None,
        kv_pool_bytes=arguments.kv_pool_bytes,
        kv_min_blocks=arguments.kv_min_blocks,
        kv_max_blocks=arguments.kv_max_blocks,
        kv_host_bytes=arguments.kv_host_bytes,
        kv_disk_bytes=arguments.kv_disk_bytes,
        kv_disk_dir=arguments.kv_disk_dir,
        kv_eviction=arguments.kv_eviction,
        replica_id=os.environ.get(names.ENV_REPLICA) or f"process-{os.getpid()}",
        attempt=int(os.environ.get(names.ENV_ATTEMPT) or 0),
    )
    engine = TorchEngine(settings, config)
    return serve(engine, engine.metrics, server)


def exit_at_once(status: int) -> NoReturn:
    """End the process without taking the interpreter down in order.

    A thread that is still loading sits inside torch, which aborts when Python is pulled from under it.
    """
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    exit_at_once(main())
