"""Nodes and what belongs to them in the Django admin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from exaserve_ops.inventory.models import (
    Accelerator,
    FailureDomain,
    InstallationStep,
    JoinToken,
    Node,
    NodeHardware,
    NodeInstallation,
    SshHostKey,
)
from exaserve_ops.inventory.services import (
    cordon_node,
    create_join_token,
    delete_node,
    revoke_node_keys,
    uncordon_node,
)
from exaserve_ops.lib import clock
from exaserve_ops.lib.admin import ReadOnlyAdmin, ServiceAdmin, actor_of, show_secret_once


@admin.register(FailureDomain)
class FailureDomainAdmin(ReadOnlyAdmin[FailureDomain]):
    """What fails together; agents' labels say so."""

    list_display = ("name", "kind", "parent")
    list_filter = ("kind",)
    list_select_related = ("parent",)
    search_fields = ("name",)


class AcceleratorInline(admin.TabularInline[Accelerator, Node]):
    """Accelerators of a node, as its agent found them."""

    model = Accelerator
    extra = 0
    can_delete = False
    fields = readonly_fields = ("uuid", "kind", "name", "memory_bytes", "ordinal")

    def has_add_permission(self, request: HttpRequest, obj: Node | None = None) -> bool:  # noqa: ARG002 - Django's signature
        """Nobody adds."""
        return False


@admin.register(NodeHardware)
class NodeHardwareAdmin(ReadOnlyAdmin[NodeHardware]):
    """Links and probe notes, as agents found them."""

    list_display = ("node", "recorded_at")
    list_select_related = ("node",)
    search_fields = ("node__name",)


@admin.register(Node)
class NodeAdmin(ServiceAdmin[Node]):
    """Only the wish of a node can be changed: whether it takes anything new."""

    list_display = ("name", "liveness", "cordoned", "hostname", "address", "agent_version", "last_report_at")
    list_filter = ("liveness", "cordoned", "simulated")
    list_select_related = ("failure_domain",)
    search_fields = ("name", "hostname", "address", "id")
    inlines = (AcceleratorInline,)
    actions = ("revoke_keys",)

    @admin.action(description="Revoke all keys of the selected nodes", permissions=["delete"])
    def revoke_keys(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        """For a node that may have fallen into wrong hands: it is cut off at once."""
        for node in queryset:
            revoke_node_keys(node.pk, actor=actor_of(request), now=clock.now())
        self.message_user(request, "Their agents are cut off; each must join again as a new node.")

    def get_readonly_fields(self, request: HttpRequest, obj: Node | None = None) -> tuple[str, ...]:  # noqa: ARG002 - Django's signature
        """All but the cordon."""
        editable = {"cordoned", "cordon_reason"}
        return tuple(field.name for field in self.opts.fields if field.name not in editable)

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002 - Django's signature
        """Nodes join with a token; nobody adds them here."""
        return False

    def save_model(
        self,
        request: HttpRequest,
        obj: Node,
        form: forms.ModelForm[Node],  # noqa: ARG002 - Django's signature
        change: bool,  # noqa: ARG002, FBT001 - Django's signature
    ) -> None:
        """Cordon or uncordon."""
        if obj.cordoned:
            cordon_node(obj.pk, reason=obj.cordon_reason, actor=actor_of(request), now=clock.now())
        else:
            uncordon_node(obj.pk, actor=actor_of(request), now=clock.now())
        obj.refresh_from_db()

    def get_deleted_objects(
        self, objs: QuerySet[Node] | Sequence[Node], request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[Any]]:
        """Say what goes and what stands in the way. Accelerators and lease go with their node."""
        names, counts, _needed, in_the_way = super().get_deleted_objects(objs, request)
        return names, counts, set(), in_the_way

    def delete_model(self, request: HttpRequest, obj: Node) -> None:
        """Forget a node that never ran anything."""
        delete_node(obj.pk, actor=actor_of(request), now=clock.now())

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        """Forget nodes that never ran anything."""
        for node in queryset:
            self.delete_model(request, node)


@admin.register(Accelerator)
class AcceleratorAdmin(ReadOnlyAdmin[Accelerator]):
    """Accelerators, as agents found them."""

    list_display = ("uuid", "node", "kind", "name", "memory_bytes", "ordinal")
    list_filter = ("kind",)
    list_select_related = ("node",)
    search_fields = ("uuid", "node__name", "name")


class JoinTokenForm(forms.ModelForm[JoinToken]):
    """Asks for a new token; it ends after the usual hour."""

    class Meta:
        model = JoinToken
        fields = ("note",)


@admin.register(JoinToken)
class JoinTokenAdmin(ServiceAdmin[JoinToken]):
    """Tokens are made here and shown once; nobody changes them."""

    form = JoinTokenForm
    list_display = (
        "__str__",
        "created_by",
        "created_at",
        "expires_at",
        "uses",
        "max_uses",
        "used_at",
        "used_by",
    )
    list_filter = ("used_at",)
    list_select_related = ("used_by",)
    search_fields = ("note", "created_by")

    def has_change_permission(self, request: HttpRequest, obj: JoinToken | None = None) -> bool:  # noqa: ARG002 - Django's signature
        """Nobody changes a token."""
        return False

    def save_model(
        self,
        request: HttpRequest,
        obj: JoinToken,
        form: forms.ModelForm[JoinToken],
        change: bool,  # noqa: ARG002, FBT001 - Django's signature
    ) -> None:
        """Make the token."""
        made, text = create_join_token(
            actor=actor_of(request), now=clock.now(), note=form.cleaned_data["note"]
        )
        obj.pk = made.pk
        request.META["exaops.secret"] = text

    def response_add(
        self,
        request: HttpRequest,
        obj: JoinToken,  # noqa: ARG002 - Django's signature
        post_url_continue: str | None = None,  # noqa: ARG002 - Django's signature
    ) -> HttpResponse:
        """Show the text of the new token, this once."""
        return show_secret_once(
            self, request, title="New join token", secret=request.META.pop("exaops.secret")
        )


class InstallationStepInline(admin.TabularInline[InstallationStep, NodeInstallation]):
    """Steps of an installation, with their logs."""

    model = InstallationStep
    extra = 0
    can_delete = False
    fields = readonly_fields = ("run", "name", "outcome", "summary", "log", "started_at", "finished_at")

    def has_add_permission(self, request: HttpRequest, obj: NodeInstallation | None = None) -> bool:  # noqa: ARG002 - Django's signature
        """Nobody adds."""
        return False


@admin.register(NodeInstallation)
class NodeInstallationAdmin(ReadOnlyAdmin[NodeInstallation]):
    """Agents put on machines over SSH; asked for on the Nodes page."""

    list_display = ("__str__", "status", "action", "port", "user", "auth", "created_at")
    list_filter = ("status", "action", "auth")
    search_fields = ("host", "node_name", "id")
    inlines = (InstallationStepInline,)


@admin.register(InstallationStep)
class InstallationStepAdmin(ReadOnlyAdmin[InstallationStep]):
    """Steps of all installations, for those who look for one outcome."""

    list_display = ("installation", "run", "name", "outcome", "summary", "started_at")
    list_filter = ("name", "outcome")
    list_select_related = ("installation",)


@admin.register(SshHostKey)
class SshHostKeyAdmin(ReadOnlyAdmin[SshHostKey]):
    """Host keys that people confirmed."""

    list_display = ("host", "port", "key_type", "fingerprint", "confirmed_by", "confirmed_at")
    search_fields = ("host", "fingerprint")
