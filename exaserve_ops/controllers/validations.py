"""Drives validations: looks at each one, carries out what it decides, and runs its checks.

Outcomes are in the record, so another leader goes on at the check where a dead one stopped; only that check
is run again. Requests are sent by threads; what is written, this loop writes, under the leader's fence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import UUID

from django.db import DatabaseError

from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.controllers.trials import TrialTurn, wake_trial
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.domain.lifecycle import DELETED
from exaserve_ops.serving.domain.observed import ReplicaLoad
from exaserve_ops.serving.models import Replica
from exaserve_ops.validation.domain import catalogue
from exaserve_ops.validation.domain import driving as do
from exaserve_ops.validation.domain.asking import (
    Answer,
    Ask,
    AskAll,
    Finding,
    LaunchAgain,
    Launched,
    LaunchWith,
    Load,
    LookAtLoad,
    Need,
    Procedure,
    Reply,
    Rest,
    SetAsleep,
    Slept,
)
from exaserve_ops.validation.domain.lifecycle import FAILED, RUNNING
from exaserve_ops.validation.domain.model_checks import MODEL_JUDGES, judge_agreement, judge_hashing
from exaserve_ops.validation.domain.probing import Target, read_address
from exaserve_ops.validation.domain.procedures import PROCEDURES
from exaserve_ops.validation.models import Validation, ValidationCheck
from exaserve_ops.validation.selectors import (
    golden_of,
    live_validations,
    model_record,
    subject_of_check,
    trial_replica,
    validation_view,
)
from exaserve_ops.validation.services import (
    ACTOR,
    advance_validation,
    begin_check,
    end_trial,
    forget_trial,
    make_trial,
    note_wait,
    record_finding,
)

LOOK_EVERY_SECONDS = 0.5
SILENCE_SECONDS = 300.0
"""An engine that says nothing for so long does not answer."""
_UNREADABLE = "nobody can look at it: {error}. The leading controller's log says more"

_log = logging.getLogger(__name__)


class EngineProbe(Protocol):
    """Asks an engine."""

    def token_of(self, target: Target) -> str | None:
        """The key to a target's engine; `None` where its node is not recorded any more."""
        ...

    def ask(self, target: Target, ask: Ask, *, seconds: float) -> Answer:
        """Send one request and wait for its answer."""
        ...


