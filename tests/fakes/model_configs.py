"""Configs of real models, cut down to what their KV depends on, and readings of them that tests share."""

from __future__ import annotations

from typing import Any

from exaserve_ops.serving.domain.kv_bytes import KvBytes, KvOptions, kv_bytes_of
from exaserve_ops.serving.domain.kv_layout import UnknownLayout

BF16 = {"torch_dtype": "bfloat16"}
LLAMA_8B = BF16 | {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
QWEN3_30B = BF16 | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "head_dim": 128,
    "num_experts": 128,
}
DEEPSEEK_V3 = BF16 | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GEMMA_3_27B = BF16 | {
    "model_type": "gemma3",
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16},
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}
GPT_OSS_20B = BF16 | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]},
}
QWEN3_NEXT = BF16 | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "full_attention_interval": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
GEMMA_4_31B = BF16 | {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "num_global_key_value_heads": 4,
        "global_head_dim": 512,
    },
}
MISTRAL_V01 = BF16 | {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "sliding_window": 4096,
}


def qwen35(layers: int, heads: int, hidden: int) -> dict[str, Any]:
    """Qwen3.5 and its successors: nested, and three of four layers keep a state instead of tokens."""
    return {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "hidden_size": hidden,
            "full_attention_interval": 4,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
        },
    }


def known(config: dict[str, Any], **options: Any) -> KvBytes:
    """KV bytes of a config whose layout must be known."""
    found = kv_bytes_of(config, KvOptions(**options))
    assert isinstance(found, KvBytes), found
    return found


def refused(config: dict[str, Any], **options: Any) -> UnknownLayout:
    """Why a config whose layout must not be known is refused."""
    found = kv_bytes_of(config, KvOptions(**options))
    assert isinstance(found, UnknownLayout), found
    return found


def parts(config: dict[str, Any], **options: Any) -> tuple[int, int, int]:
    """Growth a token, what windows hold at most, and fixed state."""
    whole = known(config, **options).whole
    return whole.growth_bytes_per_token, whole.capped_bytes(), whole.state_bytes
