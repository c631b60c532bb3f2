"""Reading of rollouts: as their next step sees them, and as people do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Avg, Q, QuerySet

from exaserve_ops.audit.models import Event
from exaserve_ops.health.selectors import healing_freeze
from exaserve_ops.inventory.domain.liveness import ALIVE, SUSPECT
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import rack_of
from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.gates import Answers
from exaserve_ops.rollouts.domain.policy import longest_move_seconds, read_policy, resolve
from exaserve_ops.rollouts.domain.preflight import PreflightFacts, ReleaseContent
from exaserve_ops.rollouts.domain.spread_of_values import add_up, from_json
from exaserve_ops.rollouts.domain.view import IN_PLACE, RolloutView, Seat, WaveState, WeightsUnderWay
from exaserve_ops.rollouts.domain.waves import Candidate
from exaserve_ops.rollouts.models import ReleaseAnswers, Rollout, Wave
from exaserve_ops.serving.domain.lifecycle import ACTIVE, PENDING, STOPPED
from exaserve_ops.serving.domain.placement import NodeRoom, PlacementBoard, PlacementRequest, Refusal
from exaserve_ops.serving.domain.reach import CLOSED
from exaserve_ops.serving.domain.trials import refusal_of_change
from exaserve_ops.serving.models import Deployment, Release, Replica
from exaserve_ops.serving.selectors.rooms import node_rooms, placement_request
from exaserve_ops.sessions.selectors import active_sessions_by_replica, departures
from exaserve_ops.validation.selectors import latest_go

SLOT_SECONDS = 10
_USUAL_START_SECONDS = 60.0

_SEAT = (
    *("pk", "name", "release_id", "status", "wanted", "node_id", "role", "reach", "rolls_to_id"),
    *("rolls_in_place", "replaces_id", "leaving_since", "reason", "restarts", "status_changed_at"),
    "sleep_state",
)


def live_rollouts() -> list[Rollout]:
    """Rollouts that have begun and not ended, the oldest first."""
    begun = (states.RUNNING, states.PAUSED, states.HALTED, states.ROLLING_BACK)
    rows = Rollout.objects.filter(status__in=begun).order_by("created_at")
    return list(rows.select_related("deployment", "from_release__model", "to_release__model"))


def rollouts_with_releases() -> QuerySet[Rollout]:
    """All rollouts with what they move."""
    return Rollout.objects.select_related("deployment", "from_release__model", "to_release__model")


def rollout_of(deployment_id: UUID) -> Rollout | None:
    """The rollout of a deployment that has not ended."""
    return rollouts_with_releases().filter(deployment=deployment_id, status__in=states.ROLLOUT.live).first()


@dataclass(frozen=True, slots=True)
class NodePlace:
    """What matters of a node here."""

    name: str
    domain: str
    alive: bool


def node_places(node_ids: Iterable[UUID | None]) -> dict[UUID, NodePlace]:
    """Name and failure domain of nodes, as placement says it."""
    found = {}
    for node in Node.objects.filter(pk__in=[pk for pk in node_ids if pk]).select_related(
        "failure_domain__parent"
    ):
        rack = rack_of(node)
        domain = f"rack {rack}" if rack else f"node {node.name}"
        found[node.pk] = NodePlace(node.name, domain, node.liveness in {ALIVE, SUSPECT})
    return found


def rollout_view(rollout: Rollout, *, weights: WeightsUnderWay, now: datetime) -> RolloutView:
    """Everything that the next step of a rollout depends on."""
    deployment = rollout.deployment
    waves = list(rollout.waves.prefetch_related("members"))
    current = next((wave for wave in waves if wave.status != states.PASSED), None)
    since = current.since if current is not None else rollout.status_changed_at
    seats = _seats(rollout, waves, now)
    new = {seat.replica_id for seat in seats if seat.release == str(rollout.to_release_id)}
    answers = answers_of(rollout, since=since)
    return RolloutView(
        id=str(rollout.pk),
        status=rollout.status,
        policy=read_policy(rollout.policy),
        old_release=str(rollout.from_release_id),
        new_release=str(rollout.to_release_id),
        wanted=deployment.replicas,
        surge=rollout.surge,
        unavailable=rollout.unavailable,
        seats=seats,
        waves=tuple(_wave_state(wave) for wave in waves),
        running_since=rollout.status_changed_at,
        move_seconds=move_seconds(rollout, current),
        start_seconds=float(deployment.start_seconds),
        new_answers=answers.get(rollout.to_release_id, Answers()),
        old_answers=answers.get(rollout.from_release_id, Answers()),
        # Between two waves healing makes replicas of it, too: those count from when it began or went on.
        failed=_given_up(rollout, rollout.status_changed_at),
        out_of_blocks=Event.objects.filter(
            subject_kind="replica", subject_id__in=new, event="kv_out_of_blocks", at__gte=since
        ).count(),
        weights=weights,
        deployment_ends=deployment.status != ACTIVE,
        frozen=healing_freeze(),
        has_surge_room=_looks_for_room(rollout, current) and surge_room(rollout, now=now) > 0,
    )


def _looks_for_room(rollout: Rollout, current: Wave | None) -> bool:
    """Whether the next step asks: it takes a look at every node."""
    back = rollout.status == states.ROLLING_BACK
    return bool(rollout.surge) and (back or (current is not None and current.status == states.WAITING))


def surge_room(rollout: Rollout, *, now: datetime) -> int:
    """Whether one more replica of the release that it moves to fits now, as a count of 0 or 1."""
    back = rollout.status == states.ROLLING_BACK
    target = rollout.from_release if back else rollout.to_release
    count, _ = count_room(placement_request(target), node_rooms(rollout.deployment_id, now=now), most=1)
    return count


def count_room(request: PlacementRequest, rooms: Collection[NodeRoom], *, most: int) -> tuple[int, str]:
    """How many more replicas fit, up to `most`, and why not one more."""
    board = PlacementBoard(request, rooms)
    for count in range(most):
        choice = board.place(standby=False)
        if isinstance(choice, Refusal):
            return count, choice.summary()
    return most, ""


def move_seconds(rollout: Rollout, wave: Wave | None) -> float:
    """For how long a wave may move: every batch may start, be left and drain once, and then some."""
    deployment = rollout.deployment
    in_place = wave is not None and wave.mode == IN_PLACE
    return longest_move_seconds(
        wave.planned if wave is not None else 1,
        rollout.unavailable if in_place else rollout.surge,
        deployment.start_seconds + deployment.drain_seconds,
        read_policy(rollout.policy),
    )


def _wave_state(wave: Wave) -> WaveState:
    return WaveState(
        number=wave.number,
        status=wave.status,
        domain=wave.domain,
        planned=wave.planned,
        soak_seconds=wave.soak_seconds,
        needs_approval=wave.needs_approval,
        since=wave.since,
        members=tuple(str(member.replica_id) for member in wave.members.all()),
        mode=wave.mode,
        why=wave.why,
        domains=tuple(wave.domains),
    )


def _seats(rollout: Rollout, waves: Collection[Wave], now: datetime) -> tuple[Seat, ...]:
    """Live replicas of the deployment, and those of the wave that have stopped."""
    members = {
        member.replica_id
        for wave in waves
        if wave.status in {states.PREWARMING, states.MOVING, states.SOAKING}
        for member in wave.members.all()
    }
    own = Replica.objects.filter(deployment=rollout.deployment_id).order_by()
    rows = list(own.filter(~Q(status=STOPPED) | Q(pk__in=members)).values_list(*_SEAT, named=True))
    places = node_places({row.node_id for row in rows if row.node_id})
    leaving = departures([row.pk for row in rows if row.leaving_since is not None], now=now)
    active = active_sessions_by_replica(rollout.deployment_id, now=now)
    found = []
    for row in rows:
        place = places.get(row.node_id) or NodePlace("", "", row.status == PENDING)
        left = leaving.get(row.pk)
        found.append(
            Seat(
                replica_id=str(row.pk),
                name=row.name,
                release=str(row.release_id),
                status=row.status,
                is_wanted=row.wanted == Replica.Wanted.RUN and row.status != STOPPED,
                domain=place.domain,
                node_id=str(row.node_id or ""),
                node_name=place.name,
                node_alive=place.alive,
                serves=row.role == Replica.Role.SERVING,
                is_closed=row.reach in CLOSED or (row.role == Replica.Role.SERVING and bool(row.sleep_state)),
                rolls_to=str(row.rolls_to_id or ""),
                in_place=row.rolls_in_place,
                replaces=str(row.replaces_id or ""),
                leaving_since=row.leaving_since,
                sessions_left=left.sessions_left + left.moves_underway if left is not None else 0,
                active_sessions=active.get(str(row.pk), 0),
                reason=row.reason,
                restarts=row.restarts,
                since=row.status_changed_at,
            )
        )
    return tuple(found)


def _given_up(rollout: Rollout, since: datetime) -> tuple[str, ...]:
    rows = Replica.objects.filter(release=rollout.to_release_id, failed_at__gte=since).order_by("name")
    return tuple(f"{name}: {reason}" for name, reason in rows.values_list("name", "reason"))


# -- answers -----------------------------------------------------------------------------------------
def answers_of(rollout: Rollout, *, since: datetime) -> dict[UUID, Answers]:
    """What each release answered from the ten seconds on in which `since` lies."""
    first = since - timedelta(seconds=SLOT_SECONDS)
    rows = list(ReleaseAnswers.objects.filter(rollout=rollout, slot_at__gt=first))
    found = {}
    for release_id in {row.release_id for row in rows}:
        own = [row for row in rows if row.release_id == release_id]
        found[release_id] = Answers(
            requests=sum(row.requests for row in own),
            failed=sum(row.failed for row in own),
            ttft=by_kind(row.ttft for row in own),
            itl=add_up(from_json(row.itl) for row in own),
        )
    return found


def by_kind(kept: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[int, int]]:
    """Durations of many slots together, by kind of answer."""
    slots = list(kept)
    kinds = {kind for slot in slots for kind in slot}
    return {kind: add_up(from_json(slot.get(kind, {})) for slot in slots) for kind in kinds}


# -- before it begins --------------------------------------------------------------------------------
def preflight_facts(
    deployment: Deployment,
    new: Release,
    *,
    max_surge: str,
    bytes_to_bring: Mapping[str, int],
    full_disks: Collection[str],
    now: datetime,
) -> PreflightFacts:
    """Everything that the plan of a rollout is made from."""
    old = deployment.releases.select_related("model", "deployment").get(number=deployment.release_number)
    rooms = node_rooms(deployment.pk, now=now)
    candidates = candidates_of(deployment, new, now)
    request = placement_request(new)
    most = resolve(max_surge, deployment.replicas)
    room, why = count_room(request, rooms, most=most) if most else (0, "")
    took = Replica.objects.filter(deployment=deployment, start_took_seconds__isnull=False)
    return PreflightFacts(
        deployment=str(deployment.pk),
        wanted=deployment.replicas,
        old=content_of(old),
        new=content_of(new),
        candidates=candidates,
        surge_room=room,
        no_surge_why=why,
        misfits=_misfits(deployment, placement_request(old), request, rooms),
        obstacles=_obstacles(deployment, old, new),
        bytes_to_bring=bytes_to_bring,
        full_disks=tuple(full_disks),
        start_seconds=took.aggregate(mean=Avg("start_took_seconds"))["mean"] or _USUAL_START_SECONDS,
        drain_seconds=float(deployment.drain_seconds),
    )


def content_of(release: Release) -> ReleaseContent:
    """What a release runs."""
    return ReleaseContent(
        number=release.number,
        model_id=str(release.model_id),
        model_name=release.model.name,
        engine=release.engine,
        engine_options=dict(release.engine_options),
        replica_memory_bytes=release.replica_memory_bytes,
    )


def candidates_of(deployment: Deployment, new: Release, now: datetime) -> tuple[Candidate, ...]:
    """Replicas of a deployment that do not run a release yet."""
    kept = Replica.objects.filter(deployment=deployment, wanted=Replica.Wanted.RUN).exclude(status=STOPPED)
    rows = list(kept.exclude(release=new).values_list("pk", "name", "node_id", "role"))
    places = node_places({row[2] for row in rows})
    active = active_sessions_by_replica(deployment.pk, now=now)
    return tuple(
        Candidate(
            str(pk),
            name,
            places[node_id].domain if node_id in places else "",
            places[node_id].name if node_id in places else "",
            active.get(str(pk), 0),
            is_standby=role == Replica.Role.STANDBY,
        )
        for pk, name, node_id, role in rows
    )


def _obstacles(deployment: Deployment, old: Release, new: Release) -> tuple[str, ...]:
    found = []
    if deployment.status != ACTIVE:
        found.append(f"The deployment is {deployment.status}.")
    if why := refusal_of_change(deployment.name, deployment.served_name):
        found.append(f"{why[0].upper()}{why[1:]}.")
    if old.pk == new.pk:
        found.append(f"The deployment runs release {old.number} already: change the model or an option.")
    if deployment.requires_go and latest_go(new.model_id, new.engine) is None:
        found.append(
            f"It requires a go, and no validation of {new.model.name} on {new.engine} has ended with one: "
            "validate the model first, on its page."
        )
    running = rollout_of(deployment.pk)
    if running is not None:
        found.append(f"Another rollout of it is {running.status.replace('_', ' ')}: let that one end first.")
    others = Deployment.objects.filter(served_name=deployment.served_name, status=ACTIVE)
    namesakes = others.exclude(pk=deployment.pk).exclude(model__digest=new.model.digest)
    if namesakes.exists() and old.model.digest != new.model.digest:
        names = ", ".join(namesakes.values_list("name", flat=True))
        found.append(
            f"{names} answers for '{deployment.served_name}', too, with other weights, and would go on with "
            "them: delete it first, or have it serve under another name."
        )
    if not new.replica_memory_bytes:
        found.append("How much memory a replica of it needs is not known: say it.")
    return tuple(found)


def _misfits(
    deployment: Deployment, old: PlacementRequest, new: PlacementRequest, rooms: Collection[NodeRoom]
) -> tuple[str, ...]:
    """Where a new replica would not fit once an old one is gone."""
    accelerators = {a.uuid: (room, a) for room in rooms for a in room.accelerators}
    links = Replica.accelerators.through.objects.filter(
        replica__deployment=deployment, replica__wanted=Replica.Wanted.RUN
    ).exclude(replica__status=STOPPED)
    users = Counter(links.order_by().values_list("accelerator", flat=True))
    found = []
    for uuid in sorted(users):
        if uuid not in accelerators:
            continue
        room, accelerator = accelerators[uuid]
        freed = accelerator.cost_bytes(old) + max(0, accelerator.free_bytes)
        needed = accelerator.cost_bytes(new)
        if needed > freed:
            found.append(f"{room.name} would have {freed >> 20} MiB, {needed >> 20} MiB are needed")
        if new.engine not in room.engines:
            found.append(f"{room.name} has no engine '{new.engine}'")
    return tuple(found)
