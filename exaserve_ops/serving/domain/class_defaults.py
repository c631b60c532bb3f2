"""What a model class takes for a field that config.json leaves out.

Publishers save only what differs from the class that reads the file, so a missing field has a definite
meaning. A test compares this table with the classes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """Defaults of one `model_type`."""

    layers: int
    heads: int
    kv_heads: int | None
    """`None`: as many as `heads`."""
    head_dim: int | None
    """`None`: hidden size over heads."""
    hidden: int
    positions: int | None
    window_tokens: int | None = None


def _of(
    layers: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    *,
    hidden: int,
    positions: int | None,
    window: int | None = None,
) -> ClassDefaults:
    return ClassDefaults(layers, heads, kv_heads, head_dim, hidden, positions, window)


CLASS_DEFAULTS: Mapping[str, ClassDefaults] = {
    "apertus": _of(32, 32, None, None, hidden=4096, positions=65536),
    "arcee": _of(32, 32, None, None, hidden=2560, positions=4096),
    "bamba": _of(32, 32, 8, None, hidden=4096, positions=262144),
    "bloom": _of(2, 8, None, None, hidden=64, positions=None),
    "cohere": _of(40, 64, None, None, hidden=8192, positions=8192),
    "cohere2": _of(40, 64, None, None, hidden=8192, positions=8192, window=4096),
    "deepseek_v2": _of(32, 32, None, None, hidden=4096, positions=2048),
    "deepseek_v3": _of(61, 128, 128, None, hidden=7168, positions=4096),
    "deepseek_v32": _of(61, 128, 128, None, hidden=7168, positions=163840),
    "ernie4_5": _of(18, 16, 2, 128, hidden=1024, positions=131072),
    "ernie4_5_moe": _of(28, 20, 4, None, hidden=2560, positions=131072),
    "exaone4": _of(32, 32, 32, None, hidden=4096, positions=2048, window=4096),
    "falcon": _of(32, 71, None, None, hidden=4544, positions=2048),
    "falcon_h1": _of(32, 32, 8, None, hidden=4096, positions=8192),
    "falcon_mamba": _of(32, 0, 0, None, hidden=768, positions=None),
    "gemma": _of(28, 16, 16, 256, hidden=3072, positions=8192),
    "gemma2": _of(26, 8, 4, 256, hidden=2304, positions=8192, window=4096),
    "gemma3_text": _of(26, 8, 4, 256, hidden=2304, positions=131072, window=4096),
    "gemma3n_text": _of(35, 8, 2, 256, hidden=2048, positions=32768, window=512),
    "gemma4_text": _of(30, 8, 4, 256, hidden=2304, positions=131072, window=512),
    "glm": _of(40, 32, 2, 128, hidden=4096, positions=131072),
    "glm4": _of(40, 32, 2, 128, hidden=4096, positions=131072),
    "glm4_moe": _of(46, 96, 8, None, hidden=4096, positions=131072),
    "glm4_moe_lite": _of(47, 20, 20, None, hidden=2048, positions=202752),
    "glm_moe_dsa": _of(78, 64, 64, None, hidden=6144, positions=202752),
    "gpt2": _of(12, 12, None, None, hidden=768, positions=1024),
    "gpt_bigcode": _of(12, 12, None, None, hidden=768, positions=1024),
    "gpt_neox": _of(44, 64, None, None, hidden=6144, positions=2048),
    "gpt_oss": _of(36, 64, 8, 64, hidden=2880, positions=131072, window=128),
    "gptj": _of(28, 16, None, None, hidden=4096, positions=2048),
    "granite": _of(32, 32, None, None, hidden=4096, positions=2048),
    "granitemoe": _of(32, 32, None, None, hidden=4096, positions=2048),
    "granitemoehybrid": _of(32, 32, None, None, hidden=4096, positions=2048),
    "jamba": _of(32, 32, 8, None, hidden=4096, positions=262144),
    "kimi_linear": _of(27, 32, 32, None, hidden=2304, positions=1048576),
    "lfm2": _of(32, 32, 8, None, hidden=2560, positions=128000),
    "lfm2_moe": _of(32, 32, 8, None, hidden=2048, positions=128000),
    "llama": _of(32, 32, None, None, hidden=4096, positions=2048),
    "llama4_text": _of(48, 40, 8, 128, hidden=5120, positions=131072),
    "mamba": _of(32, 0, 0, None, hidden=768, positions=None),
    "mamba2": _of(64, 0, 0, None, hidden=4096, positions=None),
    "minimax_m2": _of(62, 48, 8, 128, hidden=3072, positions=196608),
    "ministral": _of(32, 32, 8, None, hidden=4096, positions=131072, window=4096),
    "ministral3": _of(34, 32, 8, 128, hidden=4096, positions=262144),
    "mistral": _of(32, 32, 8, None, hidden=4096, positions=131072, window=4096),
    "mixtral": _of(32, 32, 8, None, hidden=4096, positions=131072),
    "nemotron": _of(32, 48, None, None, hidden=6144, positions=4096),
    "nemotron_h": _of(4, 32, 8, 128, hidden=4096, positions=4096),
    "olmo": _of(32, 32, None, None, hidden=4096, positions=2048),
    "olmo2": _of(32, 32, None, None, hidden=4096, positions=2048),
    "olmo3": _of(32, 32, None, None, hidden=4096, positions=2048, window=4096),
    "olmoe": _of(16, 16, None, None, hidden=2048, positions=4096),
    "opt": _of(12, 12, None, None, hidden=768, positions=2048),
    "phi": _of(24, 32, None, None, hidden=2048, positions=2048),
    "phi3": _of(32, 32, None, None, hidden=3072, positions=4096),
    "phimoe": _of(32, 32, 8, None, hidden=4096, positions=131072),
    "qwen2": _of(32, 32, 32, None, hidden=4096, positions=32768, window=4096),
    "qwen2_moe": _of(24, 16, 16, None, hidden=2048, positions=32768, window=4096),
    "qwen2_vl_text": _of(80, 64, 8, None, hidden=8192, positions=32768, window=4096),
    "qwen2_5_omni_text": _of(28, 28, 4, None, hidden=3584, positions=32768, window=32768),
    "qwen2_5_vl_text": _of(80, 64, 8, None, hidden=8192, positions=32768, window=4096),
    "qwen3": _of(32, 32, 32, 128, hidden=4096, positions=32768, window=4096),
    "qwen3_5_moe_text": _of(40, 16, 2, 256, hidden=2048, positions=32768),
    "qwen3_5_text": _of(32, 16, 4, 256, hidden=4096, positions=32768),
    "qwen3_moe": _of(24, 32, 4, None, hidden=2048, positions=32768, window=4096),
    "qwen3_next": _of(48, 16, 2, 256, hidden=2048, positions=32768),
    "qwen3_vl_moe_text": _of(24, 16, 16, None, hidden=2048, positions=128000),
    "qwen3_vl_text": _of(32, 32, 32, 128, hidden=4096, positions=128000),
    "seed_oss": _of(64, 80, 8, 128, hidden=4096, positions=524288),
    "smollm3": _of(36, 16, 4, None, hidden=2048, positions=32768),
    "stablelm": _of(32, 32, 32, None, hidden=2560, positions=4096),
    "starcoder2": _of(30, 24, 2, None, hidden=3072, positions=4096),
}
