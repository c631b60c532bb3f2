"""What to know of settings that an engine takes and that often go wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from workers.protocol.engines.sglang import SGLANG

_HIGH_SHARE = 0.95
_HIGH_STATIC = 0.9
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CACHE_FOLDER = re.compile(r"(?:^|/)models--[^/]+--[^/]+$")
_QUANTISED = re.compile(
    r"(?:^|[-_./])(w\d+a\d+|awq|gptq|fp8|int4|int8|nvfp4|gguf)(?:$|[-_./])", re.IGNORECASE
)
_LENGTHS = ("max_model_len", "context_length")


def advise(engine: str, options: Mapping[str, object], model: str) -> list[str]:
    """Notes on a whole launch, for people."""
    return [*_of_memory(engine, options), *_of_model(options, model)]


def advise_flag(flag: str, values: Sequence[str]) -> list[str]:
    """Notes on a flag that becomes no option."""
    if flag == "--host" and values and values[0] in _LOOPBACK:
        return [
            f"{values[0]} cannot be reached from other machines; replicas here listen on their node's address"
        ]
    if flag == "--enable-log-outputs":
        return ["--enable-log-outputs writes what people are answered into logs; it is left out"]
    return []


def _of_memory(engine: str, options: Mapping[str, object]) -> list[str]:
    notes = []
    share, static = options.get("gpu_memory_utilization"), options.get("mem_fraction_static")
    if isinstance(share, float) and share >= _HIGH_SHARE:
        notes.append(
            f"gpu_memory_utilization {share:g} leaves {1 - share:.0%} for contexts and all else on the card"
            ": it may end for want of memory while it starts"
        )
    if isinstance(static, float) and static > _HIGH_STATIC:
        notes.append(
            f"mem_fraction_static {static:g} leaves {1 - static:.0%} for activations and graphs: it may end"
            " for want of memory while it starts"
        )
    if not any(name in options for name in _LENGTHS):
        name = "context_length" if engine == SGLANG else "max_model_len"
        notes.append(f"{name} is not said: the model's own longest context counts, and its KV must fit")
    return notes


def _of_model(options: Mapping[str, object], model: str) -> list[str]:
    notes = [] if model else ["no model is named: choose the one that is to be served"]
    if _CACHE_FOLDER.search(model):
        notes.append(
            f"{model} looks like a folder of Hugging Face's cache: weights lie below it, in snapshots/…"
        )
    quantised = _QUANTISED.search(model)
    if quantised:
        notes.append(
            f"the model's name says {quantised[1]}: its weights are quantised: the size of its files counts"
        )
    if options.get("trust_remote_code"):
        notes.append(
            "trust_remote_code runs Python that comes with the model: only nodes that allow it will start it"
        )
    if "ForSequenceClassification" in str(options.get("hf_overrides", "")):
        notes.append("hf_overrides make it a pooling model: it scores, and answers no chat")
    if options.get("load_format") == "dummy":
        notes.append("load_format dummy makes weights up: for trying speed, not answers")
    return notes
