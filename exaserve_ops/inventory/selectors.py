"""Reading of the inventory."""

from __future__ import annotations

from uuid import UUID

from django.db.models import F, Q, QuerySet

from exaserve_ops.inventory.domain.installation import (
    FAILED,
    INSTALLATION,
    INSTALLED,
    NEW,
    QUEUED,
    HostKey,
    Target,
)
from exaserve_ops.inventory.domain.liveness import DEAD, RETIRED
from exaserve_ops.inventory.models import FailureDomain, Node, NodeInstallation, SshHostKey


def nodes_in_service() -> QuerySet[Node]:
    """All nodes but those that were retired: they are history, and nothing is expected of them."""
    return Node.objects.exclude(liveness=RETIRED)


def nodes_with_hardware() -> QuerySet[Node]:
    """All nodes with accelerators and failure domains, in three queries."""
    return Node.objects.select_related("failure_domain__parent__parent").prefetch_related("accelerators")


def rack_of(node: Node) -> str:
    """Name of the rack that a node stands in; empty where none is known."""
    return _domain_of(node, FailureDomain.Kind.RACK)


def supernode_of(node: Node) -> str:
    """Name of the group of nodes with one fast fabric that a node belongs to; empty where none is known."""
    return _domain_of(node, FailureDomain.Kind.SUPERNODE)


def _domain_of(node: Node, kind: FailureDomain.Kind) -> str:
    domain = node.failure_domain.parent
    while domain is not None and domain.kind != kind:
        domain = domain.parent
    return domain.name if domain is not None else ""


def pins_of(host: str, port: int) -> tuple[HostKey, ...]:
    """Host keys that people confirmed for a host and port, of every type."""
    rows = SshHostKey.objects.filter(host=host, port=port)
    return tuple(HostKey(row.key_type, row.blob, row.fingerprint) for row in rows)


def target_of(row: NodeInstallation) -> Target:
    """Where an installation is to go, with the keys that its host may show."""
    return Target(
        installation_id=str(row.pk),
        host=row.host,
        port=row.port,
        user=row.user,
        folder=row.folder,
        python=row.python,
        pins=pins_of(row.host, row.port),
    )


def due_installations() -> QuerySet[NodeInstallation]:
    """Those whose host key is to be fetched, or that wait for a connection; oldest first."""
    return NodeInstallation.objects.filter(status__in=(NEW, QUEUED)).order_by("status_changed_at", "pk")


def dead_agents_to_restart() -> QuerySet[NodeInstallation]:
    """Installations whose node is dead and whose agent was not restarted for that death yet."""
    once = Q(restarted_for_death_at__isnull=True) | ~Q(restarted_for_death_at=F("node__liveness_changed_at"))
    return NodeInstallation.objects.filter(
        once,
        status__in=(INSTALLED, FAILED),
        restart_when_dead=True,
        auth=NodeInstallation.Auth.AGENT,
        node__liveness=DEAD,
    )


def installation_of_node(node_id: UUID) -> NodeInstallation | None:
    """The installation that put a node's agent there; `None` where it was not done over SSH."""
    rows = NodeInstallation.objects.filter(node=node_id).exclude(status__in=INSTALLATION.final)
    return rows.order_by("-created_at").first()
