"""Models, deployments and replicas in the Django admin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest

from exaserve_ops.lib import clock
from exaserve_ops.lib.admin import ReadOnlyAdmin, ServiceAdmin, actor_of
from exaserve_ops.lib.errors import OpsError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.domain.starts import StartLimits
from exaserve_ops.serving.domain.trials import is_private
from exaserve_ops.serving.models import (
    CompiledSet,
    Deployment,
    Model,
    ModelFile,
    ModelImport,
    NodeWish,
    Release,
    Replica,
    ReplicaMember,
    StagedStart,
    StartRules,
)
from exaserve_ops.serving.services.deployments import (
    DeploymentWish,
    create_deployment,
    delete_deployment,
    update_deployment,
)
from exaserve_ops.serving.services.replicas import replace_replica, restart_replica
from exaserve_ops.serving.services.starts import set_start_limits


class ModelFileInline(admin.TabularInline[ModelFile, Model]):
    """Files of a model."""

    model = ModelFile
    extra = 0


@admin.register(Model)
class ModelAdmin(ReadOnlyAdmin[Model]):
    """Models; immutable, registered from their folders."""

    list_display = ("name", "digest", "parameter_count", "weights_bytes", "max_context_tokens", "created_at")
    search_fields = ("name", "digest", "source")
    inlines = (ModelFileInline,)


@admin.register(ModelImport)
class ModelImportAdmin(ReadOnlyAdmin[ModelImport]):
    """Imports: asked for on their page or over REST; controllers own the rows."""

    list_display = ("name", "status", "kind", "location", "node", "why", "asked_by", "created_at", "ended_at")
    list_filter = ("status", "kind")
    list_select_related = ("node",)
    search_fields = ("name", "location", "node__name")


@admin.register(CompiledSet)
class CompiledSetAdmin(ReadOnlyAdmin[CompiledSet]):
    """What engines compiled; registered and removed on the weights page and over REST."""

    list_display = ("model", "engine", "hardware", "total_bytes", "file_count", "registered_by", "created_at")
    list_filter = ("engine",)
    list_select_related = ("model",)
    search_fields = ("model__name", "hardware", "digest")
    exclude = ("manifest_body",)


class DeploymentForm(forms.ModelForm[Deployment]):
    """A new deployment, or a change of one that was read at `read_generation`."""

    nodes = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="Names of nodes that replicas may run on, apart by blanks; empty is any.",
    )
    read_generation = forms.IntegerField(required=False, widget=forms.HiddenInput)

    class Meta:
        model = Deployment
        fields = (
            "name",
            "model",
            "served_name",
            "replicas",
            "engine",
            "engine_options",
            "replica_memory_bytes",
            "accelerators_per_replica",
            "nodes_per_replica",
            "drain_seconds",
            "start_seconds",
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Django's signature
        super().__init__(*args, **kwargs)
        if kwargs.get("instance") is not None:
            self.initial["nodes"] = " ".join(self.instance.placement.get("nodes", ()))
            self.initial["read_generation"] = self.instance.generation
        for name in ("served_name", "replica_memory_bytes", "nodes_per_replica"):
            if name in self.fields:
                self.fields[name].required = False

    def clean_engine_options(self) -> dict[str, Any]:
        """Refuse JSON that is no object."""
        options = self.cleaned_data["engine_options"] or {}
        if not isinstance(options, dict):
            raise ValidationError('Give an object, such as {"kv_blocks": 512}.')
        return options


@admin.register(Deployment)
class DeploymentAdmin(ServiceAdmin[Deployment]):
    """Deployments: what is wanted of them can be changed, through the same services as everywhere."""

    form = DeploymentForm
    list_display = ("name", "model", "replicas", "status", "engine", "generation", "updated_at")
    list_filter = ("status", "engine")
    list_select_related = ("model",)
    search_fields = ("name", "served_name", "model__name")
    autocomplete_fields = ("model",)

    def get_readonly_fields(self, request: HttpRequest, obj: Deployment | None = None) -> tuple[str, ...]:  # noqa: ARG002 - Django's signature
        """What another deployment would be needed for."""
        if obj is None:
            return ()
        fixed = ("name", "model", "served_name", "engine", "engine_options", "replica_memory_bytes")
        parts = ("accelerators_per_replica", "nodes_per_replica")
        return (*fixed, *parts, "status", "generation", "created_at", "updated_at")

    def get_fields(
        self, request: HttpRequest, obj: Deployment | None = None
    ) -> list[str | list[str] | tuple[str, ...] | tuple[()]]:
        """Return the form's fields, and those that are only shown."""
        own = [*DeploymentForm.Meta.fields, "nodes", "read_generation"]
        return [*own, *(name for name in self.get_readonly_fields(request, obj) if name not in own)]

    def has_change_permission(self, request: HttpRequest, obj: Deployment | None = None) -> bool:
        """Nothing changes once it is being deleted, nor in what a validation tries an engine in."""
        closed = obj is not None and (obj.status != "active" or is_private(obj.served_name))
        return not closed and super().has_change_permission(request, obj)

    def save_model(
        self,
        request: HttpRequest,
        obj: Deployment,
        form: forms.ModelForm[Deployment],
        change: bool,  # noqa: FBT001 - Django's signature
    ) -> None:
        """Record the wish; a change of one that somebody else changed meanwhile is refused."""
        wish = form.cleaned_data
        nodes = tuple(wish["nodes"].split())
        if change:
            changes = {name: wish[name] for name in form.changed_data if name in _CHANGEABLE}
            update_deployment(
                obj.pk,
                changes | ({"nodes": nodes} if "nodes" in form.changed_data else {}),
                actor=actor_of(request),
                now=clock.now(),
                expected_generation=wish["read_generation"],
            )
        else:
            obj.pk = _create(wish, nodes, actor_of(request))
        obj.refresh_from_db()

    def get_deleted_objects(
        self,
        objs: Iterable[Deployment],
        request: HttpRequest,  # noqa: ARG002 - Django's signature
    ) -> tuple[list[str], dict[str, int], set[str], list[str]]:
        """Say what would go: replicas are drained and stay in the record, so only validations protect."""
        rows = list(objs)
        names = [f"{d.name}: its replicas are drained and stopped" for d in rows]
        kept = [
            f"{d.name}: a validation's, cancel that instead"
            for d in rows
            if d.status == "active" and is_private(d.served_name)
        ]
        return names, {"deployments": len(names)}, set(), kept

    def delete_model(self, request: HttpRequest, obj: Deployment) -> None:
        """Ask for the end of a deployment."""
        delete_deployment(obj.pk, actor=actor_of(request), now=clock.now())

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Deployment]) -> None:
        """Ask for the end of deployments."""
        for deployment in queryset:
            self.delete_model(request, deployment)


