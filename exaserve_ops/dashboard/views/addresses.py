"""Addresses that people and browsers try, and that lead to the ones that exist."""

from __future__ import annotations

from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.templatetags.static import static
from django.urls import Resolver404, resolve
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe

DAY_SECONDS = 86_400


@require_safe
def without_slash(request: HttpRequest, page: str) -> HttpResponse:
    """Lead `/nodes/` to `/nodes`, where that is a page."""
    try:
        resolve(f"/{page}")
    except Resolver404 as error:
        raise Http404(page) from error
    query = request.META.get("QUERY_STRING", "")
    address = request.path.rstrip("/")
    return redirect(f"{address}?{query}" if query else address)


@login_not_required
@require_safe
@cache_control(max_age=DAY_SECONDS, public=True)
def favicon(request: HttpRequest) -> HttpResponse:  # noqa: ARG001 - Django's signature
    """Lead browsers that look for an icon at the usual place to ours."""
    return redirect(static("img/icon.svg"))
