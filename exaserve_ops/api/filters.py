"""Filters of the lists."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar
from uuid import UUID

from django.db.models import Model, QuerySet
from django.http import QueryDict
from django_filters import rest_framework as filters
from rest_framework.exceptions import ValidationError
from rest_framework.filters import OrderingFilter
from rest_framework.request import Request
from rest_framework.views import APIView

from exaserve_ops.access.models import ApiKey
from exaserve_ops.audit.models import Event
from exaserve_ops.health.domain.incident import INCIDENT
from exaserve_ops.health.models import Incident
from exaserve_ops.inventory.domain.installation import INSTALLATION
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.inventory.models import Accelerator, JoinToken, Node, NodeInstallation, SshHostKey
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.serving.domain.model_import import MODEL_IMPORT
from exaserve_ops.serving.models import Deployment, ModelImport, Release, Replica, StagedStart
from exaserve_ops.serving.models import Model as ServedModel
from exaserve_ops.sessions.domain.moves import RELOCATION
from exaserve_ops.sessions.domain.relocation import TRIGGERS
from exaserve_ops.sessions.models import InferenceSession, Relocation
from exaserve_ops.validation.domain.lifecycle import VALIDATION
from exaserve_ops.validation.models import Validation


class StableOrdering(OrderingFilter):
    """`?ordering=-status`; equal rows in the order of their ids, so that pages neither repeat nor skip."""

    def get_ordering(self, request: Request, queryset: QuerySet[Any], view: APIView) -> list[str]:
        """Return what was asked for, else the view's own order, with the id last."""
        return [*(super().get_ordering(request, queryset, view) or ()), "pk"]


_PAGING = ("page", "page_size", "cursor")


def check_parameters(
    query: QueryDict, known: Collection[str], orders: Collection[str], *, paged: bool = True
) -> None:
    """Raise `ValidationError`, naming what there is, for a filter or an order that does not exist.

    Not `paged`: the answer is one thing, not a list in pages.
    """
    allowed = sorted({*known, *(("ordering",) if orders else ()), *(_PAGING if paged else ())})
    told = f"There are: {', '.join(allowed)}." if allowed else "There are none here."
    wrong = {name: [f"There is no such filter. {told}"] for name in query if name not in {*allowed, "format"}}
    asked = {
        order.strip().removeprefix("-") for text in query.getlist("ordering") for order in text.split(",")
    }
    unknown = sorted(asked - {*orders, ""})
    if unknown and "ordering" not in wrong:
        wrong["ordering"] = [
            f"Not by {', '.join(unknown)}. By: {', '.join(sorted(orders))}; -name: downwards."
        ]
    if wrong:
        raise ValidationError(wrong)


