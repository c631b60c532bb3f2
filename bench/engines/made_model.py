"""A model of realistic shape and random weights: Qwen3 with grouped heads, made by seed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE = 10, 640, 1920, 10, 2, 64
VOCABULARY = 32_000
MAX_TOKENS = 4096


def make_model(folder: Path, *, seed: int, dtype: str) -> int:
    """Write the model into an empty folder; returns its number of parameters."""
    weights = _draw(torch.Generator().manual_seed(seed))
    kind = getattr(torch, dtype)
    save_file({name: tensor.to(kind) for name, tensor in weights.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8"
    )
    _tokenizer().save(str(folder / "tokenizer.json"))
    return sum(tensor.numel() for tensor in weights.values())


def _draw(random: torch.Generator) -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * float(columns**-0.5)

    query, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    weights = {
        # A tied head reads this too, so its spread is that of the logits.
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN) * 3.0,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            prefix + "self_attn.q_norm.weight": torch.ones(HEAD_SIZE),
            prefix + "self_attn.k_norm.weight": torch.ones(HEAD_SIZE),
            prefix + "self_attn.q_proj.weight": matrix(query, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(kv, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(kv, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, query),
            prefix + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return weights


def _tokenizer() -> Tokenizer:
    """A word of its own for each token id, so that text tells which tokens it was made of."""
    words = {f"word{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="word0"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