class ValidationDriver:
    """One look at every validation a step. What runs is lost with the process, what was found is not."""

    def __init__(self, state: FleetState, probe: EngineProbe) -> None:
        self._state = state
        self._probe = probe
        self._runs: dict[UUID, _Run] = {}

    def step(self) -> None:
        """Bring every validation on by what is due; one that cannot be read holds up no other."""
        live = live_validations()
        for key in self._runs.keys() - {validation.pk for validation in live}:
            self._drop(key)
        for validation in live:
            try:
                self._drive(validation)
            except DatabaseError:
                raise  # the store is away, for the others too
            except (ConflictError, IllegalTransitionError) as error:
                _log.info("event=validation_overtaken validation=%s error=%s", validation.pk, error)
            except Exception as error:  # noqa: BLE001 - a loop's top: it is told on the validation's page
                told = _UNREADABLE.format(error=error)
                if validation.waits_for != told:  # once, not each second
                    _log.exception("event=validation_unreadable validation=%s", validation.pk)
                note_wait(validation, told)

    def _drive(self, validation: Validation) -> None:
        if validation.status != RUNNING:
            self._drop(validation.pk)  # somebody ended it: nothing more is asked or launched
        run = self._runs.get(validation.pk)
        if run is not None and (finding := self._advance(run, validation)) is not None:
            self._record(validation, run.position, finding)
            return
        if validation.trial is not None and validation.trial.status == DELETED:
            forget_trial(validation)
            validation.trial = None
        view = validation_view(validation, runs_here=run is not None)
        self._carry_out(validation, do.decide(view, clock.now()))

    def _carry_out(self, validation: Validation, action: do.Action | None) -> None:
        now = clock.now()
        match action:
            case do.Move(event, why):
                advance_validation(validation.pk, event, why=why, actor=ACTOR, now=now)
            case do.MakeTrial(position, engine):
                self._try_engine(validation, position, engine)
            case do.EndTrial():
                end_trial(validation, now=now)
            case do.Wait(why):
                note_wait(validation, why)
            case do.Judge() | do.Run() | do.Record():
                self._carry_out_check(validation, action)
            case None:
                pass  # it has ended, and nothing of it is left

    def _carry_out_check(self, validation: Validation, action: do.Judge | do.Run | do.Record) -> None:
        match action:
            case do.Judge(position):
                self._judge(validation, position)
            case do.Run(position):
                self._begin(validation, position)
            case do.Record(position, finding):
                self._record(validation, position, finding)

    def _record(self, validation: Validation, position: int, finding: Finding) -> None:
        """Write down how a check ended, whether by itself or by the time that it took."""
        self._drop(validation.pk)
        wake_trial(validation)  # first: what is recorded is not looked at again
        record_finding(validation, position, finding, now=clock.now())

    def _drop(self, key: UUID) -> None:
        """Go on no more with what runs of a validation, if anything does."""
        run = self._runs.pop(key, None)
        if run is not None:
            run.is_over.set()

    def _judge(self, validation: Validation, position: int) -> None:
        check = validation.checks.get(position=position)
        begin_check(validation, position, now=clock.now())
        try:
            finding = judge(validation, check)
        except DatabaseError:
            raise  # the store is away: it is looked at again
        except Exception as error:  # noqa: BLE001 - a check's top: it is told on the report
            finding = _broken(validation, check.name, error)
        record_finding(validation, position, finding, now=clock.now())

    def _try_engine(self, validation: Validation, position: int, engine: str) -> None:
        begin_check(validation, position, now=clock.now())
        try:
            make_trial(validation, engine, now=clock.now())
        except InvalidInputError as error:
            finding = Finding(FAILED, why=f"no deployment can be made to try it: {error}")
            record_finding(validation, position, finding, now=clock.now())

    def _begin(self, validation: Validation, position: int) -> None:
        check = validation.checks.get(position=position)
        begin_check(validation, position, now=clock.now())
        try:
            procedure = PROCEDURES[check.name](subject_of_check(validation, check.engine, check.name))
        except DatabaseError:
            raise  # the store is away: it is looked at again
        except Exception as error:  # noqa: BLE001 - a check's top: it is told on the report
            finding = _broken(validation, check.name, error)
            record_finding(validation, position, finding, now=clock.now())
        else:
            self._runs[validation.pk] = _Run(position, check.name, procedure)

    # -- a check that runs ---------------------------------------------------------------------------
    def _advance(self, run: _Run, validation: Validation) -> Finding | None:
        """Give the check what it waits for, as far as that is there; return what it found in the end."""
        if run.need is None:
            return self._take(run, validation, None)
        ready, reply = self._answer(run, validation, run.need)
        return self._take(run, validation, reply) if ready else None

    def _take(self, run: _Run, validation: Validation, reply: Reply) -> Finding | None:
        try:
            run.need = next(run.procedure) if run.need is None else run.procedure.send(reply)
        except StopIteration as ended:
            finding: Finding = ended.value
            return finding
        except Exception as error:  # noqa: BLE001 - a check's top: it stops none of the others
            return _broken(validation, run.name, error)
        run.since_seconds, run.futures, run.turn = time.monotonic(), [], None
        if isinstance(run.need, AskAll):
            self._send(run, validation, run.need)
        return None

    def _send(self, run: _Run, validation: Validation, need: AskAll) -> None:
        target = _target(validation)
        if target is None:
            lost: Future[list[Answer]] = Future()
            lost.set_result([Answer(0, error="its replica is gone")] * len(need.asks))
            run.futures = [lost]
            return
        # Here, since threads that ask would each take a connection to the database for it.
        target = replace(target, token=self._probe.token_of(target))
        # Threads of its own: shared ones would send fewer at once than the figures are told for.
        lanes = max(1, min(need.at_once, len(need.asks)))
        pool = ThreadPoolExecutor(lanes, thread_name_prefix="validation")
        run.futures = [
            pool.submit(self._ask, target, need.asks[lane::lanes], run.is_over) for lane in range(lanes)
        ]
        pool.shutdown(wait=False)

    def _ask(self, target: Target, asks: Sequence[Ask], is_over: threading.Event) -> list[Answer]:
        return [
            Answer(0, error="its check is over")
            if is_over.is_set()
            else self._probe.ask(target, ask, seconds=SILENCE_SECONDS)
            for ask in asks
        ]

    def _answer(self, run: _Run, validation: Validation, need: Need) -> tuple[bool, Reply]:
        """Whether what is needed is there, and what it is."""
        match need:
            case AskAll():
                if not all(future.done() for future in run.futures):
                    return False, None
                return True, _in_order([future.result() for future in run.futures])
            case Rest(seconds):
                return time.monotonic() - run.since_seconds >= seconds, None
            case LookAtLoad():
                load = self._load(validation, run.since_seconds)
                return load is not None, load
            case LaunchAgain() | LaunchWith() | SetAsleep():
                return _turn_trial(run, validation, need)

    def _load(self, validation: Validation, since_seconds: float) -> Load | None:
        """What the engine says of itself, as scraped after a moment; `None` while nothing newer came."""
        replica = trial_replica(validation.trial) if validation.trial is not None else None
        if replica is None:
            return Load()
        for view, seen in self._state.observed():
            if seen.replica_id == str(replica.pk) and seen.load is not None:
                heard = view.last_report_seconds
                if heard is None or heard - seen.load.age_seconds <= since_seconds:
                    return None
                return _load_of(seen.load)
        # Nothing was said for long: the engine tells nothing.
        return Load() if time.monotonic() - since_seconds > SILENCE_SECONDS / 10 else None


