"""What a page costs in queries, however large the fleet is."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoAssertNumQueries

from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.selectors import deployment_snapshot
from exaserve_ops.serving.services.replicas import create_replicas
from exaserve_ops.sessions.models import InferenceSession
from tests.dashboard.conftest import World, addresses
from tests.fakes.world import NOW, make_deployment, make_node


@pytest.mark.parametrize("page", ["nodes", "deployments", "replicas", "sessions", "models", "events"])
def test_a_table_costs_the_same_number_of_queries_however_long_it_is(
    operator: Client,
    world: World,
    page: str,
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    deployment = Deployment.objects.get(pk=world["deployment_id"])
    create_replicas(deployment.pk, 30, why="more", actor="test", now=NOW)
    for index in range(12):
        make_node(f"gpu-x{index}")
        make_deployment(f"more-{index}")
        InferenceSession.objects.create(
            session_id=f"s{index}", model_name="m", first_turn_at=NOW, last_turn_at=NOW
        )
    with django_assert_max_num_queries(15):
        operator.get(addresses(world)[page])


@pytest.mark.parametrize(("page", "most"), [("fleet", 21), ("node", 19), ("deployment", 18), ("replica", 18)])
def test_a_page_of_one_object_stays_in_its_query_budget(
    operator: Client,
    world: World,
    page: str,
    most: int,
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    with django_assert_max_num_queries(most):
        operator.get(addresses(world)[page])


def test_what_a_plan_depends_on_is_read_at_once_however_many_replicas_there_are(world: World) -> None:
    deployment = Deployment.objects.get(pk=world["deployment_id"])
    with CaptureQueriesContext(connection) as few:
        deployment_snapshot(deployment.pk, active_sessions={}, now=NOW)
    create_replicas(deployment.pk, 20, why="more", actor="test", now=NOW)
    with CaptureQueriesContext(connection) as many:
        assert deployment_snapshot(deployment.pk, active_sessions={}, now=NOW) is not None
    assert len(many) == len(few)
