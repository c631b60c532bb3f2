"""What a server says whose engine has died behind it.

vLLM's API server outlives its EngineCore for a moment and answers for it. Nothing of such an answer was
computed, so another replica may give one. Any other error of an engine is an answer: a request may be
what is wrong, and would be so elsewhere.
"""

from __future__ import annotations

_LAST_WORDS = (b"EngineCore encountered an issue", b"EngineDeadError")
"""Of vLLM, since it has an EngineCore (`vllm/v1/engine/exceptions.py`)."""


def is_said_for_a_dead_engine(beginning: bytes) -> bool:
    """Whether an answer, or the first event of a stream, says that there is no engine any more.

    An answer that merely quotes such words is none: a model's text comes as `choices`.
    """
    return b'"choices"' not in beginning and any(words in beginning for words in _LAST_WORDS)
