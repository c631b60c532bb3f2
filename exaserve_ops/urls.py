"""Addresses of every page and endpoint."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path, re_path

from exaserve_ops.dashboard.views.addresses import favicon, without_slash

handler400 = "exaserve_ops.api.errors.bad_request"
handler500 = "exaserve_ops.api.errors.server_error"

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("exaserve_ops.api.urls")),
    path("", include("exaserve_ops.dashboard.urls")),
    path("favicon.ico", favicon, name="favicon"),
    # Last: only what nothing above answers to.
    re_path(r"^(?P<page>[^/].*[^/])/$", without_slash, name="without-slash"),
]
