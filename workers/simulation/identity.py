"""What is agreed on with whoever has nodes simulated: who they are, and what they are called."""

from __future__ import annotations

import msgspec

from workers.protocol.engines.own import SIMULATED_NODE

ENGINE = SIMULATED_NODE
"""The engine that only simulated nodes have, so that nothing real is ever placed on one of them."""
PORTS_PER_SLOT = 2
"""A replica that ended keeps its port until its end is recorded."""


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a node is, and where it says that it stands."""

    name: str
    node_id: str
    node_key: str
    """64 hex digits."""
    rack: str
    supernode: str
    address: str
    """Of the loopback network: nothing simulated is reached from outside."""

    def __repr__(self) -> str:
        return f"NodeIdentity(name={self.name!r})"
