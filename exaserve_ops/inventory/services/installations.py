"""Writing of installations: what people ask for, and what controllers did about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import IntegrityError, transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.domain import installation as states
from exaserve_ops.inventory.domain.installation import INSTALLATION, HostKey
from exaserve_ops.inventory.domain.liveness import RETIRED
from exaserve_ops.inventory.models import InstallationStep, Node, NodeInstallation, SshHostKey
from exaserve_ops.inventory.services import advance_liveness, cordon_node, revoke_node_keys, subject_of
from exaserve_ops.lib.errors import ConflictError, InvalidInputError, StaleError

LOG_HEAD_CHARACTERS = 16 * 1024
LOG_TAIL_CHARACTERS = 48 * 1024
KEPT_RUNS = 5
"""Logs of older runs are forgotten; the history keeps what came of them."""

_HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9.:_-]*[A-Za-z0-9])?$")
_USER = re.compile(r"^[A-Za-z_][A-Za-z0-9_.@-]*$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_PATH = re.compile(r"^[A-Za-z0-9._/+-]*$")
_CHECKS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("host", _HOST, "give a host name or an address, without user or port"),
    ("user", _USER, "give the name of a user on that machine"),
    ("node_name", _NAME, "use letters, digits, dots, dashes and underscores"),
    ("address", _HOST, "give a host name or an address"),
    ("folder", _PATH, "use letters, digits, dots, dashes, underscores and slashes"),
    ("python", _PATH, "give the path of an interpreter, or nothing"),
)


@dataclass(frozen=True, slots=True)
class InstallationWish:
    """Where an agent is wanted."""

    host: str
    user: str
    auth: str
    port: int = 22
    node_name: str = ""
    """Empty: the host's name."""
    address: str = ""
    """Empty: the host."""
    folder: str = "exaserve-agent"
    python: str = ""
    allow_http: bool = False
    restart_when_dead: bool = False


@transaction.atomic
def create_installation(wish: InstallationWish, *, actor: str, now: datetime) -> NodeInstallation:
    """Ask for an agent on a machine. Raises `InvalidInputError` or `ConflictError`."""
    made = NodeInstallation(
        host=wish.host,
        port=wish.port,
        user=wish.user,
        auth=wish.auth,
        node_name=wish.node_name or wish.host.replace(":", "-"),
        address=wish.address or wish.host,
        folder=wish.folder.rstrip("/"),
        python=wish.python,
        allow_http=wish.allow_http,
        restart_when_dead=wish.restart_when_dead,
        asked_by=actor,
        created_at=now,
        status_changed_at=now,
    )
    _check(made)
    try:
        with transaction.atomic():
            made.save(force_insert=True)
    except IntegrityError as error:
        raise ConflictError(
            f"An installation on {wish.host} port {wish.port} in the folder {wish.folder} exists already: "
            "go on with that one, or name another folder."
        ) from error
    reason = f"over SSH as {made.user}@{made.host} port {made.port}"
    record_event(subject_of_installation(made), "created", actor=actor, now=now, reason=reason)
    return made


@transaction.atomic
def advance_installation(
    installation_id: UUID, event: str, *, reason: str, actor: str, now: datetime
) -> NodeInstallation:
    """Move an installation by an event, under its row lock. Raises `IllegalTransitionError`."""
    row = NodeInstallation.objects.select_for_update().get(pk=installation_id)
    before = row.status
    row.status = INSTALLATION.next(before, event)
    row.status_reason = reason[:2000]
    row.status_changed_at = now
    row.save(update_fields=["status", "status_reason", "status_changed_at"])
    record_event(
        subject_of_installation(row), event, actor=actor, now=now, moved=(before, row.status), reason=reason
    )
    return row


@transaction.atomic
def ask_installation(
    installation_id: UUID, action: str, *, reason: str, actor: str, now: datetime
) -> NodeInstallation:
    """Have an action carried out: the first one again, or another one.

    Raises `ConflictError` where nothing is installed yet that could be upgraded, removed or restarted,
    and `IllegalTransitionError` while another action is under way.
    """
    row = NodeInstallation.objects.select_for_update().get(pk=installation_id)
    if action not in states.STEPS:
        raise InvalidInputError("action", f"choose one of {', '.join(states.STEPS)}")
    if action in {states.UPGRADE, states.RESTART_AGENT} and row.node_id is None:
        raise ConflictError(f"no agent is installed on {row.host} yet: install it first")
    row.action, row.action_reason, row.asked_by = action, reason[:500], actor
    row.save(update_fields=["action", "action_reason", "asked_by"])
    why = f"{action.replace('_', ' ')}: {reason}" if reason else action.replace("_", " ")
    return advance_installation(installation_id, "asked", reason=why, actor=actor, now=now)