@dataclass(slots=True)
class _Run:
    """A check that has begun in this process."""

    position: int
    name: str
    procedure: Procedure
    need: Need | None = None
    """What it waits for; `None`: it has not been asked yet."""
    since_seconds: float = 0.0
    futures: list[Future[list[Answer]]] = field(default_factory=list)
    turn: TrialTurn | None = None
    """What the trial is being changed for."""
    is_over: threading.Event = field(default_factory=threading.Event)
    """Nobody waits for its answers any more."""


def _turn_trial(
    run: _Run, validation: Validation, need: LaunchAgain | LaunchWith | SetAsleep
) -> tuple[bool, Reply]:
    """Whether the trial is as a check needs it, and what it is told of it."""
    run.turn = run.turn or TrialTurn(validation)
    reply: Launched | Slept | None
    match need:
        case LaunchAgain():
            reply = run.turn.launch_again(validation)
        case LaunchWith(options):
            reply = run.turn.launch_with(validation, options)
        case SetAsleep(asleep):
            reply = run.turn.set_asleep(validation, asleep=asleep)
    return reply is not None, reply


def _broken(validation: Validation, name: str, error: Exception) -> Finding:
    """What is found where the check itself fails."""
    _log.exception("event=validation_check_broken validation=%s check=%s", validation.pk, name)
    told = f"{type(error).__name__}: {error}"
    return Finding(FAILED, why=f"the check itself broke, which says nothing of the model: {told}")


def judge(validation: Validation, check: ValidationCheck) -> Finding:
    """Run a check that asks no engine."""
    if check.name == catalogue.AGREEMENT:
        return judge_agreement(golden_of(validation))
    if check.name == catalogue.HASHING:
        return judge_hashing(check.engine, validation.engine_options.get(check.engine, {}))
    return MODEL_JUDGES[check.name](model_record(validation.model))


def _target(validation: Validation) -> Target | None:
    replica: Replica | None = trial_replica(validation.trial) if validation.trial is not None else None
    if replica is None or validation.trial is None or replica.node is None or not replica.address:
        return None
    host, port = read_address(replica.address)
    served = validation.trial.served_name
    return Target(str(replica.pk), str(replica.node.pk), host, port, replica.attempt, served)


def _in_order(lanes: Sequence[Sequence[Answer]]) -> list[Answer]:
    """Answers of lanes that took the requests in turns."""
    count = sum(map(len, lanes))
    return [lanes[number % len(lanes)][number // len(lanes)] for number in range(count)]


def _load_of(told: ReplicaLoad) -> Load:
    return Load(
        kv_total_blocks=told.kv_total_blocks,
        kv_block_tokens=told.kv_block_tokens,
        kv_used_ratio=told.kv_used_ratio,
        requests_running=told.requests_running,
        requests_waiting=told.requests_waiting,
    )
