"""Does with a validation's trial what its checks need: other launches, and sleep. One step at a time.

Each function is called until it answers; the first call, and only that, changes what is wanted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from uuid import UUID

from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain.lifecycle import BACKING_OFF, FAILED, READY
from exaserve_ops.serving.domain.sleep import ASLEEP, AWAKE
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import replace_replica
from exaserve_ops.validation.domain.asking import Launched, Slept
from exaserve_ops.validation.models import Validation
from exaserve_ops.validation.selectors import launch_seconds, leaving_replicas, trial_replica
from exaserve_ops.validation.services import ACTOR, relaunch_trial, set_trial_asleep

SLEEP_SECONDS = 300.0
"""Agents give up sooner, and say why."""


class TrialTurn:
    """One need of a check that the trial has to be changed for."""

    def __init__(self, validation: Validation) -> None:
        replica = _replica(validation)
        self._began_at_seconds = time.monotonic()
        self._left: UUID | None = replica.pk if replica is not None else None
        self._attempt = replica.attempt if replica is not None else 0
        self._begun = False
        self._launch_seconds = launch_seconds(validation.trial)

    def launch_again(self, validation: Validation) -> Launched | None:
        """Have another replica of the same release; `None` while it starts."""
        replica = _replica(validation)
        if not self._begun:
            self._begun = True
            if replica is not None:
                why = "launched again to compare"
                replace_replica(replica.pk, why=why, actor=ACTOR, now=clock.now(), by_validation=True)
            return None
        return self._launched(validation, replica)

    def launch_with(self, validation: Validation, options: Mapping[str, int]) -> Launched | None:
        """Have a replica with these options; `None` while it starts. One that has them is let be."""
        replica = _replica(validation)
        if not self._begun:
            self._begun = True
            try:
                if not relaunch_trial(validation, options, now=clock.now()):
                    self._left = None  # what runs is what is asked for
            except (InvalidInputError, ConflictError) as error:
                return Launched(done=False, why=str(error))
            return None
        return self._launched(validation, replica)

    def _launched(self, validation: Validation, replica: Replica | None) -> Launched | None:
        """Whether the replica that takes the last one's place is ready, and has the machine to itself."""
        made = replica if replica is not None and replica.pk != self._left else None
        if made is not None and made.status in {FAILED, BACKING_OFF}:
            return Launched(done=False, why=made.reason or f"it is {made.status}")
        if made is not None and made.status == READY and not leaving_replicas(validation):
            return Launched(done=True)
        if not self._is_late(self._launch_seconds):
            return None
        waits = made.reason if made is not None else "no replica was made"
        return Launched(done=False, why=f"not ready after {self._launch_seconds:,.0f} s: {waits}")

    def set_asleep(self, validation: Validation, *, asleep: bool) -> Slept | None:
        """Have the replica sleep, or awake; `None` while that takes its time."""
        if not self._begun:
            self._begun = True
            refused = _ask_for_sleep(validation, asleep=asleep)
            return Slept(done=False, why=refused) if refused else None
        replica = _replica(validation)
        if replica is None or replica.pk != self._left or replica.attempt != self._attempt:
            return Slept(done=False, why="its replica is gone, or was started anew")
        if replica.sleep_state == (ASLEEP if asleep else AWAKE) and replica.status == READY:
            return Slept(done=True, seconds=None if asleep else replica.woke_in_seconds)
        why = replica.sleep_note if asleep else ""
        if replica.status != READY:
            why = replica.reason or f"it is {replica.status}"
        elif not why and self._is_late(SLEEP_SECONDS):
            why = f"not within {SLEEP_SECONDS:g} s"
        return Slept(done=False, why=why) if why else None

    def _is_late(self, seconds: float) -> bool:
        return time.monotonic() - self._began_at_seconds > seconds


def wake_trial(validation: Validation) -> None:
    """Have the trial awake for the checks that follow, however the last one ended.

    They wait until it is. `validation` is as it was read for this step; a trial that ends is let be.
    """
    trial = validation.trial
    if trial is not None and trial.standbys_sleep:
        _ask_for_sleep(validation, asleep=False)


def _ask_for_sleep(validation: Validation, *, asleep: bool) -> str:
    """Say that the trial's replica is to sleep, or to be awake; returns why that cannot be."""
    try:
        set_trial_asleep(validation, asleep=asleep, now=clock.now())
    except (InvalidInputError, ConflictError) as error:
        return str(error)
    return ""


def _replica(validation: Validation) -> Replica | None:
    return trial_replica(validation.trial) if validation.trial is not None else None
