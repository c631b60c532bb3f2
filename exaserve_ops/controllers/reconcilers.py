"""One reconciler per kind of key: snapshot, plan, apply."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from uuid import UUID

from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.controllers.ports import AgentLink, LivePublisher, RouteWriter
from exaserve_ops.controllers.starts import StartTurns
from exaserve_ops.controllers.wishes import SentWishes, node_marks
from exaserve_ops.inventory.domain.leftovers import parse_end_wish
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.inventory.services.quarantine import quarantine_accelerators
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.routing.selectors import coming_models, inference_keys, routes, served_models
from exaserve_ops.serving.domain.kv_pools import parse_limits_wish
from exaserve_ops.serving.domain.observed import WantedReplica
from exaserve_ops.serving.domain.reconcile import plan_deployment, plan_takeover
from exaserve_ops.serving.domain.steps import (
    Create,
    FinishDeletion,
    Hold,
    LetGo,
    Place,
    Promote,
    Quarantine,
    Replace,
    StandDown,
    Step,
    Wait,
)
from exaserve_ops.serving.selectors import (
    deployment_snapshot,
    live_deployments,
    takeover_snapshot,
    unsettled_deployments,
    wanted_of_node,
)
from exaserve_ops.serving.selectors.logs import LOG_HINT, find_log_by_key
from exaserve_ops.serving.selectors.members import gangs_to_follow
from exaserve_ops.serving.services.deployments import advance_deployment
from exaserve_ops.serving.services.gangs import settle_gang
from exaserve_ops.serving.services.handover import end_drain
from exaserve_ops.serving.services.healing import (
    Promotion,
    make_replacement,
    promote_standbys,
    record_hold,
    stand_down,
)
from exaserve_ops.serving.services.releases import give_way
from exaserve_ops.serving.services.replicas import (
    create_replicas,
    let_go_replica,
    place_replicas,
    record_wait,
)
from exaserve_ops.serving.services.wishes import record_wish
from exaserve_ops.sessions.selectors import active_sessions_by_replica

ACTOR = "controller:serving"
HEALER = "controller:healing"
CANARY_SECONDS = 15.0
"""The wish goes out again so often, changed or not: it proves that commands are taken in."""
GANG_SECONDS = 1.0
"""Between two looks at a replica over several nodes that is not at rest: that time is up rings no bell."""
LOG_TAIL_SECONDS = 30.0
PLANS_AT_ONCE = 8
CREATED_BY_A_PLAN = 4096
CREATED_AT_ONCE = 512
PLACED_AT_ONCE = 96
"""In one transaction: it holds the locks of all of them."""
LONGEST_SPACING_SECONDS = 10.0
SPACING_FACTOR = 9.0
"""A plan is made again no sooner than after so many times what it took, up to the bound above."""

_SPACED = frozenset({"deployment", "routes", "starts"})

_log = logging.getLogger(__name__)


class Reconcilers:
    """Works on one key at a time; `reconcile` is called by several threads with different keys."""

    def __init__(
        self,
        state: FleetState,
        queue: KeyQueue,
        link: AgentLink,
        route_writer: RouteWriter,
        publisher: LivePublisher,
    ) -> None:
        self._state = state
        self._queue = queue
        self._link = link
        self._routes = route_writer
        self._publisher = publisher
        self._wishes = SentWishes()
        self._spacing: dict[tuple[str, str], tuple[float, float]] = {}
        """When a costly key was last worked on, and for how long."""
        self._work = {
            "deployment": self._deployment,
            "takeover": self._take_over,
            "gang": self._settle_gang,
            "gang_wish": self._tell_gang,
            "starts": StartTurns(state, queue).look,
            "node": self._node,
            "canary": self._canary,
            "routes": self._write_routes,
            "keys": self._write_keys,
            "event": self._announce_event,
            LOG_HINT: self._tail_log,
            "end_process": self._end_process,
            "kv_limits": self._set_kv_limits,
        }

    def reconcile(self, kind: str, key: str) -> None:
        """Make the record and the world agree on one object."""
        work = self._work.get(kind)
        if work is None:
            _log.warning("event=unknown_hint kind=%s", kind)
            return
        started = time.monotonic()
        work(key)
        if kind in _SPACED:
            ended = time.monotonic()
            self._spacing[kind, key] = (ended, ended - started)

    def ring(self, kind: str, key: str) -> None:
        """Queue what a hint calls for."""
        if kind == "event":
            key = "new"  # one look covers all that are new
        if kind == "first_route":  # requests wait for it: no distance from the write before
            self._queue.add("routes", "all")
            return
        if kind == "routes":
            key = "all"
        if kind == "keys":
            key = "all"
        if kind in {"deployment", "node"}:
            # Which replicas may be routed to depends on both.
            self._add_spaced("routes", "all", at_least_seconds=0.02)
        if kind == "node":
            self._queue.add("deployment", "all", after_seconds=0.05)
            self._add_spaced("starts", "all")
        if kind == "deployment":
            self._queue.add("takeover", key)  # never spaced: somebody's requests wait for it
            self._add_spaced("starts", "all")
        self._add_spaced(kind, key)

    def _add_spaced(self, kind: str, key: str, *, at_least_seconds: float = 0.0) -> None:
        """Queue a key; one whose work is costly not right after it was done."""
        ended, took = self._spacing.get((kind, key), (-1e9, 0.0))
        pause = min(LONGEST_SPACING_SECONDS, SPACING_FACTOR * took) - (time.monotonic() - ended)
        self._queue.add(kind, key, after_seconds=max(at_least_seconds, pause))

    def resync(self) -> None:
        """Queue everything: whatever hint was lost, it is found here."""
        for deployment_id in live_deployments().values_list("pk", flat=True):
            self._queue.add("deployment", str(deployment_id))
        for node_id in self._wishes.changed(node_marks()):
            self._queue.add("node", node_id)
        for replica_id in gangs_to_follow():
            self._queue.add("gang", str(replica_id))
        self._queue.add("starts", "all")
        self._queue.add("routes", "all")
        self._queue.add("keys", "all")

    def look_at_table(self) -> None:
        """Write the route table again where the store has lost it: a gateway that begins has no other."""
        if self._routes.has_lost():
            self._queue.add("routes", "all")
            self._queue.add("keys", "all")

    def look_at_unsettled(self) -> None:
        """Queue what does not have what it wants: something may be waited for that rings no bell."""
        for deployment_id in unsettled_deployments():
            self._queue.add("deployment", str(deployment_id))
        self._queue.add("starts", "all")

    def _deployment(self, key: str) -> None:
        if key == "all":
            for deployment_id in live_deployments().values_list("pk", flat=True):
                self._add_spaced("deployment", str(deployment_id))
            return
        for _ in range(PLANS_AT_ONCE):
            if not self._plan_once(UUID(key)):
                return

    def _plan_once(self, deployment_id: UUID) -> bool:
        """Plan and carry out; says whether replicas were made, whose places the next plan chooses.

        They do not wait for it in the queue: behind a thousand nodes that is long.
        """
        now = clock.now()
        active = active_sessions_by_replica(deployment_id, now=now)
        snapshot = deployment_snapshot(deployment_id, active_sessions=active, now=now)
        if snapshot is None:
            return False
        plan = plan_deployment(snapshot, now=now)
        self._promote([step for step in plan if isinstance(step, Promote)])
        others = (step for step in plan if not isinstance(step, Promote))
        for place_steps, steps in groupby(others, _is_place):
            for batch in _by_node(steps) if place_steps else ((step,) for step in steps):
                self._carry_out(deployment_id, *batch)
        return any(isinstance(step, Create) for step in plan)

    def _carry_out(self, deployment_id: UUID, *steps: Step) -> None:
        """Carry out one step, or several placements in one transaction."""
        try:
            _apply(deployment_id, *steps)
        except (IllegalTransitionError, ConflictError) as error:
            # A replica moved on since the snapshot was taken; its change rang, so we come again.
            if len(steps) == 1:
                _log.info("event=step_overtaken step=%s error=%s", type(steps[0]).__name__, error)
                return
            for step in steps:
                self._carry_out(deployment_id, step)

    def _take_over(self, key: str) -> None:
        """Promote standbys where replicas are absent, without waiting for a whole plan."""
        if key == "all":
            for deployment_id in live_deployments().values_list("pk", flat=True):
                self._queue.add("takeover", str(deployment_id))
            return
        snapshot = takeover_snapshot(UUID(key))
        if snapshot is None:
            return
        self._promote(plan_takeover(snapshot, now=clock.now()))

    def _promote(self, steps: Sequence[Promote]) -> None:
        """Have standbys serve at once; what rings for it keeps its distance from the write before."""
        if not steps:
            return
        promotions = [
            Promotion(UUID(s.replica_id), UUID(s.instead_of) if s.instead_of else None, s.why) for s in steps
        ]
        left_out = promote_standbys(promotions, actor=HEALER, now=clock.now())
        self._queue.add("routes", "all")
        if left_out:
            # Made by the other of takeover and plan meanwhile, or moved on: its change rang.
            _log.info("event=promotions_overtaken count=%d first=%r", len(left_out), left_out[0])

    def _settle_gang(self, key: str) -> None:
        """Take the next step of a replica over several nodes; again while it is on its way.

        It may be for hours, and there may be as many as nodes: nobody is told that nothing has changed.
        """
        self._follow_gang(key, tells=False)

    def _tell_gang(self, key: str) -> None:
        """The same, and its nodes are told in any case: their wishes are others already."""
        self._follow_gang(key, tells=True)

    def _follow_gang(self, key: str, *, tells: bool) -> None:
        settled = settle_gang(UUID(key), actor=ACTOR, now=clock.now())
        if settled is None:
            return
        if tells or settled.has_changed:
            for node_id in settled.node_ids:
                self._queue.add("node", str(node_id))
            self._add_spaced("routes", "all", at_least_seconds=0.02)
        if not settled.is_at_rest:
            self._queue.add("gang", key, after_seconds=GANG_SECONDS)

    def _node(self, key: str) -> None:
        view = self._state.node(key)
        if not nodes_in_service().filter(pk=key).exists():
            self._state.drop(key)
            self._wishes.drop(key)
            self._routes.drop_facts(key)
            return
        if not view.lease_epoch or view.liveness == DEAD or view.last_report_seconds is None:
            return  # nobody listens; its Hello asks for the wish again
        replicas = wanted_of_node(UUID(key))
        wish = record_wish(UUID(key), content_sha256=_digest(replicas))
        now = time.monotonic()
        due = now - view.wish_sent_seconds >= CANARY_SECONDS
        self._wishes.keep(key, wish.revision, replicas)
        if due or wish.changed:
            self._send_wish(view, wish.revision, replicas)
        self._queue.add("canary", key, after_seconds=view.wish_sent_seconds + CANARY_SECONDS - now)

    def _canary(self, key: str) -> None:
        """Send the wish again as it was sent last; what changed meanwhile rang, and is sent by `_node`."""
        view, kept = self._state.node(key), self._wishes.of(key)
        if kept is None or not view.lease_epoch or view.liveness == DEAD:
            return
        left = view.wish_sent_seconds + CANARY_SECONDS - time.monotonic()
        if left <= 0:
            self._send_wish(view, *kept)
            left = CANARY_SECONDS
        self._queue.add("canary", key, after_seconds=left)

    def _send_wish(self, view: NodeView, revision: int, replicas: tuple[WantedReplica, ...]) -> None:
        self._link.send_wish(view.node_id, lease_epoch=view.lease_epoch, revision=revision, replicas=replicas)
        view.wish_sent_seconds = time.monotonic()

    def _write_routes(self, _key: str) -> None:
        self._routes.write_models(served_models())
        self._routes.write_coming(coming_models())
        self._routes.write_replicas(routes())

    def _write_keys(self, _key: str) -> None:
        self._routes.write_keys(inference_keys(now=clock.now()))

    def _announce_event(self, _key: str) -> None:
        newest = Event.objects.order_by("-pk").values_list("pk", flat=True).first()
        if newest is not None:
            self._publisher.announce_events(newest)

    def _end_process(self, key: str) -> None:
        wish = parse_end_wish(key)
        self._link.end_process(
            wish.node_id,
            lease_epoch=self._state.node(wish.node_id).lease_epoch,
            command_id=key,
            pid=wish.pid,
            start_ticks=wish.start_ticks,
        )

    def _set_kv_limits(self, key: str) -> None:
        wish = parse_limits_wish(key)
        epoch = self._state.node(wish.node_id).lease_epoch
        self._link.set_kv_limits(wish, lease_epoch=epoch, command_id=key)

    def _tail_log(self, key: str) -> None:
        source = find_log_by_key(key)
        if source is None or source.node_id is None or source.problem:
            return  # who reads it is told why
        node_id = str(source.node_id)
        self._link.tail_log(
            node_id,
            lease_epoch=self._state.node(node_id).lease_epoch,
            replica_id=str(source.replica_id),
            seconds=LOG_TAIL_SECONDS,
        )


def _is_place(step: Step) -> bool:
    return isinstance(step, Place)


def _by_node(steps: Iterable[Step]) -> Iterator[tuple[Place, ...]]:
    """Placements in batches; those on one node together, so that its wish changes once."""
    places = [step for step in steps if isinstance(step, Place)]
    places.sort(key=lambda step: step.placement.node_name)  # stable: within a node the plan's order
    for start in range(0, len(places), PLACED_AT_ONCE):
        yield tuple(places[start : start + PLACED_AT_ONCE])


def _apply(deployment_id: UUID, step: Step, *more: Step) -> None:
    now = clock.now()
    match step:
        case Create():
            _create(deployment_id, step, now)
        case Place():
            places = [s for s in (step, *more) if isinstance(s, Place)]
            place_replicas({UUID(s.replica_id): s.placement for s in places}, actor=ACTOR, now=now)
        case Wait():
            record_wait(UUID(step.replica_id), step.why, actor=ACTOR, now=now)
        case LetGo() | StandDown():
            _let_go(step, now)
        case FinishDeletion():
            advance_deployment(deployment_id, "emptied", actor=ACTOR, now=now, reason=step.why)
        case Replace() | Hold() | Quarantine():
            _heal(step, now)
        case Promote():
            raise AssertionError("promotions are carried out together")


def _let_go(step: LetGo | StandDown, now: datetime) -> None:
    replica_id = UUID(step.replica_id)
    if isinstance(step, StandDown):
        stand_down(replica_id, why=step.why, actor=ACTOR, now=now)
    elif step.in_order:
        end_drain(replica_id, why=step.why, actor=ACTOR, now=now)
    else:
        let_go = give_way if step.successor else let_go_replica
        let_go(replica_id, step.event, why=step.why, actor=ACTOR, now=now)


def _create(deployment_id: UUID, step: Create, now: datetime) -> None:
    # No transaction may take as long as thousands do; what is left the next plan finds missing.
    for left in range(min(step.count, CREATED_BY_A_PLAN), 0, -CREATED_AT_ONCE):
        count = min(left, CREATED_AT_ONCE)
        create_replicas(deployment_id, count, why=step.why, actor=ACTOR, now=now, role=step.role)


def _heal(step: Replace | Hold | Quarantine, now: datetime) -> None:
    replica_id = UUID(step.replica_id)
    match step:
        case Replace():
            make_replacement(
                replica_id, step.placement, cause=step.cause, why=step.why, actor=HEALER, now=now
            )
        case Hold():
            record_hold(replica_id, step.why, actor=HEALER, now=now)
        case Quarantine():
            quarantine_accelerators(step.accelerator_uuids, reason=step.why, actor=HEALER, now=now)


def _digest(replicas: tuple[WantedReplica, ...]) -> str:
    return hashlib.sha256(repr(replicas).encode()).hexdigest()
