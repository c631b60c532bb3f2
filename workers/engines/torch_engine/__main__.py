"""`python -m workers.engines.torch_engine`: the built-in engine as a process."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from workers.engines.openai_server.serve import (
    add_server_arguments,
    configure_logging,
    serve,
    settings_from,
)
from workers.engines.torch_engine.config import ModelConfigError, read_model_config, stage_config
from workers.engines.torch_engine.engine import LoopEngine, TorchEngine
from workers.engines.torch_engine.settings import (
    JOIN_SECONDS,
    SILENCE_SECONDS,
    STEP_SECONDS,
    EngineSettings,
    StageSettings,
)
from workers.engines.torch_engine.stage_process import run_stage
from workers.engines.torch_engine.staged_engine import StagedEngine
from workers.kv.tiers.heat import EVICTIONS
from workers.protocol import names
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.own import check_stages


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
    parser.add_argument(
        "--kv-pool", choices=("node", "private"), help="node, unless there are several stages"
    )
    parser.add_argument("--kv-pool-dir", type=Path, help="folder of KV pools that replicas share")
    parser.add_argument("--kv-pool-bytes", type=int, default=0, help="of a new pool; 0: what is brought")
    parser.add_argument("--kv-min-blocks", type=positive_integer, help="guaranteed in the pool")
    parser.add_argument("--kv-host-bytes", type=int, default=0, help="host memory below the blocks")
    parser.add_argument("--kv-disk-bytes", type=int, default=0, help="disk below host memory")
    parser.add_argument("--kv-disk-dir", type=Path, help="folder of the replicas' files of blocks")
    parser.add_argument("--kv-eviction", default="lru", choices=EVICTIONS)
    parser.add_argument("--kv-max-blocks", type=positive_integer, help="never more of the pool")
    _add_stage_arguments(parser)
    return parser


def _add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pipeline-stages", type=positive_integer, default=1, help="processes it is split over"
    )
    parser.add_argument(
        "--stage", type=int, default=0, help="which of them this one is; 0 has the rest below"
    )
    parser.add_argument("--rendezvous", type=_host_and_port, help="host:port where stage 0 is met")
    parser.add_argument("--join-seconds", type=float, default=JOIN_SECONDS)
    parser.add_argument("--silence-seconds", type=float, default=SILENCE_SECONDS)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be host:port, not {text!r}")
    return host.strip("[]"), int(port)


def stage_from(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> StageSettings | None:
    """Read which stage this is; `None`: there is only one. Exits 2 for what cannot be."""
    number, count = arguments.stage, arguments.pipeline_stages
    if not 0 <= number < count:
        parser.error(f"--stage {number} is none of {count}")
    if count == 1:
        return None
    key = os.environ.get(names.ENV_GANG_KEY, "")
    if not key or arguments.rendezvous is None:
        parser.error(f"{count} stages need --rendezvous, and {names.ENV_GANG_KEY} to know one another by")
    try:
        check_stages(vars(arguments))
    except EngineOptionError as error:
        parser.error(str(error))
    return StageSettings(
        number=number,
        count=count,
        host=arguments.host,
        rendezvous=arguments.rendezvous,
        key=key.encode(),
        join_seconds=arguments.join_seconds,
        silence_seconds=arguments.silence_seconds,
        step_seconds=arguments.step_seconds,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine. Returns 0 after a drain, 1 if loading failed, 2 for bad arguments."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    configure_logging()
    server = settings_from(arguments, parser)
    stage = stage_from(arguments, parser)
    try:
        config = read_model_config(arguments.model_dir)
        stage_config(config, arguments.stage, arguments.pipeline_stages)
    except ModelConfigError as error:
        parser.error(str(error))
    settings = engine_settings(arguments, stage)
    if stage is None:
        engine: LoopEngine = TorchEngine(settings, config)
    elif stage.number > 0:
        return run_stage(settings, config, stage, drain_seconds=server.drain_seconds)
    else:
        engine = StagedEngine(settings, config, stage)
        server = replace(server, ends_when_failed=True)
    return serve(engine, engine.metrics, server)


def engine_settings(arguments: argparse.Namespace, stage: StageSettings | None) -> EngineSettings:
    """What the flags say. A pool of the node has whole models' blocks, so stages have memory of their own."""
    in_pool = arguments.kv_pool != "private" and stage is None
    return EngineSettings(
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
        kv_holder=arguments.holder if in_pool else None,
        kv_pool_dir=arguments.kv_pool_dir if in_pool else None,
        kv_pool_bytes=arguments.kv_pool_bytes,
        kv_min_blocks=arguments.kv_min_blocks,
        kv_max_blocks=arguments.kv_max_blocks,
        kv_host_bytes=arguments.kv_host_bytes,
        kv_disk_bytes=arguments.kv_disk_bytes,
        kv_disk_dir=arguments.kv_disk_dir,
        kv_eviction=arguments.kv_eviction,
        replica_id=os.environ.get(names.ENV_REPLICA) or f"process-{os.getpid()}",
        attempt=int(os.environ.get(names.ENV_ATTEMPT) or 0),
        stage=stage,
    )


def exit_at_once(status: int) -> NoReturn:
    """End the process without taking the interpreter down in order.

    A thread that is still loading sits inside torch, which aborts when Python is pulled from under it.
    """
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    exit_at_once(main())
