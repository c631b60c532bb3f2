"""Addresses of the pages."""

from __future__ import annotations

from django.urls import path

from exaserve_ops.dashboard.views import (
    account,
    catalogue,
    deployments,
    fleet,
    keys,
    models,
    nodes,
    replicas,
)

urlpatterns = [
    path("", fleet.fleet, name="fleet"),
    path("fleet/problems", fleet.fleet_problems, name="fleet_problems"),
    path("fleet/events", fleet.fleet_events, name="fleet_events"),
    path("live/layout", fleet.live_layout, name="live_layout"),
    path("nodes", nodes.nodes, name="nodes"),
    path("nodes/join", nodes.node_join, name="node_join"),
    path("nodes/<uuid:node_id>", nodes.node, name="node"),
    path("nodes/<uuid:node_id>/row", nodes.node_row, name="node_row"),
    path("nodes/<uuid:node_id>/host", nodes.node_host, name="node_host"),
    path("nodes/<uuid:node_id>/figure", nodes.node_figure, name="node_figure"),
    path("nodes/<uuid:node_id>/cordon", nodes.node_cordon, name="node_cordon"),
    path("nodes/<uuid:node_id>/uncordon", nodes.node_uncordon, name="node_uncordon"),
    path("deployments", deployments.deployments, name="deployments"),
    path("deployments/new", deployments.deployment_new, name="deployment_new"),
    path("deployments/<uuid:deployment_id>", deployments.deployment, name="deployment"),
    path("deployments/<uuid:deployment_id>/row", deployments.deployment_row, name="deployment_row"),
    path(
        "deployments/<uuid:deployment_id>/scale",
        deployments.deployment_scale,
        name="deployment_scale",
    ),
    path(
        "deployments/<uuid:deployment_id>/delete",
        deployments.deployment_delete,
        name="deployment_delete",
    ),
    path("replicas", replicas.replicas, name="replicas"),
    path("replicas/<uuid:replica_id>", replicas.replica, name="replica"),
    path("replicas/<uuid:replica_id>/row", replicas.replica_row, name="replica_row"),
    path("replicas/<uuid:replica_id>/drawer", replicas.replica_drawer, name="replica_drawer"),
    path("replicas/<uuid:replica_id>/state", replicas.replica_state, name="replica_state"),
    path("replicas/<uuid:replica_id>/why", replicas.replica_why, name="replica_why"),
    path("replicas/<uuid:replica_id>/restart", replicas.replica_restart, name="replica_restart"),
    path("replicas/<uuid:replica_id>/replace", replicas.replica_replace, name="replica_replace"),
    path("sessions", catalogue.sessions, name="sessions"),
    path("sessions/<int:pk>", catalogue.session, name="session"),
    path("models", models.models, name="models"),
    path("models/new", models.model_new, name="model_new"),
    path("models/<uuid:model_id>", models.model, name="model"),
    path("events", catalogue.events, name="events"),
    path("keys", keys.keys, name="keys"),
    path("keys/<uuid:key_id>/revoke", keys.key_revoke, name="key_revoke"),
    path("search", catalogue.search, name="search"),
    path("login", account.SignInView.as_view(), name="login"),
    path("logout", account.SignOutView.as_view(), name="logout"),
    path("styleguide", account.styleguide, name="styleguide"),
]
