"""Claiming weights on nodes, and recording what nodes say of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Happening, Subject, record_events
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.weights.domain.held import FAILED, READY, HeldWeights, StoreSight
from exaserve_ops.weights.domain.prewarm import (
    FASTEST_BYTES_PER_SECOND,
    MINUTES_OF_A_DAY,
    MOST_AT_ONCE,
    SLOWEST_BYTES_PER_SECOND,
    PrewarmPlan,
    PrewarmRules,
)
from exaserve_ops.weights.domain.wanted import PREWARM
from exaserve_ops.weights.models import NodeStore, NodeWeights, PrewarmPolicy, WeightsClaim

READY_EVENT, FAILED_EVENT, DAMAGED_EVENT = "weights_ready", "weights_failed", "weights_damaged"
_SEEN_OF_WEIGHTS = (
    "state", "reason", "total_bytes", "have_bytes", "in_use", "damaged_pieces", "spoilt", "sources", "since",
)  # fmt: skip
_SEEN_OF_STORE = ("problem", "disk_total_bytes", "disk_free_bytes", "used_bytes")
_PACE = f"0, or {SLOWEST_BYTES_PER_SECOND:,} to {FASTEST_BYTES_PER_SECOND:,}"
PROBLEM_EVENT, PROBLEM_OVER_EVENT = "store_problem", "store_well"


@transaction.atomic
def claim_weights(
    revision: str,
    node_ids: Collection[UUID],
    *,
    owner: str,
    actor: str,
    now: datetime,
    bytes_per_second: int = 0,
) -> int:
    """Have a revision fetched to nodes and kept there until the same owner releases it.

    Claiming again changes nothing but the speed, and goes on with what was paused. Returns how many nodes
    are new to this owner. Who claims says so in an event of its own; this records none.
    Raises `InvalidInputError` for a speed that no fetch could keep.
    """
    if not _keeps_pace(bytes_per_second):
        raise InvalidInputError("bytes_per_second", f"must be {_PACE}")
    before = WeightsClaim.objects.filter(revision=revision, owner=owner).count()
    WeightsClaim.objects.bulk_create(
        [
            WeightsClaim(
                node_id=node_id,
                revision=revision,
                owner=owner,
                bytes_per_second=bytes_per_second,
                claimed_by=actor[:120],
                created_at=now,
            )
            for node_id in sorted(set(node_ids))
        ],
        update_conflicts=True,
        unique_fields=["node", "revision", "owner"],
        update_fields=["paused", "bytes_per_second"],
    )
    return WeightsClaim.objects.filter(revision=revision, owner=owner).count() - before


@transaction.atomic
def release_weights(
    owner: str, *, revision: str | None = None, node_ids: Collection[UUID] | None = None
) -> int:
    """Take an owner's claims back: of all revisions and nodes, or of some. Returns how many there were.

    What was fetched stays while there is room and goes first when there is not; what is being fetched
    for nobody else ends.
    """
    claims = WeightsClaim.objects.filter(owner=owner)
    if revision is not None:
        claims = claims.filter(revision=revision)
    if node_ids is not None:
        claims = claims.filter(node__in=node_ids)
    count, _ = claims.delete()
    return count


@transaction.atomic
def pause_weights(
    owner: str, revision: str, *, paused: bool, node_ids: Collection[UUID] | None = None
) -> int:
    """Pause an owner's claims on a revision, or let them go on. Returns how many changed."""
    claims = WeightsClaim.objects.filter(owner=owner, revision=revision).exclude(paused=paused)
    if node_ids is not None:
        claims = claims.filter(node__in=node_ids)
    return claims.update(paused=paused)


@transaction.atomic
def save_prewarm_policy(rules: PrewarmRules, *, now: datetime) -> None:
    """Have a revision fetched ahead by these rules from now on. Raises `InvalidInputError`."""
    _check_rules(rules)
    PrewarmPolicy.objects.update_or_create(
        revision=rules.revision,
        defaults={
            "enabled": True,
            "node_names": list(rules.node_names),
            "busiest_ratio": rules.busiest_ratio,
            "from_minute": rules.from_minute,
            "until_minute": rules.until_minute,
            "bytes_per_second": rules.bytes_per_second,
            "at_once": rules.at_once,
            "changed_at": now,
        },
    )


