"""What is generated is current; what exists is registered where people look for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Group, Permission
from django.core.management import CommandError, call_command
from django.db.models import Model

from exaserve_ops.access.domain.roles import FLEET_APPS, ROLES, permissions_of
from exaserve_ops.access.models import IdempotencyRecord
from exaserve_ops.api.urls import urlpatterns
from exaserve_ops.api.views.base import OpsViewSet
from exaserve_ops.health.models import LeaderLease, NodeLease
from exaserve_ops.inventory.models import FailureDomain, InstallationStep, NodeHardware
from exaserve_ops.rollouts.models import ReleaseAnswers, Wave, WaveMember
from exaserve_ops.serving.models import (
    CompiledSet,
    FoundPart,
    ModelFile,
    ModelManifest,
    NodeWish,
    ReplicaMember,
    StartRules,
)
from exaserve_ops.telemetry.models import NodeMinute, ReplicaMinute
from exaserve_ops.validation.models import ValidationCheck
from exaserve_ops.weights.models import NodeStore, NodeWeights, PrewarmPolicy, WeightsClaim
from tests.fakes.routes import all_routes

SHOWN_IN_ANOTHER = {
    ModelFile: "in the admin of its model",
    ModelManifest: "bytes for nodes; its digest stands in the admin of its model",
    FoundPart: "bytes on their way, gone when their import is registered",
}
NOT_OVER_REST = {
    FailureDomain: "shown with its node",
    InstallationStep: "shown with its installation",
    CompiledSet: "shown with its model",
    IdempotencyRecord: "what others were answered is not for reading",
    ModelFile: "shown with its model",
    ModelManifest: "between controllers and agents; its digest is shown with its model",
    FoundPart: "between agents and controllers",
    LeaderLease: "between controllers",
    NodeHardware: "shown with its node",
    NodeLease: "between controllers and agents",
    NodeWish: "between controllers and agents",
    **dict.fromkeys(
        (NodeStore, NodeWeights, WeightsClaim, PrewarmPolicy), "shown with the weights of models"
    ),
    ReplicaMember: "shown with its replica",
    ReleaseAnswers: "judged by gates, drawn on pages",
    ReplicaMinute: "drawn on pages",
    NodeMinute: "shown as the history of its node",
    ValidationCheck: "shown with its validation",
    StartRules: "shown with what starts now",
    Wave: "shown with its rollout",
    WaveMember: "shown with its rollout",
}


def our_models() -> list[type[Model]]:
    return [m for label in FLEET_APPS for m in apps.get_app_config(label).get_models()]


def test_every_app_of_ours_is_known_to_the_roles() -> None:
    ours = {c.label for c in apps.get_app_configs() if c.name.startswith("exaserve_ops.")}
    with_models = {label for label in ours if list(apps.get_app_config(label).get_models())}
    assert with_models == FLEET_APPS


def test_every_model_is_in_the_admin() -> None:
    missing = [
        m.__name__ for m in our_models() if not admin.site.is_registered(m) and m not in SHOWN_IN_ANOTHER
    ]
    assert missing == []


def test_every_model_has_a_list_over_rest_or_a_reason_why_not() -> None:
    views = [getattr(route.view, "cls", None) for route in all_routes()]
    sets = [view for view in views if isinstance(view, type) and issubclass(view, OpsViewSet)]
    listed = {view.queryset.model for view in sets if view.queryset is not None}
    assert urlpatterns
    assert listed | set(NOT_OVER_REST) == set(our_models())
    assert not listed & set(NOT_OVER_REST)


def test_every_post_over_rest_acts_once_or_changes_nothing() -> None:
    changes_nothing = {"plan_for", "read_launch"}
    for route in all_routes():
        view = getattr(route.view, "cls", None)
        if isinstance(view, type) and issubclass(view, OpsViewSet):
            action = route.view.actions.get("post")  # type: ignore[attr-defined]  # of a view set
            if action and action not in changes_nothing:
                assert getattr(getattr(view, action), "acts_once", False), f"{view.__name__}.{action}"


def test_every_action_over_rest_names_an_existing_permission(django_db_setup: None, db: None) -> None:  # noqa: ARG001 - opens the database
    rows = Permission.objects.select_related("content_type")
    existing = {f"{p.content_type.app_label}.{p.codename}" for p in rows}
    for route in all_routes():
        view = getattr(route.view, "cls", None)
        if isinstance(view, type) and issubclass(view, OpsViewSet):
            for action in route.view.actions.values():  # type: ignore[attr-defined]  # of a view set
                assert view.permission_by_action[action] in existing


@pytest.mark.django_db
def test_migrations_are_complete() -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_lifecycle_document_is_current() -> None:
    call_command("diagrams", check=True)


def test_outdated_lifecycle_document_is_caught(tmp_path: Path) -> None:
    file = tmp_path / "lifecycles.md"
    with pytest.raises(CommandError, match="not current"):
        call_command("diagrams", check=True, file=file)
    call_command("diagrams", file=file)
    call_command("diagrams", check=True, file=file)
    file.write_text(file.read_text() + "\nby hand")
    with pytest.raises(CommandError, match="not current"):
        call_command("diagrams", check=True, file=file)


@pytest.mark.django_db
def test_groups_have_exactly_the_permissions_of_their_roles() -> None:

    rows = Permission.objects.select_related("content_type")
    existing = {f"{p.content_type.app_label}.{p.codename}" for p in rows}
    before: frozenset[str] = frozenset()
    for role in ROLES:
        group = Group.objects.get(name=role.name)
        has = {
            f"{p.content_type.app_label}.{p.codename}"
            for p in group.permissions.select_related("content_type")
        }
        assert has == permissions_of(role.name, existing)
        assert before < has, "each role may do what the one before it may, and more"
        before = frozenset(has)


@pytest.mark.django_db
def test_no_role_but_admin_makes_users_or_groups() -> None:
    existing = {
        f"{p.content_type.app_label}.{p.codename}" for p in Permission.objects.select_related("content_type")
    }
    assert not any(p.startswith("auth.") for p in permissions_of("operator", existing))
    assert "auth.add_user" in permissions_of("admin", existing)
