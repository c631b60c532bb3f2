"""Simulated nodes join like others, with a token each, and keep their identities for the next run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from exaserve_ops.adapters.fleet_files import PRIVATE_FOLDER, FleetFiles, write_private
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import create_join_token, enrol_node
from exaserve_ops.lib import clock
from workers.protocol.digests import node_key
from workers.simulation.identity import NodeIdentity

ACTOR = "simulate"
FOLDER = "simulated"
LOOPBACK_NET = 101
"""Second octet of the loopback addresses that simulated nodes name as theirs."""
_IDENTITIES = f"{FOLDER}/identities.json"
_RACKS_IN_SUPERNODE = 4
_HOSTS_IN_NET = 250
_SAID_EVERY = 128


@dataclass(frozen=True, slots=True)
class Wish:
    """How many nodes there shall be, spread evenly over how many racks."""

    nodes: int
    racks: int


def ensure_nodes(
    files: FleetFiles, wish: Wish, fleet_secret: bytes, *, say: Callable[[str], object]
) -> list[NodeIdentity]:
    """Enrol the nodes that have not joined before, and return all with their keys."""
    (files.var / FOLDER).mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    known: dict[str, str] = files.read_json(_IDENTITIES)
    places = node_places(wish)
    wanted = [uuid.UUID(known[name]) for name, _ in places if name in known]
    epochs = dict(Node.objects.filter(pk__in=wanted).values_list("pk", "key_epoch"))
    missing = [name for name, _ in places if name not in known or uuid.UUID(known[name]) not in epochs]
    joined = 0
    for node in _enrol_all(missing):
        known[node.name], epochs[node.pk] = str(node.pk), node.key_epoch
        joined += 1
        if joined % _SAID_EVERY == 0:
            say(f"{joined} nodes have joined")
    # Written by name: a larger fleet of an earlier run keeps its identities.
    write_private(files.var / _IDENTITIES, json.dumps(known, indent=1))
    say(f"{joined} simulated nodes joined, {len(places) - joined} had before")
    return _identities(places, known, epochs, fleet_secret)


def node_places(wish: Wish) -> list[tuple[str, int]]:
    """Name and rack number of each node: `sim-r03-n012` is the twelfth of the third rack."""
    width = len(str(wish.nodes))
    counts = [0] * wish.racks
    places = []
    for index in range(wish.nodes):
        rack = index % wish.racks
        counts[rack] += 1
        places.append((f"sim-r{rack + 1:02d}-n{counts[rack]:0{max(3, width)}d}", rack + 1))
    return places


def loopback_address(index: int) -> str:
    """An address of its own for each node of one machine."""
    return f"127.{LOOPBACK_NET}.{index // _HOSTS_IN_NET}.{index % _HOSTS_IN_NET + 1}"


def _enrol_all(names: Sequence[str]) -> Iterator[Node]:
    """Let them join as an allocation does: all with one token."""
    if not names:
        return
    note = "simulated nodes"
    _, token = create_join_token(actor=ACTOR, now=clock.now(), note=note, max_uses=len(names))
    for name in names:
        yield enrol_node(token_text=token, node_id=uuid.uuid4(), name=name, hostname=name, now=clock.now())


def _identities(
    places: Sequence[tuple[str, int]],
    known: Mapping[str, str],
    epochs: Mapping[uuid.UUID, int],
    fleet_secret: bytes,
) -> list[NodeIdentity]:
    return [
        NodeIdentity(
            name=name,
            node_id=known[name],
            node_key=node_key(fleet_secret, known[name], epochs[uuid.UUID(known[name])]).hex(),
            rack=f"sim-rack-{rack:02d}",
            supernode=f"sim-supernode-{(rack - 1) // _RACKS_IN_SUPERNODE + 1:02d}",
            address=loopback_address(index),
        )
        for index, (name, rack) in enumerate(places)
    ]
