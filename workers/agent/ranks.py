"""Where the processes of a replica over several nodes meet, and by which way: what a launch is told of it."""

from __future__ import annotations

from itertools import accumulate

from workers.engines import base
from workers.probes.interfaces import find_interface, rdma_adapters
from workers.protocol.addresses import AddressError, HostPort, parse_host_port
from workers.protocol.wish import GangMember, ReplicaSpec


def port_blocks(adapter: base.EngineAdapter, spec: ReplicaSpec) -> tuple[base.PortBlock, ...]:
    """What to lease for a replica; the head's rendezvous is among it, by the engine's wish or as one more."""
    if isinstance(adapter, base.NeedsPorts):
        blocks = adapter.port_blocks(spec.engine_options)
    else:
        blocks = (base.PortBlock(""),) * adapter.port_count
    is_head = spec.member is not None and spec.member.number == 0
    if not is_head or any(block.purpose == base.RENDEZVOUS for block in blocks):
        return blocks
    return (*blocks, base.PortBlock(base.RENDEZVOUS))


def place_rank(
    member: GangMember, *, host: str, blocks: tuple[base.PortBlock, ...], ports: tuple[int, ...]
) -> base.NodeRank:
    """Place of this node's process. `ports` were leased for `blocks`. Raises `AddressError`."""
    if member.number == 0:
        meeting = _leased(host, blocks, ports)
    else:
        meeting = _with_port(member.rendezvous)
        _with_port(member.head_address)
    others = [other for number, other in enumerate(member.hosts) if number != member.number]
    return base.NodeRank(
        rank=member.number,
        nodes=member.count,
        master_host=meeting.host,
        master_port=meeting.port or 0,
        key=member.key,
        hosts=member.hosts,
        interface=find_interface(host, others[0] if others else ""),
        adapters=rdma_adapters(member.adapters),
    )


def _with_port(text: str) -> HostPort:
    found = parse_host_port(text)
    if found.port is None:
        raise AddressError(f"{text!r}, where the head of this replica is said to be, has no port")
    return found


def _leased(host: str, blocks: tuple[base.PortBlock, ...], ports: tuple[int, ...]) -> HostPort:
    ends = accumulate(block.count for block in blocks)
    places = zip(blocks, ends, strict=True)
    first = next(end - block.count for block, end in places if block.purpose == base.RENDEZVOUS)
    return HostPort(host, ports[first])
