"""What was asked for of a deployment, and what changed in it, in words for its history. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exaserve_ops.lib.units import size_text


def asked_words(nodes: int, asked: Mapping[str, Any]) -> list[str]:
    """What is asked of nodes and accelerators, for the history."""
    words = [f"each on {nodes} nodes"] if nodes > 1 else []
    if "accelerator" in asked:
        words.append(f"on {asked['accelerator']} accelerators")
    if "slice_memory_bytes" in asked:
        words.append(f"slices of {size_text(asked['slice_memory_bytes'])} or more")
    if "mps_thread_percent" in asked:
        words.append(f"{asked['mps_thread_percent']}% of an accelerator's threads")
    if "mps_memory_bytes" in asked:
        words.append(f"at most {size_text(asked['mps_memory_bytes'])} of an accelerator")
    if "spill_reason" in asked:
        words.append(f"whole cards opened: {asked['spill_reason']}")
    return words


def change_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, str]:
    """What a change is called, and what changed, in words."""
    changed = [name for name in after if after[name] != before[name]]
    if set(changed) <= {"spill", "spill_reason"}:
        return ("pool_opened", after["spill_reason"]) if after["spill"] else ("pool_closed", "")
    words = ", ".join(f"{name} {_word(before[name])} to {_word(after[name])}" for name in changed)
    return "scaled" if set(changed) <= {"replicas", "standbys"} else "changed", words


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
