"""Addresses of every page and endpoint."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("exaserve_ops.api.urls")),
    path("", include("exaserve_ops.dashboard.urls")),
]
