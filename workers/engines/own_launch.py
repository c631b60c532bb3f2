"""What the launches of our own engines have in common, and how their metrics pages are read."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import workers
from workers.engines.base import EngineSample, Launch, LaunchContext
from workers.engines.exposition import Exposition, parse_exposition
from workers.protocol import names

METRIC_PREFIX = "exaserve_engine_"
_PROCESS_START = "process_start_time_seconds"
_FALLBACK_PATH = "/usr/local/bin:/usr/bin:/bin"


def own_launch(
    module: str, context: LaunchContext, arguments: Sequence[str], *, preload: tuple[str, ...] = ()
) -> Launch:
    """Launch a module of ours with the agent's Python and a clean environment.

    `-P` keeps the working folder off the module path, so no file that lies there is imported. With
    `preload` the module may be forked off a process that has imported those modules.
    """
    whole = (
        f"--model-dir={context.model_dir}",
        f"--served-model-name={context.served_model_name}",
        f"--host={context.host}",
        f"--port={context.ports[0]}",
        *arguments,
    )
    argv = (sys.executable, "-P", "-m", module, *whole)
    forked = module if preload else ""
    return Launch(argv, _environment(context), forked, whole if preload else (), preload)


def parse_own_metrics(page: str) -> EngineSample:
    """Read a page of ours. What it does not say is `None`."""
    found = parse_exposition(page, prefixes=(METRIC_PREFIX, _PROCESS_START))
    notes = found.notes
    if not found.series:
        notes = (*notes, "no metrics of this engine on the page")
    return EngineSample(
        process_start_seconds=found.find_value(_PROCESS_START),
        requests_running=_count(found, "requests_running"),
        requests_waiting=_count(found, "requests_waiting"),
        kv_used_ratio=found.find_value(METRIC_PREFIX + "kv_used_ratio"),
        kv_total_blocks=_count(found, "kv_blocks"),
        kv_block_tokens=_count(found, "kv_block_tokens"),
        prefix_query_tokens=found.find_value(METRIC_PREFIX + "prefix_cache_query_tokens_total"),
        prefix_hit_tokens=found.find_value(METRIC_PREFIX + "prefix_cache_hit_tokens_total"),
        prompt_tokens=found.find_value(METRIC_PREFIX + "prompt_tokens_total"),
        generation_tokens=found.find_value(METRIC_PREFIX + "generation_tokens_total"),
        requests_finished=found.find_value(METRIC_PREFIX + "requests_total"),
        ttft=found.find_histogram(METRIC_PREFIX + "time_to_first_token_seconds"),
        itl=found.find_histogram(METRIC_PREFIX + "inter_token_latency_seconds"),
        notes=notes,
    )


def _count(found: Exposition, name: str) -> int | None:
    value = found.find_value(METRIC_PREFIX + name)
    return None if value is None else round(value)


def _environment(context: LaunchContext) -> dict[str, str]:
    """Only what an engine needs; nothing of the agent's own environment but PATH."""
    folder = str(context.runtime_dir)
    environment = {
        "PATH": os.environ.get("PATH", _FALLBACK_PATH),
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(context.cpu_threads),
        names.ENV_ENGINE_API_KEY: context.api_key,
    }
    source = _source_folder()
    if source is not None:
        environment["PYTHONPATH"] = source
    return environment


def _source_folder() -> str | None:
    """Folder to find `workers` in, unless it is installed where Python looks anyway."""
    folder = Path(workers.__file__ or "").resolve().parent.parent
    installed = Path(sysconfig.get_path("purelib")).resolve()
    return None if folder == installed else str(folder)
