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

    Files are known by the model's digest, which the agent has verified before it asks for this. Whether
    packed weights can be shared is tried out here, too: what oneDNN sets up for that takes two megabytes.
    """
    folder = Path(model_dir)
    _tokenizers[folder, model_digest] = ModelTokenizer(folder)
    _try_packing()


def _try_packing() -> None:
    import torch  # noqa: PLC0415 - the engine imports this module before it may take the time for torch

    from workers.engines.torch_engine.packing import layout_key, packs_to_bytes  # noqa: PLC0415 - as above

    threads = torch.get_num_threads()
    # With more, torch would start them, and a fork does not have them.
    torch.set_num_threads(1)
    try:
        if not packs_to_bytes(torch.float32):
            layout_key(torch.float32)
    finally:
        torch.set_num_threads(threads)


def tokenizer_of(model_dir: Path, model_digest: str) -> ModelTokenizer:
    """Return the prepared tokenizer of just this model, or read one. Raises `TokenizerError`."""
    return _tokenizers.get((model_dir, model_digest)) or ModelTokenizer(model_dir)
