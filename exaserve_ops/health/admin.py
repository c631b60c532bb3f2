"""Leases and incidents in the Django admin."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from exaserve_ops.health.models import Incident, LeaderLease, NodeLease
from exaserve_ops.health.services.incidents import confirm_incident, dismiss_incident
from exaserve_ops.lib import clock
from exaserve_ops.lib.admin import ReadOnlyAdmin, actor_of
from exaserve_ops.lib.errors import ConflictError


@admin.register(NodeLease)
class NodeLeaseAdmin(ReadOnlyAdmin[NodeLease]):
    """Leases, as controllers granted them."""

    list_display = ("node", "epoch", "boot_id", "granted_at")
    list_select_related = ("node",)
    search_fields = ("node__name", "boot_id")


@admin.register(LeaderLease)
class LeaderLeaseAdmin(ReadOnlyAdmin[LeaderLease]):
    """Which controller leads."""

    list_display = ("name", "epoch", "holder", "renewed_at", "expires_at")


@admin.register(Incident)
class IncidentAdmin(ReadOnlyAdmin[Incident]):
    """Incidents are opened by controllers and decided here, if they do not end by themselves."""

    list_display = ("kind", "scope", "status", "opened_at", "resolved_at", "resolved_by")
    list_filter = ("status", "kind")
    search_fields = ("scope", "evidence", "resolution")
    actions = ("confirm", "dismiss")

    @admin.action(description="Confirm that the nodes are dead", permissions=["decide"])
    def confirm(self, request: HttpRequest, queryset: QuerySet[Incident]) -> None:
        """Declare the silent nodes dead."""
        self._decide(request, queryset, confirm_incident)

    @admin.action(description="Dismiss: leave the nodes unjudged, heal the others", permissions=["decide"])
    def dismiss(self, request: HttpRequest, queryset: QuerySet[Incident]) -> None:
        """Leave the silent nodes unjudged."""
        self._decide(request, queryset, dismiss_incident)

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """Whoever may change incidents; rows themselves stay read-only."""
        return request.user.has_perm("health.change_incident")

    def _decide(
        self, request: HttpRequest, queryset: QuerySet[Incident], service: Callable[..., Incident]
    ) -> None:
        for incident in queryset:
            try:
                service(incident.pk, reason="decided in the admin", actor=actor_of(request), now=clock.now())
            except ConflictError as error:
                self.message_user(request, f"{incident}: {error}", messages.ERROR)
