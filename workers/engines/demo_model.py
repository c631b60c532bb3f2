"""`python -m workers.engines.demo_model OUT_DIR`: a small Llama model for trying the product out.

The model is *untrained*: its weights are random numbers from a fixed seed, so its text is a salad of
words. Everything else about it is real: architecture, files, tokenizer, chat template.

Two things are chosen rather than drawn, so that the salad can be read. The first number of the
residual stream is a constant that no layer writes to, and some tokens' output rows read it alone, as
a bias: pieces of words and bytes that do not print are almost never chosen, and the end of the text
comes, when sampling, once in a few hundred tokens. All other output rows are random.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

log = logging.getLogger(__name__)

Array = NDArray[np.float32]

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE = 4, 256, 704, 4, 2, 64
MAX_TOKENS = 4096
BOS, EOS = "<|begin|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|pad|>")

_CONSTANT = 4.0
"""First number of each embedding; the others have a spread of 1."""
_LOGIT_SPREAD = 3.0
_UNREADABLE_BIAS = -20.0
_EOS_BIAS = 4.0

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'developer', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{{ '<|' + role + '|>' }}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so said what
up its about into than them can only other time new some could these two may first then do any like my now
over such our man me even most made after also did many off before must well back through years where much
your way down should because long each just state those people too mr how little good world make very year
still see own work men day get here old life both between being under three never know same last another
while us might great go come since against right came take used himself few house use place during high
without again home around small however found part school every thought once general water night point
almost hand left light head room why number course war until always fact question public group during order
small model token cache block node fleet queue route session request answer memory engine replica stream
window measure second minute cold warm steady bright quiet river mountain garden letter paper window table
green blue red yellow silver golden bread salt apple winter summer spring autumn morning evening music dance
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model, unless it is there already."""
    parser = argparse.ArgumentParser(prog="demo_model", description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    make_demo_model(arguments.out_dir, seed=arguments.seed)
    return 0


def make_demo_model(out_dir: Path, *, seed: int = 0) -> None:
    """Write the model to `out_dir`; the same seed gives the same bytes.

    Does nothing if a model is there. Files are written beside it and renamed into place, so that a
    folder that exists is whole. Raises `FileExistsError` if something else is in the way.
    """
    if (out_dir / "config.json").exists():
        log.info("demo model: already in %s", out_dir)
        return
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        tokenizer = build_tokenizer()
        log.info("demo model: tokenizer with %d tokens", tokenizer.get_vocab_size())
        tokenizer.save(str(partial / "tokenizer.json"))
        weights = build_weights(tokenizer, seed)
        parameters = sum(array.size for array in weights.values())
        log.info("demo model: %.2f million random weights, seed %d", parameters / 1e6, seed)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        _write_settings(partial, tokenizer)
        partial.chmod(0o755)
        (partial / "model.safetensors").chmod(0o644)
        partial.rename(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.info("demo model: written to %s", out_dir)


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE over the bytes and a list of common words, each built letter by letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    space = "\u0120"  # how byte-level BPE writes a space
    for word in dict.fromkeys(_WORDS.split()):
        for spelling in (space + word, word):
            for end in range(1, len(spelling)):
                merged = spelling[: end + 1]
                if merged not in vocabulary:
                    vocabulary[merged] = len(vocabulary)
                    merges.append((spelling[:end], spelling[end]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def build_weights(tokenizer: Tokenizer, seed: int) -> dict[str, Array]:
    """Draw all weights; layers neither read nor write the residual stream's first number."""
    random = np.random.Generator(np.random.PCG64(seed))
    vocabulary = tokenizer.get_vocab_size()
    embedding = random.standard_normal((vocabulary, HIDDEN), dtype=np.float32)
    embedding[:, 0] = _CONSTANT
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(LAYERS):
        weights.update(_layer_weights(random, f"model.layers.{layer}."))
    weights["model.norm.weight"] = np.ones(HIDDEN, dtype=np.float32)
    # After the last norm a row has a mean square of 1, so this spread is that of the logits.
    head = random.standard_normal((vocabulary, HIDDEN), dtype=np.float32)
    head *= np.float32(_LOGIT_SPREAD / np.sqrt(HIDDEN))
    for token, bias in _output_biases(tokenizer):
        head[token, 1:] *= 0
        head[token, 0] = bias / _final_constant()
    weights["lm_head.weight"] = head
    return weights


def _layer_weights(random: np.random.Generator, prefix: str) -> dict[str, Array]:
    def draw(rows: int, columns: int) -> Array:
        matrix = random.standard_normal((rows, columns), dtype=np.float32)
        matrix /= np.float32(np.sqrt(columns))
        return matrix

    query, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    drawn = {
        attention + "q_proj.weight": draw(query, HIDDEN),
        attention + "k_proj.weight": draw(kv, HIDDEN),
        attention + "v_proj.weight": draw(kv, HIDDEN),
        attention + "o_proj.weight": draw(HIDDEN, query),
        mlp + "gate_proj.weight": draw(INNER, HIDDEN),
        mlp + "up_proj.weight": draw(INNER, HIDDEN),
        mlp + "down_proj.weight": draw(HIDDEN, INNER),
    }
    drawn[attention + "o_proj.weight"][0] = 0
    drawn[mlp + "down_proj.weight"][0] = 0
    norms = {
        prefix + "input_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
        prefix + "post_attention_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
    }
    return {**drawn, **norms}


def _final_constant() -> float:
    """About what the constant is after the last norm: each layer adds some 0.7 to the variance."""
    return float(_CONSTANT / np.sqrt(1.0 + 0.7 * LAYERS))


def _output_biases(tokenizer: Tokenizer) -> Iterator[tuple[int, float]]:
    readable = {f" {word}" for word in _WORDS.split()} | set(".,!?")
    for text, token in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if text == EOS:
            yield token, _EOS_BIAS
        elif tokenizer.decode([token]) not in readable:
            yield token, _UNREADABLE_BIAS


def _write_settings(folder: Path, tokenizer: Tokenizer) -> None:
    bos, eos, pad = (tokenizer.token_to_id(text) for text in (BOS, EOS, "<|pad|>"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": "<|pad|>",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    (folder / "README.md").write_text(_README, "utf-8")


_README = f"""# ExaServe demo model

An **untrained** model of the Llama architecture: random weights from a fixed seed, {LAYERS} layers,
hidden size {HIDDEN}, {HEADS} heads over {KV_HEADS} key-value heads, {MAX_TOKENS} positions, byte-level
BPE tokenizer. It is there to try the fleet out with real files and real arithmetic. Its text is a
salad of words and means nothing.
"""


if __name__ == "__main__":
    sys.exit(main())
