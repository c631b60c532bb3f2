"""What the launches of our own engines have in common, and how their metrics pages are read."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import workers
from workers.engines.base import EngineSample, Launch, LaunchContext
from workers.engines.collectives import collective_environment
from workers.engines.exposition import Exposition, PageReader
from workers.kv.tiers.policy import TIERS
from workers.protocol import names
from workers.protocol.observed import KvSwaps, KvTier

METRIC_PREFIX = "exaserve_engine_"
_PROCESS_START = "process_start_time_seconds"
_FALLBACK_PATH = "/usr/local/bin:/usr/bin:/bin"
_reader = PageReader(prefixes=(METRIC_PREFIX, _PROCESS_START))


def own_launch(
    module: str,
    context: LaunchContext,
    arguments: Sequence[str],
    *,
    preload: tuple[str, ...] = (),
    prepare: tuple[str, ...] = (),
) -> Launch:
    """Launch a module of ours with the agent's Python and a clean environment.

    `-P` keeps the working folder off the module path, so no file that lies there is imported. With
    `preload` the module may be forked off a process that has imported those modules, and with `prepare`
    off one that has made that call (see `Launch`).
    """
    whole = (
        f"--model-dir={context.model_dir}",
        f"--served-model-name={context.served_model_name}",
        f"--host={context.host}",
        f"--port={context.ports[0]}",
        *arguments,
    )
    argv = (sys.executable, "-P", "-m", module, *whole)
    if not preload:
        return Launch(argv, _environment(context))
    return Launch(argv, _environment(context), module, whole, preload, prepare)


def parse_own_metrics(page: str) -> EngineSample:
    """Read a page of ours. What it does not say is `None`."""
    found = _reader.read(page)
    blocks, block_tokens = _count(found, "kv_blocks", tier="accelerator"), _count(found, "kv_block_tokens")
    notes = found.notes
    if not found.series:
        notes = (*notes, "no metrics of this engine on the page")
    return EngineSample(
        process_start_seconds=found.find_value(_PROCESS_START),
        requests_running=_count(found, "requests_running"),
        requests_waiting=_count(found, "requests_waiting"),
        kv_used_ratio=found.find_value(METRIC_PREFIX + "kv_used_ratio"),
        kv_evicted_idle_seconds=found.find_value(METRIC_PREFIX + "kv_evicted_idle_seconds"),
        kv_total_blocks=blocks,
        kv_block_tokens=block_tokens,
        kv_capacity_tokens=None if blocks is None or block_tokens is None else blocks * block_tokens,
        prefix_query_tokens=found.find_value(METRIC_PREFIX + "prefix_cache_query_tokens_total"),
        prefix_hit_tokens=found.find_value(METRIC_PREFIX + "prefix_cache_hit_tokens_total"),
        prefix_miss_tokens=_by_label(found, "prefix_cache_miss_tokens_total", "reason"),
        kv_tiers=_read_tiers(found),
        kv_swaps=_read_swaps(found),
        kv_thrash_reason=_reason(found, "kv_thrash"),
        prompt_tokens=found.find_value(METRIC_PREFIX + "prompt_tokens_total"),
        generation_tokens=found.find_value(METRIC_PREFIX + "generation_tokens_total"),
        requests_finished=found.find_value(METRIC_PREFIX + "requests_total"),
        requests_by_outcome=_by_label(found, "requests_total", "outcome"),
        preemptions=found.find_value(METRIC_PREFIX + "preemptions_total"),
        ttft=found.find_histogram(METRIC_PREFIX + "time_to_first_token_seconds"),
        itl=found.find_histogram(METRIC_PREFIX + "inter_token_latency_seconds"),
        queue_time=found.find_histogram(METRIC_PREFIX + "request_queue_seconds"),
        notes=notes,
    )


def _count(found: Exposition, name: str, **labels: str) -> int | None:
    value = found.find_value(METRIC_PREFIX + name, labels)
    return None if value is None else round(value)


def _by_label(found: Exposition, name: str, label: str) -> dict[str, float]:
    rows = found.series.get(METRIC_PREFIX + name, ())
    return {row.labels[label]: row.value for row in rows if label in row.labels and row.value is not None}


def _reason(found: Exposition, name: str, **labels: str) -> str:
    """Reason that a gauge of reasons names; empty while it is 0."""
    rows = found.series.get(METRIC_PREFIX + name, ())
    fitting = (row for row in rows if row.value and labels.items() <= row.labels.items())
    return next((row.labels.get("reason", "") for row in fitting), "")


def _read_tiers(found: Exposition) -> tuple[KvTier, ...]:
    """Tiers that the page has a capacity of, the highest first."""
    tiers = []
    for name in TIERS:
        capacity = _count(found, "kv_capacity_blocks", tier=name)
        if capacity is None:
            continue
        used = (_count(found, "kv_blocks", tier=name, state=state) or 0 for state in ("used", "cached"))
        off_reason = _reason(found, "kv_tier_off", tier=name)
        tiers.append(
            KvTier(name=name, used_blocks=sum(used), capacity_blocks=capacity, off_reason=off_reason)
        )
    return tuple(tiers)


def _read_swaps(found: Exposition) -> KvSwaps | None:
    """What moved; `None` where the page does not tell, which an engine without tiers does not."""
    if _count(found, "kv_fetch_waits_total") is None:
        return None

    def total(name: str, **labels: str) -> int:
        return _count(found, name, **labels) or 0

    return KvSwaps(
        blocks_in=total("kv_swapped_blocks_total", direction="in"),
        blocks_out=total("kv_swapped_blocks_total", direction="out"),
        bytes_in=total("kv_swapped_bytes_total", direction="in"),
        bytes_out=total("kv_swapped_bytes_total", direction="out"),
        fetch_waits=total("kv_fetch_waits_total"),
        checksum_failures=total("kv_checksum_failures_total"),
        preemptions_recompute=total("preemptions_total", kind="recompute"),
        preemptions_swap=total("preemptions_total", kind="swap"),
    )


def _environment(context: LaunchContext) -> dict[str, str]:
    """Only what an engine needs; nothing of the agent's own environment but PATH."""
    folder = str(context.runtime_dir)
    environment = {
        **collective_environment(context.rank),
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