@transaction.atomic
def pause_prewarm_policy(revision: str, *, paused: bool) -> bool:
    """Have a policy begin and go on with nothing, or go on by its rules. Returns whether that is new."""
    policies = PrewarmPolicy.objects.filter(revision=revision).exclude(enabled=not paused)
    changed = policies.update(enabled=not paused, note="")
    if changed and paused:
        pause_weights(PREWARM, revision, paused=True)  # going on is for the rules to say, node by node
    return bool(changed)


@transaction.atomic
def delete_prewarm_policy(revision: str) -> bool:
    """Fetch a revision ahead no more, and let go of what was kept for that. Returns whether there was any."""
    release_weights(PREWARM, revision=revision)
    count, _ = PrewarmPolicy.objects.filter(revision=revision).delete()
    return bool(count)


@transaction.atomic
def carry_out_prewarm(
    rules: PrewarmRules, plan: PrewarmPlan, *, note: str, actor: str, now: datetime
) -> None:
    """Make the claims of a policy what its plan says. A policy that was deleted meanwhile is left alone."""
    policy = PrewarmPolicy.objects.select_for_update().filter(revision=rules.revision, enabled=True).first()
    if policy is None:
        return
    if plan.claim:
        claim_weights(
            rules.revision,
            [UUID(node_id) for node_id in plan.claim],
            owner=PREWARM,
            actor=actor,
            now=now,
            bytes_per_second=rules.bytes_per_second,
        )
    for node_ids, paused in ((plan.pause, True), (plan.resume, False)):
        if node_ids:
            pause_weights(PREWARM, rules.revision, paused=paused, node_ids=[UUID(n) for n in node_ids])
    if plan.release:
        release_weights(PREWARM, revision=rules.revision, node_ids=[UUID(n) for n in plan.release])
    claims = WeightsClaim.objects.filter(owner=PREWARM, revision=rules.revision)
    claims.exclude(bytes_per_second=rules.bytes_per_second).update(bytes_per_second=rules.bytes_per_second)
    if policy.note != note[:500]:
        policy.note = note[:500]
        policy.save(update_fields=["note"])


def _keeps_pace(bytes_per_second: int) -> bool:
    return bytes_per_second == 0 or SLOWEST_BYTES_PER_SECOND <= bytes_per_second <= FASTEST_BYTES_PER_SECOND


def _check_rules(rules: PrewarmRules) -> None:
    checks = (
        ("busiest_ratio", 0 <= rules.busiest_ratio <= 1, "between 0 and 1"),
        ("from_minute", 0 <= rules.from_minute < MINUTES_OF_A_DAY, f"0 to {MINUTES_OF_A_DAY - 1}"),
        ("until_minute", 0 <= rules.until_minute <= MINUTES_OF_A_DAY, f"0 to {MINUTES_OF_A_DAY}"),
        ("until_minute", rules.until_minute != rules.from_minute, "another time than the start"),
        ("at_once", 1 <= rules.at_once <= MOST_AT_ONCE, f"1 to {MOST_AT_ONCE:,}"),
        ("bytes_per_second", _keeps_pace(rules.bytes_per_second), _PACE),
    )
    for field, good, wanted in checks:
        if not good:
            raise InvalidInputError(field, f"must be {wanted}")


@transaction.atomic
def record_weights_wishes(contents: Mapping[UUID, str]) -> dict[UUID, int]:
    """Return the revisions that stand for these contents; other content than before is a new one.

    `contents`: SHA-256 by node. Nodes that are not recorded are left out.
    """
    known = _stores(contents)
    changed = [store for node_id, store in known.items() if store.wish_sha256 != contents[node_id]]
    for store in changed:
        store.wish_revision += 1
        store.wish_sha256 = contents[store.node_id]
    _save_stores(changed, ["wish_revision", "wish_sha256"])
    return {node_id: store.wish_revision for node_id, store in known.items()}


