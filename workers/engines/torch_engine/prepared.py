"""What all replicas of a model read alike and none changes: read once, before they are forked.

A tokenizer of 150,000 entries takes more memory than everything else that a replica has of its own
beside KV. A process that the agent keeps for a model reads it and forks replicas off, which find it here.
"""

from __future__ import annotations

from pathlib import Path

from workers.engines.torch_engine.tokenizer import ModelTokenizer

_tokenizers: dict[tuple[Path, str], ModelTokenizer] = {}


def prepare(model_dir: str, model_digest: str) -> None:
    """Read a model's tokenizer for this process and all that it forks. Raises `TokenizerError`.

    Files are known by the model's digest, which the agent has verified before it asks for this.
    """
    folder = Path(model_dir)
    _tokenizers[folder, model_digest] = ModelTokenizer(folder)


def tokenizer_of(model_dir: Path, model_digest: str) -> ModelTokenizer:
    """Return the prepared tokenizer of just this model, or read one. Raises `TokenizerError`."""
    return _tokenizers.get((model_dir, model_digest)) or ModelTokenizer(model_dir)