@transaction.atomic
def record_offer(
    installation_id: UUID, key: HostKey, *, pinned: bool, actor: str, now: datetime
) -> NodeInstallation:
    """Write down the key that the machine showed; a pinned one needs nobody's word."""
    row = NodeInstallation.objects.select_for_update().get(pk=installation_id)
    row.offered_key_type, row.offered_key_blob = key.key_type, key.blob
    row.offered_fingerprint = key.fingerprint
    row.save(update_fields=["offered_key_type", "offered_key_blob", "offered_fingerprint"])
    event = "recognised" if pinned else "offered"
    reason = f"{key.key_type} {key.fingerprint}"
    return advance_installation(installation_id, event, reason=reason, actor=actor, now=now)


@transaction.atomic
def confirm_host_key(
    installation_id: UUID, fingerprint: str, *, actor: str, now: datetime
) -> NodeInstallation:
    """Pin the key that a person compared. Raises `StaleError` where it is not the one now offered."""
    row = NodeInstallation.objects.select_for_update().get(pk=installation_id)
    if not fingerprint or fingerprint != row.offered_fingerprint:
        raise StaleError(
            f"{row.host} port {row.port} offers {row.offered_fingerprint or 'no key yet'}, "
            "not the fingerprint that you confirmed: compare again"
        )
    advance_installation(
        installation_id,
        "confirmed",
        reason=f"{row.offered_key_type} {fingerprint}",
        actor=actor,
        now=now,
    )
    pin, made = SshHostKey.objects.get_or_create(
        host=row.host,
        port=row.port,
        key_type=row.offered_key_type,
        defaults={
            "blob": row.offered_key_blob,
            "fingerprint": fingerprint,
            "confirmed_by": actor,
            "confirmed_at": now,
        },
    )
    if pin.blob != row.offered_key_blob:
        raise ConflictError(
            f"another key of {row.host} port {row.port} was pinned meanwhile: {pin.fingerprint}"
        )
    if made:
        record_event(_subject_of_pin(pin), "pinned", actor=actor, now=now, reason=fingerprint)
    return NodeInstallation.objects.get(pk=installation_id)


@transaction.atomic
def forget_host_key(pin_id: UUID, *, actor: str, now: datetime) -> None:
    """Forget a pinned key, because the machine was set up anew; the next one is confirmed by a person."""
    pin = SshHostKey.objects.select_for_update().get(pk=pin_id)
    subject, fingerprint = _subject_of_pin(pin), pin.fingerprint
    pin.delete()
    record_event(subject, "forgotten", actor=actor, now=now, reason=fingerprint)


@transaction.atomic
def set_restart_when_dead(
    installation_id: UUID, *, wanted: bool, actor: str, now: datetime
) -> NodeInstallation:
    """Allow or forbid healing to restart the agent over SSH. Raises `ConflictError` without the ssh-agent."""
    row = NodeInstallation.objects.select_for_update().get(pk=installation_id)
    if wanted and row.auth != NodeInstallation.Auth.AGENT:
        raise ConflictError(
            "healing signs in with the ssh-agent of the controllers; a password or key that a person gave is "
            "not kept. Install with the ssh-agent to use this."
        )
    if row.restart_when_dead != wanted:
        row.restart_when_dead = wanted
        row.save(update_fields=["restart_when_dead"])
        event = "heal_over_ssh_on" if wanted else "heal_over_ssh_off"
        record_event(subject_of_installation(row), event, actor=actor, now=now)
    return row


@transaction.atomic
def restart_dead_agent(installation_id: UUID, *, actor: str, now: datetime) -> NodeInstallation:
    """Have a dead node's agent restarted over SSH, and note for which death: it is done once for each."""
    row = NodeInstallation.objects.select_for_update().get(pk=installation_id)
    if row.node_id is None:
        raise ConflictError("no node")
    node = Node.objects.get(pk=row.node_id)
    row.restarted_for_death_at = node.liveness_changed_at
    row.save(update_fields=["restarted_for_death_at"])
    reason = f"the node is dead ({node.liveness_reason}); tried once for each death"
    record_event(subject_of(node), "agent_restart_over_ssh", actor=actor, now=now, reason=reason)
    return ask_installation(installation_id, states.RESTART_AGENT, reason=reason, actor=actor, now=now)


def record_on_node(node_id: UUID, event: str, *, reason: str, actor: str, now: datetime) -> None:
    """Put what was done over SSH into the history of the node itself."""
    record_event(subject_of(Node.objects.get(pk=node_id)), event, actor=actor, now=now, reason=reason)


