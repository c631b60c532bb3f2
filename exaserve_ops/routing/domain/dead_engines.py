"""What a server says whose engine has died behind it.

vLLM's API server outlives its EngineCore for a moment and answers for it. Nothing of such an answer was
computed, so another replica may give one. Any other error of an engine is an answer: a request may be
what is wrong, and would be so elsewhere.
"""

from __future__ import annotations

import json

_OK = 200
_FIRST_SERVER_ERROR = 500
_LAST_WORDS = b"EngineCore encountered an issue"
"""Of vLLM, since it has an EngineCore (`vllm/v1/engine/exceptions.py`)."""
_EVENT = b"data:"


def is_said_for_a_dead_engine(status: int, beginning: bytes) -> bool:
    """Whether an answer, or the first event of a stream, says that there is no engine any more.

    Only what the engine says of itself counts, with the words first. Errors and texts quote what clients
    sent, and nobody may have replicas passed over by what is in a request.
    """
    if _LAST_WORDS not in beginning or (status != _OK and status < _FIRST_SERVER_ERROR):
        return False
    body = beginning.lstrip()
    if body.startswith(_EVENT):
        body = body.removeprefix(_EVENT).partition(b"\n")[0]
    try:
        said = json.loads(body)
    except ValueError:
        return False
    error = (
        said.get("error", said) if isinstance(said, dict) else said
    )  # older versions: without the inner one
    message = error.get("message") if isinstance(error, dict) else None
    return isinstance(message, str) and message.startswith(_LAST_WORDS.decode())
