"""Paths of SGLang's server that only some versions have (sglang/srt/entrypoints/http_server.py)."""

from __future__ import annotations

from workers.engines.endpoints import SLEEP, WAKE, Endpoint, EndpointTable

_ALL_OF_IT = b"{}"
"""Both insist on a body, and without tags in it they mean weights and KV.

Its key is enough for both while there is no admin key, which no option may set. Its scheduler ends, and the
server with it, if memory is to go while anything runs, or is to go or come back twice: the second time never
gets there (`exaops_moves.memory`).
"""

ENDPOINTS: EndpointTable = {
    SLEEP: (Endpoint("/release_memory_occupation", "POST", _ALL_OF_IT, since=(0, 4, 1)),),
    WAKE: (Endpoint("/resume_memory_occupation", "POST", _ALL_OF_IT, since=(0, 4, 1)),),
}