@transaction.atomic
def begin_run(installation_id: UUID, *, actor: str, now: datetime) -> NodeInstallation:
    """Begin to work through the steps of the action, under a new run number."""
    row = NodeInstallation.objects.select_for_update().get(pk=installation_id)
    row.run += 1
    row.save(update_fields=["run"])
    row.steps.filter(run__lte=row.run - KEPT_RUNS).delete()
    reason = f"run {row.run}: {row.action.replace('_', ' ')}"
    return advance_installation(installation_id, "started", reason=reason, actor=actor, now=now)


@transaction.atomic
def take_over_runs(*, actor: str, now: datetime) -> int:
    """Queue again what a controller left behind in the middle; returns how many there were."""
    left = list(NodeInstallation.objects.filter(status=states.WORKING).values_list("pk", flat=True))
    for installation_id in left:
        steps = InstallationStep.objects.filter(
            installation=installation_id, outcome=InstallationStep.Outcome.RUNNING
        )
        steps.update(
            outcome=InstallationStep.Outcome.INTERRUPTED,
            summary="the controller that worked on it ended; the step runs again",
            finished_at=now,
        )
        reason = "the controller that worked on it ended; another one begins again"
        advance_installation(installation_id, "taken_over", reason=reason, actor=actor, now=now)
    return len(left)


def begin_step(installation_id: UUID, run: int, name: str, *, now: datetime) -> InstallationStep:
    """Show that a step runs."""
    return InstallationStep.objects.create(
        installation_id=installation_id, run=run, name=name, started_at=now
    )


def append_step_log(step: InstallationStep, text: str) -> None:
    """Add to a step's log; of one that grows too long the middle is left out, and that is said."""
    log = step.log + text
    if len(log) > LOG_HEAD_CHARACTERS + LOG_TAIL_CHARACTERS:
        left_out = "\n… the middle is left out …\n"
        log = log[:LOG_HEAD_CHARACTERS] + left_out + log[len(left_out) - LOG_TAIL_CHARACTERS :]
    step.log = log
    step.save(update_fields=["log"])


def end_step(step: InstallationStep, outcome: str, summary: str, *, now: datetime) -> None:
    """Say how a step ended."""
    step.outcome, step.summary, step.finished_at = outcome, summary[:2000], now
    step.save(update_fields=["outcome", "summary", "finished_at"])


@transaction.atomic
def keep_facts(installation_id: UUID, facts: Mapping[str, str], *, node_id: UUID | None = None) -> None:
    """Keep what a step found out; `node_id` is the node that the agent joined as."""
    row = NodeInstallation.objects.select_for_update().get(pk=installation_id)
    row.facts = {**row.facts, **facts}
    row.node_id = node_id or row.node_id
    row.save(update_fields=["facts", "node"])


@transaction.atomic
def retire_node(node_id: UUID, *, reason: str, actor: str, now: datetime) -> Node:
    """Take a node out for good: cordoned, its keys revoked, its name free for another one.

    The record stays, because replicas that ran there are history. Twice is harmless.
    """
    node = Node.objects.select_for_update().get(pk=node_id)
    if node.liveness == RETIRED:
        return node
    cordon_node(node_id, reason=reason, actor=actor, now=now)
    revoke_node_keys(node_id, actor=actor, now=now)
    node = advance_liveness(node_id, "retired", reason=reason, actor=actor, now=now)
    mark = f" (retired {now:%Y-%m-%d %H:%M:%S})"
    node.name = node.name[: 120 - len(mark)] + mark
    node.save(update_fields=["name"])
    return node


def subject_of_installation(row: NodeInstallation) -> Subject:
    """Return the audit subject of an installation."""
    return Subject("installation", str(row.pk), str(row))


def _subject_of_pin(pin: SshHostKey) -> Subject:
    return Subject("ssh_host_key", str(pin.pk), str(pin))


def _check(row: NodeInstallation) -> None:
    for name, pattern, advice in _CHECKS:
        if not pattern.match(getattr(row, name)):
            raise InvalidInputError(name, advice)
    if not 0 < row.port < 65_536:  # noqa: PLR2004 - ports have 16 bits
        raise InvalidInputError("port", "give a number from 1 to 65535")
    if not row.folder or ".." in row.folder.split("/"):
        raise InvalidInputError("folder", "name a folder, without '..' in it")
    if row.auth not in NodeInstallation.Auth.values:
        raise InvalidInputError("auth", f"choose one of {', '.join(NodeInstallation.Auth.values)}")
    if row.restart_when_dead and row.auth != NodeInstallation.Auth.AGENT:
        raise InvalidInputError("restart_when_dead", "needs the ssh-agent of the controllers")