@admin.register(Replica)
class ReplicaAdmin(ReadOnlyAdmin[Replica]):
    """Replicas: controllers own the rows; people may ask for a restart or a replacement."""

    list_display = (
        "name",
        "deployment",
        "node",
        "status",
        "wanted",
        "restarts",
        "reason",
        "status_changed_at",
    )
    list_filter = ("status", "wanted")
    list_select_related = ("deployment", "node")
    search_fields = ("name", "deployment__name", "node__name", "id")
    actions = ("restart", "replace")

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Whether the actions are offered."""
        return request.user.has_perm("serving.change_replica")

    @admin.action(description="Restart the chosen replicas (failed ones)", permissions=["operate"])
    def restart(self, request: HttpRequest, replicas: QuerySet[Replica]) -> None:
        """Start failed replicas afresh."""
        self._each(request, replicas, restart_replica)

    @admin.action(description="Replace the chosen replicas", permissions=["operate"])
    def replace(self, request: HttpRequest, replicas: QuerySet[Replica]) -> None:
        """Let replicas go; their deployments make new ones."""
        self._each(request, replicas, replace_replica)

    def _each(
        self, request: HttpRequest, replicas: QuerySet[Replica], service: Callable[..., Replica]
    ) -> None:
        for replica in replicas:
            try:
                service(replica.pk, why="asked for in the admin", actor=actor_of(request), now=clock.now())
            except (OpsError, IllegalTransitionError) as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                self.message_user(request, f"{replica.name}: asked for")


@admin.register(ReplicaMember)
class ReplicaMemberAdmin(ReadOnlyAdmin[ReplicaMember]):
    """Parts of replicas that run on several nodes."""

    list_display = ("replica", "number", "node", "state", "epoch", "reason", "ended_at")
    list_filter = ("state",)
    list_select_related = ("replica", "node")
    search_fields = ("replica__name", "node__name")


@admin.register(Release)
class ReleaseAdmin(ReadOnlyAdmin[Release]):
    """What replicas run; immutable, made by rollouts."""

    list_display = ("deployment", "number", "model", "engine", "engine_options", "created_at", "created_by")
    list_select_related = ("deployment", "model")
    search_fields = ("deployment__name", "model__name")


@admin.register(NodeWish)
class NodeWishAdmin(ReadOnlyAdmin[NodeWish]):
    """What nodes were last told to run."""

    list_display = ("node", "revision", "content_sha256")
    list_select_related = ("node",)
    search_fields = ("node__name",)


@admin.register(StagedStart)
class StagedStartAdmin(ReadOnlyAdmin[StagedStart]):
    """Times in which more were to start than could at once."""

    list_display = ("began_at", "ended_at", "replicas", "waves", "most_waiting")


@admin.register(StartRules)
class StartRulesAdmin(ServiceAdmin[StartRules]):
    """How much may start at once; the one row appears once somebody has set it."""

    list_display = ("__str__", "per_node", "per_fleet", "from_origins", "in_place", "per_rack", "changed_at")
    readonly_fields = ("changed_at",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """It is made once, by whoever may change it."""
        return request.user.has_perm("serving.change_startrules") and not StartRules.objects.exists()

    def has_delete_permission(self, request: HttpRequest, obj: StartRules | None = None) -> bool:  # noqa: ARG002 - Django's signature
        """Limits are changed and never missing."""
        return False

    def save_model(
        self,
        request: HttpRequest,
        obj: StartRules,
        form: forms.ModelForm[StartRules],
        change: bool,  # noqa: ARG002, FBT001 - Django's signature
    ) -> None:
        """Set the limits."""
        limits = StartLimits(**form.cleaned_data)
        saved = set_start_limits(limits, actor=actor_of(request), now=clock.now(), reason="set in the admin")
        obj.pk = saved.pk
        obj.refresh_from_db()


_CHANGEABLE = frozenset({"replicas", "drain_seconds", "start_seconds"})


def _create(wish: dict[str, Any], nodes: tuple[str, ...], actor: str) -> UUID:
    made = create_deployment(
        DeploymentWish(
            name=wish["name"],
            model_id=wish["model"].pk,
            replicas=wish["replicas"],
            engine=wish["engine"],
            engine_options=wish["engine_options"],
            served_name=wish["served_name"],
            nodes=nodes,
            replica_memory_bytes=wish["replica_memory_bytes"] or 0,
            accelerators_per_replica=wish["accelerators_per_replica"],
            nodes_per_replica=wish["nodes_per_replica"] or 1,
            drain_seconds=wish["drain_seconds"],
            start_seconds=wish["start_seconds"],
        ),
        actor=actor,
        now=clock.now(),
    )
    return made.pk
