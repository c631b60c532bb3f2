"""What tells the libraries by which ranks talk (NCCL, gloo) where they are to do it."""

from __future__ import annotations

from workers.engines.base import NodeRank


def collective_environment(rank: NodeRank | None) -> dict[str, str]:
    """Variables for the ranks of a replica over several nodes; what is not known is left to the library."""
    if rank is None:
        return {}
    found = {}
    if rank.interface:
        # `=`: of this very name; else NCCL takes it for the beginning of one, and `eth1` is `eth10` too.
        found["NCCL_SOCKET_IFNAME"] = f"={rank.interface}"
        found["GLOO_SOCKET_IFNAME"] = rank.interface
    if rank.adapters:
        found["NCCL_IB_HCA"] = f"={','.join(rank.adapters)}"
    return found