@transaction.atomic
def record_sights(sights: Mapping[UUID, StoreSight], *, names: Mapping[str, str], now: datetime) -> None:
    """Record what nodes have on their disks: the rows become what they say. `names`: of revisions.

    A few statements for any number of nodes: each of a fleet's that fetches something has news every few
    seconds. Nodes that are not recorded are left out.
    """
    nodes = Node.objects.only("pk", "name").in_bulk(sights.keys())
    stores = _stores(nodes)
    known: dict[UUID, dict[str, NodeWeights]] = {}
    for row in NodeWeights.objects.select_for_update().filter(node__in=nodes).order_by("node", "revision"):
        known.setdefault(row.node_id, {})[row.revision] = row
    rows: list[NodeWeights] = []
    gone: list[int] = []
    for node_id, node in sorted(nodes.items()):
        sight, before = sights[node_id], known.get(node_id, {})
        happenings = _note_store(node, stores[node_id], sight)
        for held in sight.held:
            last = before.pop(held.revision, None)
            happenings += _news(node, last, held, names.get(held.revision, held.revision[:19]))
            rows.append(_row_of(node, last, held, now))
        gone += [row.pk for row in before.values()]
        if happenings:
            record_events(happenings, actor=f"agent:{node.name}", now=now)
    NodeWeights.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["node", "revision"], update_fields=_SEEN_OF_WEIGHTS
    )
    if gone:
        NodeWeights.objects.filter(pk__in=gone).delete()
    _save_stores(stores.values(), _SEEN_OF_STORE)


def record_sight(node_id: UUID, sight: StoreSight, *, names: Mapping[str, str], now: datetime) -> None:
    """Record what one node has on its disk."""
    record_sights({node_id: sight}, names=names, now=now)


def _stores(node_ids: Iterable[UUID]) -> dict[UUID, NodeStore]:
    """The locked rows of these nodes' stores; those that are not recorded yet are new ones."""
    wanted = Node.objects.filter(pk__in=node_ids).order_by("pk").values_list("pk", flat=True)
    rows = NodeStore.objects.select_for_update().filter(node__in=wanted).order_by("node")
    known = {row.node_id: row for row in rows}
    return {pk: known.get(pk) or NodeStore(node_id=pk) for pk in wanted}


def _save_stores(stores: Collection[NodeStore], fields: Sequence[str]) -> None:
    if stores:
        NodeStore.objects.bulk_create(
            stores, update_conflicts=True, unique_fields=["node"], update_fields=fields
        )


def _row_of(node: Node, before: NodeWeights | None, held: HeldWeights, now: datetime) -> NodeWeights:
    same = before is not None and before.state == held.state
    return NodeWeights(
        node=node,
        revision=held.revision,
        state=held.state,
        reason=held.reason[:1000],
        total_bytes=held.total_bytes,
        have_bytes=held.have_bytes,
        in_use=held.in_use,
        damaged_pieces=held.damaged_pieces,
        spoilt=held.spoilt,
        sources=[list(source) for source in held.sources],
        since=before.since if before is not None and same else now,
    )


def _note_store(node: Node, store: NodeStore, sight: StoreSight) -> list[Happening]:
    before, store.problem = store.problem, sight.problem[:1000]
    store.disk_total_bytes, store.disk_free_bytes = sight.disk_total_bytes, sight.disk_free_bytes
    store.used_bytes = sight.used_bytes
    if bool(before) == bool(store.problem):
        return []
    event = PROBLEM_EVENT if store.problem else PROBLEM_OVER_EVENT
    return [Happening(Subject("node", str(node.pk), node.name), event, reason=store.problem)]


def _news(node: Node, row: NodeWeights | None, held: HeldWeights, name: str) -> list[Happening]:
    subject = Subject("node", str(node.pk), node.name)
    found = []
    if held.damaged_pieces > (row.damaged_pieces if row else 0):
        reason = f"{name}: {held.damaged_pieces} pieces were not what the manifest says; fetched again"
        found.append(Happening(subject, DAMAGED_EVENT, reason=reason))
    if row is None or row.state != held.state:
        if held.state == READY:
            found.append(Happening(subject, READY_EVENT, reason=name))
        elif held.state == FAILED:
            found.append(Happening(subject, FAILED_EVENT, reason=f"{name}: {held.reason}"))
    return found