class _LiveByDefault(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """Leaves ended ones out unless a switch (`ended=true`) or the state itself asks for them."""

    ended_statuses: ClassVar[frozenset[str]] = frozenset()
    state_field: ClassVar[str] = "status"
    switch: ClassVar[str] = "ended"

    def filter_queryset(self, queryset: QuerySet[Model]) -> QuerySet[Model]:
        """Apply the filters, and the default."""
        found: QuerySet[Model] = super().filter_queryset(queryset)
        asked: dict[str, Any] = self.form.cleaned_data
        if asked.get(self.switch) or asked.get(self.state_field):
            return found
        return found.exclude(**{f"{self.state_field}__in": self.ended_statuses})

    def _keep(self, queryset: QuerySet[Model], _name: str, _value: bool) -> QuerySet[Model]:  # noqa: FBT001 - django_filters' signature
        return queryset


class NodeFilter(_LiveByDefault):
    """`?liveness=dead&liveness=suspect&cordoned=false`; retired ones only when asked for."""

    ended_statuses: ClassVar[frozenset[str]] = NODE_LIVENESS.final
    state_field: ClassVar[str] = "liveness"
    switch: ClassVar[str] = "retired"

    liveness = filters.MultipleChoiceFilter(choices=NODE_LIVENESS.choices)
    retired = filters.BooleanFilter(method="_keep", label="Include those that were retired.")
    name = filters.CharFilter(lookup_expr="icontains")
    rack = filters.CharFilter(field_name="failure_domain__parent__name")

    class Meta:
        model = Node
        fields: ClassVar[list[str]] = [
            "liveness",
            "cordoned",
            "drain_status",
            "simulated",
            "name",
            "rack",
            "retired",
        ]


class AcceleratorFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?node=<id>&kind=cuda&parent_uuid=GPU-…`."""

    node = filters.UUIDFilter(field_name="node_id")

    class Meta:
        model = Accelerator
        fields: ClassVar[list[str]] = ["node", "kind", "split", "parent_uuid", "profile"]


class JoinTokenFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?used=false`."""

    used = filters.BooleanFilter(field_name="used_at", lookup_expr="isnull", exclude=True)

    class Meta:
        model = JoinToken
        fields: ClassVar[list[str]] = ["used"]


class InstallationFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?status=failed&host=gpu-1&node=<id>`."""

    status = filters.MultipleChoiceFilter(choices=INSTALLATION.choices)
    node = filters.UUIDFilter(field_name="node_id")

    class Meta:
        model = NodeInstallation
        fields: ClassVar[list[str]] = ["status", "host", "node", "action"]


class SshHostKeyFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?host=gpu-1&port=22`."""

    class Meta:
        model = SshHostKey
        fields: ClassVar[list[str]] = ["host", "port", "key_type"]


class ModelFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?name=llama&digest=sha256:…`."""

    name = filters.CharFilter(lookup_expr="icontains")

    class Meta:
        model = ServedModel
        fields: ClassVar[list[str]] = ["name", "digest"]


class DeploymentFilter(_LiveByDefault):
    """`?status=active&model=<id>`; deleted ones only when asked for."""

    ended_statuses: ClassVar[frozenset[str]] = DEPLOYMENT.final

    ended = filters.BooleanFilter(method="_keep", label="Include those that have ended.")
    status = filters.MultipleChoiceFilter(choices=DEPLOYMENT.choices)
    model = filters.UUIDFilter(field_name="model_id")

    class Meta:
        model = Deployment
        fields: ClassVar[list[str]] = ["status", "model", "name", "served_name", "engine", "ended"]


class ReplicaFilter(_LiveByDefault):
    """`?status=failed&deployment=<id>&node=<id>`; stopped ones only when asked for."""

    ended_statuses: ClassVar[frozenset[str]] = REPLICA.final

    ended = filters.BooleanFilter(method="_keep", label="Include those that have ended.")
    status = filters.MultipleChoiceFilter(choices=REPLICA.choices)
    deployment = filters.UUIDFilter(field_name="deployment_id")
    node = filters.UUIDFilter(field_name="node_id")
    model = filters.UUIDFilter(field_name="deployment__model_id")

    class Meta:
        model = Replica
        fields: ClassVar[list[str]] = ["status", "wanted", "deployment", "node", "model", "ended"]


class SessionFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?replica=<id>&since=2026-01-01T00:00:00Z`."""

    replica = filters.UUIDFilter(field_name="replica_id")
    node = filters.CharFilter(field_name="node_name")
    model = filters.CharFilter(field_name="model_name")
    since = filters.IsoDateTimeFilter(field_name="last_turn_at", lookup_expr="gte")
    until = filters.IsoDateTimeFilter(field_name="last_turn_at", lookup_expr="lt")

    class Meta:
        model = InferenceSession
        fields: ClassVar[list[str]] = ["session_id", "replica", "node", "model", "last_outcome"]


class RelocationFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?session=<id>&status=failed`."""

    session = filters.NumberFilter(field_name="session_id")
    source = filters.UUIDFilter(field_name="source_id")
    target = filters.UUIDFilter(field_name="target_id")
    status = filters.MultipleChoiceFilter(choices=RELOCATION.choices)
    trigger = filters.MultipleChoiceFilter(choices=[(name, name) for name in TRIGGERS])
    since = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="gte")

    class Meta:
        model = Relocation
        fields: ClassVar[list[str]] = ["session", "source", "target", "status", "trigger", "way"]


class ReleaseFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?deployment=<id>`."""

    deployment = filters.UUIDFilter(field_name="deployment_id")
    model = filters.UUIDFilter(field_name="model_id")

    class Meta:
        model = Release
        fields: ClassVar[list[str]] = ["deployment", "model", "number", "engine"]


class ValidationFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?status=go&model=<id>&engine=vllm`."""

    status = filters.MultipleChoiceFilter(choices=VALIDATION.choices)
    model = filters.UUIDFilter(field_name="model_id")
    engine = filters.CharFilter(method="_on", label="Tried on this engine.")

    class Meta:
        model = Validation
        fields: ClassVar[list[str]] = ["status", "model", "engine"]

    def _on(self, rows: QuerySet[Validation], name: str, engine: str) -> QuerySet[Validation]:  # noqa: ARG002 - django_filters' signature
        """Those that try an engine."""
        return rows.filter(engines__contains=[engine])


class RolloutFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?deployment=<id>&status=running`."""

    deployment = filters.UUIDFilter(field_name="deployment_id")
    status = filters.MultipleChoiceFilter(choices=ROLLOUT.choices)
    since = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="gte")

    class Meta:
        model = Rollout
        fields: ClassVar[list[str]] = ["deployment", "status", "asked_by"]


class ModelImportFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?status=fetching&node=<id>`."""

    status = filters.MultipleChoiceFilter(choices=MODEL_IMPORT.choices)

    class Meta:
        model = ModelImport
        fields: ClassVar[list[str]] = ["status", "node", "name", "kind", "asked_by"]


class EventFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?subject_kind=replica&subject_id=<id>&since=…&until=…`."""

    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte")
    until = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt")

    class Meta:
        model = Event
        fields: ClassVar[list[str]] = ["subject_kind", "subject_id", "event", "actor"]


class IncidentFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?status=open&kind=mass_silence`."""

    status = filters.MultipleChoiceFilter(choices=INCIDENT.choices)
    node = filters.UUIDFilter(field_name="node_ids", lookup_expr="contains", method="_with_node")

    class Meta:
        model = Incident
        fields: ClassVar[list[str]] = ["status", "kind", "scope", "node"]

    def _with_node(self, queryset: QuerySet[Incident], _name: str, node_id: UUID) -> QuerySet[Incident]:
        return queryset.filter(node_ids__contains=[node_id])


class StagedStartFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?open=true`."""

    open = filters.BooleanFilter(field_name="ended_at", lookup_expr="isnull")

    class Meta:
        model = StagedStart
        fields: ClassVar[list[str]] = ["open"]


class ApiKeyFilter(filters.FilterSet):  # type: ignore[misc]  # django_filters is untyped
    """`?user=<name>&revoked=false`."""

    user = filters.CharFilter(field_name="user__username")
    revoked = filters.BooleanFilter(field_name="revoked_at", lookup_expr="isnull", exclude=True)

    class Meta:
        model = ApiKey
        fields: ClassVar[list[str]] = ["user", "revoked"]
