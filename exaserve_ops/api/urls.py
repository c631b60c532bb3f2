"""Addresses of REST, the join address of agents, and the probes. Include at the root."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path, re_path
from rest_framework.routers import SimpleRouter

from exaserve_ops.api.views.agent import JoinView
from exaserve_ops.api.views.capacity import CapacityViewSet
from exaserve_ops.api.views.compiled import CompiledViewSet
from exaserve_ops.api.views.deployments import DeploymentViewSet
from exaserve_ops.api.views.engines import EngineViewSet
from exaserve_ops.api.views.imports import ModelImportViewSet
from exaserve_ops.api.views.incidents import IncidentViewSet
from exaserve_ops.api.views.installations import InstallationViewSet, SshHostKeyViewSet
from exaserve_ops.api.views.inventory import AcceleratorViewSet, JoinTokenViewSet, NodeViewSet
from exaserve_ops.api.views.keys import ApiKeyViewSet
from exaserve_ops.api.views.meta import DocsView, SchemaView, UnknownAddressView, healthz, readyz
from exaserve_ops.api.views.models import ModelViewSet
from exaserve_ops.api.views.records import EventViewSet, SessionViewSet
from exaserve_ops.api.views.relocations import RelocationViewSet
from exaserve_ops.api.views.replicas import ReplicaViewSet
from exaserve_ops.api.views.rollouts import ReleaseViewSet, RolloutViewSet
from exaserve_ops.api.views.starts import StagedStartViewSet
from exaserve_ops.api.views.validations import ValidationViewSet
from exaserve_ops.api.views.weights import ModelWeightsViewSet

_router = SimpleRouter(trailing_slash=False, use_regex_path=False)
_router.register("nodes/join-tokens", JoinTokenViewSet, basename="api-join-token")
_router.register("nodes/installations", InstallationViewSet, basename="api-installation")
_router.register("nodes/host-keys", SshHostKeyViewSet, basename="api-host-key")
_router.register("nodes", NodeViewSet, basename="api-node")
_router.register("accelerators", AcceleratorViewSet, basename="api-accelerator")
_router.register("models", ModelViewSet, basename="api-model")
_router.register("imports", ModelImportViewSet, basename="api-import")
_router.register("deployments", DeploymentViewSet, basename="api-deployment")
_router.register("replicas", ReplicaViewSet, basename="api-replica")
_router.register("sessions", SessionViewSet, basename="api-session")
_router.register("relocations", RelocationViewSet, basename="api-relocation")
_router.register("releases", ReleaseViewSet, basename="api-release")
_router.register("rollouts", RolloutViewSet, basename="api-rollout")
_router.register("validations", ValidationViewSet, basename="api-validation")
_router.register("starts", StagedStartViewSet, basename="api-start")
_router.register("incidents", IncidentViewSet, basename="api-incident")
_router.register("events", EventViewSet, basename="api-event")
_router.register("keys", ApiKeyViewSet, basename="api-key")

_v1: list[URLPattern | URLResolver] = [
    path("deployments/import", EngineViewSet.as_view({"post": "read_launch"}), name="api-deployment-import"),
    path("engines", EngineViewSet.as_view({"get": "known"}), name="api-engines"),
    path("", include(_router.urls)),
    path("capacity/plan", CapacityViewSet.as_view({"post": "plan_for"}), name="api-capacity-plan"),
    path(
        "models/<uuid:pk>/weights",
        ModelWeightsViewSet.as_view({"get": "retrieve", "post": "act"}),
        name="api-model-weights",
    ),
    path(
        "models/<uuid:pk>/compiled",
        CompiledViewSet.as_view({"get": "retrieve", "post": "register"}),
        name="api-model-compiled",
    ),
    path(
        "models/<uuid:pk>/compiled/<uuid:compiled_id>",
        CompiledViewSet.as_view({"delete": "remove"}),
        name="api-model-compiled-one",
    ),
    path(
        "models/<uuid:pk>/prewarm",
        ModelWeightsViewSet.as_view({"post": "prewarm", "patch": "pause_prewarm", "delete": "end_prewarm"}),
        name="api-model-prewarm",
    ),
    path(
        "models/<uuid:pk>/storage", ModelWeightsViewSet.as_view({"post": "store"}), name="api-model-storage"
    ),
    path("agent/join", JoinView.as_view(), name="api-join"),
    path("schema", SchemaView.as_view(), name="api-schema"),
    path("docs", DocsView.as_view(), name="api-docs"),
]

urlpatterns: list[URLPattern | URLResolver] = [
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("api/v1/", include(_v1)),
    re_path(r"^api/", UnknownAddressView.as_view(), name="api-unknown"),
]
