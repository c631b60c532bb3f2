"""Joining: tokens for one node or for a whole allocation, and the nodes that spend them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import IntegrityError, connection, transaction
from django.db.models import F

from exaserve_ops.access.domain.keys import hash_key
from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.domain.liveness import JOINING
from exaserve_ops.inventory.models import FailureDomain, JoinToken, Node
from exaserve_ops.lib.errors import ConflictError, DeniedError, InvalidInputError
from exaserve_ops.lib.hints import ring

JOIN_TOKEN_LIFETIME = timedelta(hours=1)
MAX_TOKEN_USES = 4096
"""Nodes that one token may admit: the largest allocation that starts at once."""
MAX_NAME_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class JoinWish:
    """What an agent says of itself when it joins."""

    node_id: UUID
    name: str
    hostname: str
    address: str = ""
    """Where gateways are to reach it; judged by whoever takes the request in."""
    name_suffix: bool = False
    """Take `name-2`, `name-3`, … where the name is taken, instead of refusing."""


@transaction.atomic
def create_join_token(
    *,
    actor: str,
    now: datetime,
    note: str = "",
    lifetime: timedelta = JOIN_TOKEN_LIFETIME,
    max_uses: int = 1,
) -> tuple[JoinToken, str]:
    """Make a token that enrols so many nodes. The second value is its text, shown this once.

    Raises `InvalidInputError` for a number of uses that is out of bounds.
    """
    if not 1 <= max_uses <= MAX_TOKEN_USES:
        raise InvalidInputError("max_uses", f"give a number from 1 to {MAX_TOKEN_USES}")
    text = "xj-" + secrets.token_urlsafe(32)
    token = JoinToken.objects.create(
        sha256=hash_key(text),
        note=note,
        created_by=actor,
        created_at=now,
        expires_at=now + lifetime,
        max_uses=max_uses,
    )
    subject = Subject("join_token", str(token.pk), str(token))
    reason = "" if max_uses == 1 else f"for {max_uses} nodes"
    record_event(subject, "created", actor=actor, now=now, reason=reason)
    return token, text


def enrol_node(*, token_text: str, node_id: UUID, name: str, hostname: str, now: datetime) -> Node:
    """Spend one use of a token; see `enrol`."""
    return enrol(JoinWish(node_id, name, hostname), token_text=token_text, now=now)


@transaction.atomic
def enrol(wish: JoinWish, *, token_text: str, now: datetime) -> Node:
    """Spend one use of a token and record the node under the identity that its agent generated.

    A node that asks again because the answer to its first try was lost gets it again, with the token
    that it spent, for as long as it has not reported: after that, whoever asks is not that node.

    Raises `DeniedError` for a token that is unknown, used up or expired, and `ConflictError` for a name
    or an identity that is taken; in both cases no use is spent.
    """
    token = JoinToken.objects.filter(sha256=hash_key(token_text)).first()
    if token is None or token.expires_at <= now:
        raise _denied()
    known = Node.objects.filter(pk=wish.node_id).first()
    if known is not None:
        return _known(known, token)
    if token.uses >= token.max_uses:
        raise _denied()
    if not wish.name.strip():
        raise InvalidInputError("name", "give the node a name")
    node = _create(wish, token, now)
    _spend(token, node, now)
    subject = Subject("node", str(node.pk), node.name)
    record_event(subject, "enrolled", actor=f"agent:{node.name}", now=now, reason=token.note)
    ring("node", node.pk)
    return node


def _denied() -> DeniedError:
    return DeniedError("This join token is unknown, used or expired; make a new one on the Nodes page.")


def _known(node: Node, token: JoinToken) -> Node:
    if node.joined_with_id == token.pk and node.liveness == JOINING and node.last_report_at is None:
        return node
    raise ConflictError(
        f"A node with identity {node.pk} has joined before; start its agent with 'run', or "
        "remove identity.json from its home folder to join as a new node."
    )


def _create(wish: JoinWish, token: JoinToken, now: datetime) -> Node:
    name = _free_name(wish.name) if wish.name_suffix else wish.name
    other = Node.objects.filter(name=name).first()
    if other is not None:
        raise ConflictError(_taken(other, wish))
    try:
        with transaction.atomic():
            host, _ = FailureDomain.objects.get_or_create(kind=FailureDomain.Kind.HOST, name=name)
            return Node.objects.create(
                pk=wish.node_id,
                name=name,
                hostname=wish.hostname,
                failure_domain=host,
                joined_with=token,
                created_at=now,
            )
    except IntegrityError as error:
        raise ConflictError(
            f"The name '{name}' or the identity {wish.node_id} was taken just now."
        ) from error


def _taken(other: Node, wish: JoinWish) -> str:
    where = f"the node {other.pk} at {other.address or 'no address yet'}"
    if wish.hostname and other.hostname == wish.hostname and other.address in {"", wish.address}:
        heard = other.last_report_at
        when = f"last heard of at {heard:%Y-%m-%d %H:%M:%S} UTC" if heard else "never heard of"
        return (
            f"An agent named '{other.name}' of this very host ({wish.hostname}) joined before: "
            f"{where}, {when}. "
            "If that agent still runs, give this one another --name and its own --home. If its home "
            f"folder is lost, retire the node '{other.name}' first, or join with --name-suffix."
        )
    return (
        f"The name '{other.name}' is taken by {where}; "
        "join with another --name, or with --name-suffix for a number behind it."
    )


def _free_name(wanted: str) -> str:
    """Return the name, or the first of `name-2`, `name-3`, … that nobody has."""
    with connection.cursor() as cursor:
        # Whoever wants the same name waits here until we are done: nobody meets anybody.
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"node-name:{wanted}"])
    stem = wanted[: MAX_NAME_CHARACTERS - 6]
    taken = set(Node.objects.filter(name__startswith=stem).values_list("name", flat=True))
    if wanted not in taken:
        return wanted
    number = 2
    while f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"


def _spend(token: JoinToken, node: Node, now: datetime) -> None:
    """Count one use, last of all: the token's row is locked for the shortest time."""
    left = JoinToken.objects.filter(pk=token.pk, uses__lt=F("max_uses"), used_at__isnull=True)
    if not left.update(uses=F("uses") + 1, used_by=node):
        raise _denied()
    JoinToken.objects.filter(pk=token.pk, uses__gte=F("max_uses")).update(used_at=now)
