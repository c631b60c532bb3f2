"""Tells people of swarms: what is planned, what was judged, and what the origin gave over time."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from exaserve_ops.controllers.fleet_state import NodeView
from exaserve_ops.controllers.ports import SwarmBoard
from exaserve_ops.controllers.swarms import SwarmLook
from exaserve_ops.lib import clock
from exaserve_ops.weights.domain.held import READY, HeldWeights
from exaserve_ops.weights.domain.swarm_notes import (
    Carried,
    FeedNote,
    Judged,
    MemberSight,
    SwarmNotes,
    with_sights,
)
from exaserve_ops.weights.domain.swarms import PEER

PUBLISH_EVERY_SECONDS = 2.0


class SwarmRecorder:
    """One look at all swarms a step. A board that is away costs a picture and nothing else."""

    def __init__(self, board: SwarmBoard) -> None:
        self._board = board
        self._notes: dict[str, SwarmNotes] | None = None
        self._published_at = -1e9

    def step(self, looks: Mapping[str, SwarmLook], views: Collection[NodeView]) -> None:
        """Take in what nodes say, and publish it; swarms that are over are published once more."""
        if self._notes is None:
            # Those of the leader before: counting goes on from there.
            told = self._board.read()
            self._notes = {key: notes for key, notes in told.items() if notes.ended_at_seconds is None}
        now_seconds = clock.unix_seconds()
        over = self._notes.keys() - looks.keys()
        due = time.monotonic() - self._published_at >= PUBLISH_EVERY_SECONDS
        if not (due or over or looks.keys() - self._notes.keys()):
            return
        news = {key: self._noted(key, look, views, now_seconds) for key, look in looks.items()}
        ended = {key: _ended(self._notes[key], views, now_seconds) for key in over}
        self._notes = news
        if news or ended:
            self._board.publish([*news.values(), *ended.values()])
        self._published_at = time.monotonic()

    def _noted(
        self, revision: str, look: SwarmLook, views: Collection[NodeView], now_seconds: float
    ) -> SwarmNotes:
        before = (self._notes or {}).get(revision) or SwarmNotes(revision, look.total_bytes, now_seconds)
        verdicts, plan = look.verdicts, look.plan
        told = replace(
            before,
            stripes=plan.stripes,
            pace_bytes_per_second=plan.pace_bytes_per_second,
            feeds=tuple(FeedNote(f.child, f.stripe, f.parent, f.depth, f.why) for f in plan.feeds),
            waiting=tuple((one.node_id, one.why) for one in plan.waiting),
            judged=Judged(
                dict(verdicts.barred),
                dict(verdicts.sends),
                dict(verdicts.receives),
                tuple(sorted(verdicts.apart)),
            ),
        )
        return with_sights(told, _sights(revision, look.members, views), now_seconds=now_seconds)


def _ended(notes: SwarmNotes, views: Collection[NodeView], now_seconds: float) -> SwarmNotes:
    """Count what came last; of what is over, neither the plan nor the counts are needed any more."""
    last = with_sights(notes, _sights(notes.revision, notes.counted, views), now_seconds=now_seconds)
    return replace(last, ended_at_seconds=now_seconds, feeds=(), waiting=(), counted={})


def _sights(revision: str, node_ids: Collection[str], views: Collection[NodeView]) -> dict[str, MemberSight]:
    """What these nodes say; one that has nothing of it says so too, and is no seed from then on."""
    found: dict[str, MemberSight] = {}
    for view in views:
        weights = view.heartbeat.weights if view.heartbeat is not None else None
        if weights is not None and view.node_id in node_ids:
            held = next((one for one in weights.held if one.revision == revision), None)
            found[view.node_id] = _sight(held)
    return found


def _sight(held: HeldWeights | None) -> MemberSight:
    if held is None:
        return MemberSight(Carried(), whole=False, bytes_per_second=0.0)
    peers = sum(count for kind, _, count in held.sources if kind == PEER)
    origins = sum(count for kind, _, count in held.sources if kind != PEER)
    return MemberSight(Carried(origins, peers), held.state == READY, held.bytes_per_second)
