"""All swarms of one node: one server that gives, and a member for each revision that is on its way.

Nothing listens while the node is in no swarm. Orders come with the wish of what is to be on the disk, and
say all of a node's part: keys, and for each stripe whom to pull from. A revision that is whole is given
from its place; one on its way, from staging.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from workers.protocol.manifest import Manifest
from workers.protocol.weights import (
    SwarmComplaint,
    SwarmOrder,
    SwarmSeen,
    SwarmStream,
    WeightsWanted,
)
from workers.weights.fetching import Fetching
from workers.weights.sources.port import Source, SourceError
from workers.weights.staging import Staged
from workers.weights.swarm import passes
from workers.weights.swarm.board import PieceBoard
from workers.weights.swarm.member import MemberStatus
from workers.weights.swarm.parents import Parent
from workers.weights.swarm.pieces import PieceRow
from workers.weights.swarm.pulling import PullLimits
from workers.weights.swarm.rates import RateCap
from workers.weights.swarm.serving import PieceServer, ServeLimits, Share
from workers.weights.swarm_fetch import SwarmFetch

_MOST_TOLD = 16
_NICENESS = 10

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    """This node's part in one swarm."""

    order: SwarmOrder
    keys: passes.KeyRing = field(default_factory=passes.KeyRing)
    fetch: SwarmFetch | None = None
    given: bool = False
    """Given from its place on the disk."""


class SwarmDesk:
    """May be used from any thread."""

    def __init__(
        self,
        node_id: str,
        address: str,
        ready_folder: Callable[[str], Path],
        *,
        port: int = 0,
        serves: ServeLimits | None = None,
        pulls: PullLimits | None = None,
    ) -> None:
        """Give on this address and port, once there is a swarm; 0: on any free port."""
        self._node_id, self._address, self._port = node_id, address, port
        self._serves = serves
        self._ready_folder = ready_folder
        self._pulls = pulls or PullLimits()
        self._server: PieceServer | None = None
        self.problem = ""
        """Why nothing can be given; empty where it can."""
        self._lock = threading.Lock()
        self._parts: dict[str, _Part] = {}
        """By the manifest's name."""

    @property
    def port(self) -> int:
        """Where pieces are given; 0 while there is no swarm."""
        server = self._server
        return server.port if server is not None else 0

    def close(self) -> None:
        """Give no more; who fetches was stopped before."""
        with self._lock:
            self._parts.clear()
            self._shut()

    def take(self, wanted: Sequence[WeightsWanted]) -> None:
        """Follow these orders from now on; a swarm that is not named any more is left."""
        orders = {one.manifest_digest: one.swarm for one in wanted if one.swarm is not None}
        with self._lock:
            for name in self._parts.keys() - orders.keys():
                del self._parts[name]
                if self._server is not None:
                    self._server.unshare(name)
            if orders and self._listen():
                for name, order in orders.items():
                    self._follow(name, order)
            if not orders:
                self._shut()

    def _listen(self) -> bool:
        if self._server is None:
            try:
                self._server = PieceServer(self._node_id, self._address, port=self._port, limits=self._serves)
            except (OSError, ValueError) as error:
                self.problem = f"no pieces can be given on {self._address}: {error}"
                logger.warning("event=pieces_not_given error=%s", error)
                return False
            self.problem = ""
            self._server.start()
        return True

    def _shut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _follow(self, name: str, order: SwarmOrder) -> None:
        part = self._parts.setdefault(name, _Part(order))
        try:
            part.keys.put(order.epoch, bytes.fromhex(order.key), order.valid_seconds)
        except ValueError as error:
            logger.warning("event=swarm_key_refused manifest=%s error=%s", name[:19], error)
        if part.fetch is not None and (part.order.stripes != order.stripes or not part.fetch.followed):
            part.fetch.follow(_stripes(order))
        part.order = order

    def begin(
        self, staged: Staged, sources: Sequence[Source], caps: Sequence[RateCap], *, nice: bool
    ) -> Fetching:
        """Make the fetch of a revision whose swarm this node is told of; the caller starts it.

        Raises `SourceError` if it was left meanwhile.
        """
        limits = replace(self._pulls, niceness=_NICENESS) if nice else self._pulls
        name = staged.row.name
        with self._lock:
            part, server = self._parts.get(name), self._server
            if part is None or server is None:
                raise SourceError("its swarm was left meanwhile")
            part.given = False
            revision = staged.manifest.revision
            part.fetch = SwarmFetch(
                server,
                staged,
                sources,
                ready_folder=lambda: self._ready_folder(revision),
                keys=part.keys,
                caps=caps,
                limits=limits,
            )
            part.fetch.follow(_stripes(part.order))
            return part.fetch

    def give(self, manifest_digest: str, manifest: Manifest) -> None:
        """Give a revision that is whole to its swarm, if there is one."""
        with self._lock:
            part = self._parts.get(manifest_digest)
            if part is None or self._server is None or part.given:
                return
            if part.fetch is not None and part.fetch.gives:
                return
            row = PieceRow(manifest, manifest_digest)
            revision = manifest.revision
            board = PieceBoard(row, range(row.count))
            share = Share(row, board, part.keys, lambda path: self._open(revision, path))
            self._server.share(manifest_digest, share)
            part.given = True

    def seen(self) -> Mapping[str, SwarmSeen]:
        """What is told of each swarm, by the manifest's name."""
        with self._lock:
            parts, server = dict(self._parts), self._server
        streams: dict[str, list[SwarmStream]] = {}
        for stream in server.streams() if server is not None else ():
            told = SwarmStream(
                child=stream.child,
                bytes_per_second=round(stream.meter.rate()),
                capped_ratio=round(stream.capped_ratio, 2),
            )
            streams.setdefault(stream.name, []).append(told)
        return {name: _seen(part, streams.get(name, ())) for name, part in parts.items()}

    def _open(self, revision: str, path: str) -> int:
        return os.open(self._ready_folder(revision) / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _stripes(order: SwarmOrder) -> list[list[Parent]]:
    return [[Parent(p.node_id, p.host, p.port) for p in parents] for parents in order.stripes]


def _seen(part: _Part, streams: Sequence[SwarmStream]) -> SwarmSeen:
    if part.fetch is None:
        return SwarmSeen(streams=tuple(streams[:_MOST_TOLD]))
    status = part.fetch.status()
    return SwarmSeen(
        pulls=part.fetch.pulls(),
        complaints=_complaints(status),
        streams=tuple(streams[:_MOST_TOLD]),
        pieces=part.fetch.pieces,
        have_pieces=status.have_pieces,
    )


def _complaints(status: MemberStatus) -> tuple[SwarmComplaint, ...]:
    told = [
        SwarmComplaint(parent=node, bad_pieces=s.bad_pieces, unreachable=bool(s.failures) and not s.lives)
        for node, s in status.standings.items()
        if s.bad_pieces or (s.failures and not s.lives)
    ]
    return tuple(told[:_MOST_TOLD])
