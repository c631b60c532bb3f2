"""Carrying out what a rollout decided: each action is one transaction, and harmless when done twice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import record_event
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.actions import (
    Action,
    AddWaves,
    Leave,
    LetGo,
    MoveRollout,
    MoveWave,
    NoteGates,
    Roll,
    Stay,
    Wait,
)
from exaserve_ops.rollouts.domain.lifecycle import WAVE
from exaserve_ops.rollouts.domain.policy import read_policy
from exaserve_ops.rollouts.domain.waves import plan_waves
from exaserve_ops.rollouts.models import Rollout, Wave, WaveMember
from exaserve_ops.rollouts.selectors import candidates_of
from exaserve_ops.rollouts.services.rollouts import advance_rollout, subject_of, wave_rows
from exaserve_ops.rollouts.services.weights import keep_old_weights
from exaserve_ops.serving.domain.departure import Departure
from exaserve_ops.serving.domain.lifecycle import READY, STOPPED
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.releases import adopt_release, roll_replicas
from exaserve_ops.serving.services.replicas import let_go_replica
from exaserve_ops.sessions.services.departures import ask_departure, withdraw_departure

ACTOR = "controller:rollouts"
_WHY_CHARACTERS = 1000


def carry_out(rollout: Rollout, action: Action, *, now: datetime) -> None:
    """Carry out one action. Raises `ConflictError` or `IllegalTransitionError` where it was overtaken."""
    match action:
        case MoveRollout():
            _move_rollout(rollout, action, now)
        case MoveWave():
            advance_wave(rollout, action, now)
        case AddWaves():
            _add_waves(rollout, action.why, now)
        case NoteGates():
            gates = [asdict(gate) for gate in action.gates]
            Wave.objects.filter(rollout=rollout, number=action.number).exclude(gates=gates).update(
                gates=gates
            )
        case Wait():
            changed = Rollout.objects.filter(pk=rollout.pk).exclude(waits_for=action.why[:_WHY_CHARACTERS])
            changed.update(waits_for=action.why[:_WHY_CHARACTERS])
        case Roll() | Stay() | Leave() | LetGo():
            _move_replicas(rollout, action, now)


@transaction.atomic
def _move_rollout(rollout: Rollout, action: MoveRollout, now: datetime) -> None:
    if action.event in {"finish", "finish_back"}:
        goes_to = rollout.to_release if action.event == "finish" else rollout.from_release
        # Under its lock nobody makes a replica of the other release meanwhile.
        Deployment.objects.select_for_update().get(pk=rollout.deployment_id)
        others = Replica.objects.filter(deployment=rollout.deployment_id, wanted=Replica.Wanted.RUN)
        if others.exclude(status=STOPPED).exclude(release=goes_to).exists():
            raise ConflictError("a replica of the other release was made meanwhile")
        adopt_release(goes_to.pk, actor=ACTOR, now=now, reason=rollout.reason)
    if action.event == "abandon":
        _release_all(rollout, now)
    advance_rollout(rollout.pk, action.event, why=action.why, actor=ACTOR, now=now)


def _release_all(rollout: Rollout, now: datetime) -> None:
    rolling = Replica.objects.filter(deployment=rollout.deployment_id, rolls_to__isnull=False)
    _stay(list(rolling.values_list("pk", flat=True)), "the rollout ended", now)


@transaction.atomic
def advance_wave(rollout: Rollout, action: MoveWave, now: datetime) -> None:
    """Move a wave's status on by one event, under its row's lock. Raises `IllegalTransitionError`."""
    wave = Wave.objects.select_for_update().get(rollout=rollout, number=action.number)
    before, wave.status = wave.status, WAVE.next(wave.status, action.event)
    wave.why, wave.since = action.why[:_WHY_CHARACTERS], now
    if action.event == "open":
        wave.opened_at, wave.mode = now, action.mode
        rows = [WaveMember(wave=wave, replica_id=UUID(key)) for key in action.members]
        WaveMember.objects.bulk_create(rows, ignore_conflicts=True)
        # Healing may have put old replicas on other nodes since it began.
        keep_old_weights(rollout, actor=ACTOR, now=now)
    if action.event == "reopen":
        wave.members.all().delete()
    if wave.status == states.PASSED:
        wave.passed_at = now
    wave.save()
    Rollout.objects.filter(pk=rollout.pk).update(waits_for="")
    told = f"wave {wave.number} in {wave.domain or 'no node yet'}: {action.why}"
    moved = (before, wave.status)
    record_event(subject_of(rollout), f"wave_{action.event}", actor=ACTOR, now=now, moved=moved, reason=told)


@transaction.atomic
def _add_waves(rollout: Rollout, why: str, now: datetime) -> None:
    Rollout.objects.select_for_update().get(pk=rollout.pk)
    if rollout.waves.exclude(status=states.PASSED).exists():
        raise ConflictError("there is a wave left")
    candidates = candidates_of(rollout.deployment, rollout.to_release, now)
    waves = plan_waves(
        candidates,
        read_policy(rollout.policy),
        begun=rollout.waves.count(),
        width=max(rollout.surge, rollout.unavailable),
    )
    Wave.objects.bulk_create(wave_rows(rollout, waves, now))
    told = f"{len(waves)} more: {why}"
    record_event(subject_of(rollout), "waves_added", actor=ACTOR, now=now, reason=told)


@transaction.atomic
def _move_replicas(rollout: Rollout, action: Roll | Stay | Leave | LetGo, now: datetime) -> None:
    # A person may have paused it since the look: then nothing more begins.
    held = Rollout.objects.select_for_update().get(pk=rollout.pk)
    if held.status != rollout.status:
        raise ConflictError(f"the rollout is {held.status} by now")
    ids = [UUID(key) for key in action.replica_ids]
    match action:
        case Roll():
            roll_replicas(ids, UUID(action.release), in_place=action.in_place)
        case Stay():
            _stay(ids, action.why, now)
        case Leave():
            departure = Departure(
                action.why, targets=action.targets, moves=read_policy(rollout.policy).move_sessions
            )
            asked = ask_departure(ids, departure, actor=ACTOR, now=now)
            Replica.objects.filter(pk__in=asked, leaving_since=None).update(leaving_since=now)
        case LetGo():
            ready = Replica.objects.filter(pk__in=ids, wanted=Replica.Wanted.RUN, status=READY)
            for replica_id in ready.order_by("pk").values_list("pk", flat=True):
                let_go_replica(replica_id, "drain", why=action.why, actor=ACTOR, now=now)


def _stay(ids: Collection[UUID], why: str, now: datetime) -> None:
    roll_replicas(ids, None, in_place=False)
    withdraw_departure(ids, reason=why, actor=ACTOR, now=now)
    Replica.objects.filter(pk__in=ids).update(leaving_since=None)
