"""Starts SGLang in its own environment, with its key out of the environment instead of the command line.

Run by the interpreter that SGLang is installed for, as a file: standard library only, and of this product
nothing but what is made to run inside of engines. SGLang takes its key by a flag, and command lines can be
read by everyone on the machine; this one grows by it inside the process only. It takes no middleware by a
flag either: what stands around its application is put there here. What moves its sessions is outside of all
else, so that other engines reach it without SGLang's key; what has its memory go and come back but once is
next to it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

_KEY = "EXAOPS_ENGINE_API_KEY"
_MOVES = "EXAOPS_SESSION_MOVES"
_SERVER = "sglang.srt.entrypoints.http_server"


def wrap_server(key: str, moves: str) -> str:
    """Put around SGLang's application what is ours; returns why that is not possible."""
    try:
        app: Any = importlib.import_module(_SERVER).app
        build = app.build_middleware_stack
    except (ImportError, AttributeError) as error:
        return f"this SGLang's server is built in another way: {error}"
    memory_turns: Any = importlib.import_module("exaops_moves.memory").MemoryTurns
    session_moves: Any = importlib.import_module("exaops_moves.app").SessionMoves

    def wrapped() -> Any:  # noqa: ANN401 - an ASGI application
        inner = memory_turns(build(), key)
        return inner if moves == "none" else session_moves(inner, key, moves)

    app.build_middleware_stack = wrapped
    return ""


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "inside"))
    lacks = importlib.import_module("exaops_needs").objection()
    if lacks:
        sys.exit(lacks)
    importlib.import_module("exaops_quiet").leave_polls_out()
    key = os.environ.pop(_KEY, "")
    if key:
        sys.argv += ["--api-key", key]
    moves = os.environ.get(_MOVES, "none")
    objection = wrap_server(key, moves) if key else ""
    if objection:
        lost = "its sessions move without their text, and it must not be put to sleep"
        print(f"{lost}: {objection}", file=sys.stderr)  # noqa: T201 - its log
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
