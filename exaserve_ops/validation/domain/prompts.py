"""Prompts that are the same in every run: of token ids, so that their length is known exactly. Pure."""

from __future__ import annotations

import hashlib

GOLDEN_TOKENS = 24
"""Length of each golden answer."""
LOAD_ANSWER_TOKENS = 32
"""Length of each answer under load."""
_LOAD_PROMPT_TOKENS = 256
_SPREAD = (16, 24, 40, 64, 96, 144, 200, 256)
"""Lengths of golden prompts: below, at and above usual block sizes."""
_LOWEST_PART, _HIGHEST_PART = 4, 2
"""Ids between these parts of a vocabulary are ordinary ones: special tokens lie at its ends."""


def draw_tokens(label: str, count: int, *, vocabulary: int, seed: int = 0) -> tuple[int, ...]:
    """Draw token ids; the same label and seed draw the same, another label shares no beginning."""
    low = vocabulary // _LOWEST_PART
    span = max(1, vocabulary // _HIGHEST_PART - low)
    drawn: list[int] = []
    block = 0
    while len(drawn) < count:
        digest = hashlib.blake2b(f"{seed}/{label}/{block}".encode()).digest()
        drawn += [low + int.from_bytes(digest[i : i + 4]) % span for i in range(0, len(digest), 4)]
        block += 1
    return tuple(drawn[:count])


def load_prompt_tokens(context_tokens: int) -> int:
    """Length of each prompt under load: the ramp and the search for the best settings ask the same."""
    return max(1, min(_LOAD_PROMPT_TOKENS, context_tokens // 4))


def golden_prompts(*, vocabulary: int, context_tokens: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """The prompts whose answers are compared between launches and engines, with room for an answer.

    In a short context all are shorter by the same measure, so that their lengths still differ.
    """
    most = max(1, context_tokens - GOLDEN_TOKENS - 1)
    longest = _SPREAD[-1]
    lengths = _SPREAD if most >= longest else tuple(max(1, length * most // longest) for length in _SPREAD)
    return tuple(
        draw_tokens(f"golden {number}", length, vocabulary=vocabulary, seed=seed)
        for number, length in enumerate(lengths)
    )
