"""Paths of vLLM's server that only some versions have (vllm/entrypoints/serve/dev)."""

from __future__ import annotations

from workers.engines.endpoints import SLEEP, WAKE, Endpoint, EndpointTable

ENDPOINTS: EndpointTable = {
    # Level 1 keeps the weights in host memory. Versions without `mode` pass over it and sleep at once, which
    # is the same for a standby: nothing is open there.
    SLEEP: (Endpoint("/sleep?level=1&mode=wait", "POST", since=(0, 8)),),
    WAKE: (Endpoint("/wake_up", "POST", since=(0, 8)),),
}
