"""API keys: list, make, revoke."""

from __future__ import annotations

import secrets
from datetime import timedelta
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from exaserve_ops.access.domain.roles import MANAGE_KEYS_OF_OTHERS
from exaserve_ops.access.selectors import keys_managed_by
from exaserve_ops.access.services import change_key_limits, create_api_key, revoke_api_key
from exaserve_ops.dashboard.access import actor_of, requires, user_of
from exaserve_ops.dashboard.forms import ApiKeyForm, KeyLimitsForm, limits_of
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError

_MADE = "keys_made"
_REMEMBERED_FORMS = 20


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@requires("access.view_apikey")
def keys(request: HttpRequest) -> HttpResponse:
    """Show keys, and make one. Its text is on this one answer and nowhere else."""
    may_add = request.user.has_perm("access.add_apikey")
    if request.method == "POST" and not may_add:
        return render(request, "403.html", {"permission": "access.add_apikey"}, status=403)
    once = request.POST.get("once", "")
    made: list[str] = request.session.get(_MADE, [])
    if once and once in made:
        # A reload of the answer that showed the key: the browser sends the form again.
        messages.info(request, "That key was made already, and its text cannot be shown again.")
        return redirect("keys")
    form = ApiKeyForm(request.POST or None)
    text = _make_key(request, form) if request.method == "POST" and form.is_valid() else ""
    if text:
        form = ApiKeyForm()
        request.session[_MADE] = [*made, once][-_REMEMBERED_FORMS:]
    own = keys_managed_by(user_of(request))
    listing = list_page(request, own.order_by("revoked_at", "name"))
    context = {
        "title": "API keys",
        "listing": listing,
        "rows": listing.page.object_list,
        "form": form,
        "key_text": text,
        "once": secrets.token_urlsafe(12),
        "now": clock.now(),
        "may_add": may_add,
        "may_limit": request.user.has_perm(MANAGE_KEYS_OF_OTHERS),
    }
    return render(request, "keys/list.html", context, status=422 if form.errors else 200)


@require_POST
@requires("access.change_apikey")
def key_revoke(request: HttpRequest, key_id: UUID) -> HttpResponse:
    """Revoke a key: one's own, or anybody's with the right to manage the keys of others."""
    key = get_object_or_404(keys_managed_by(user_of(request)), pk=key_id)
    revoke_api_key(key, actor=actor_of(request), now=clock.now())
    messages.success(request, f"{key.name} opens nothing any more.")
    return redirect("keys")


@require_POST
@requires(MANAGE_KEYS_OF_OTHERS)
def key_limits(request: HttpRequest, key_id: UUID) -> HttpResponse:
    """Change what a key may use. Nobody raises the limits of a key by being its user."""
    key = get_object_or_404(keys_managed_by(user_of(request)), pk=key_id)
    form = KeyLimitsForm(request.POST)
    if not form.is_valid():
        field, errors = next(iter(form.errors.items()))
        messages.error(request, f"{key.name} keeps its limits. {field.replace('_', ' ')}: {errors[0]}")
        return redirect("keys")
    reason = form.cleaned_data["reason"]
    changed = change_key_limits(key, limits_of(form), actor=actor_of(request), reason=reason, now=clock.now())
    messages.success(request, f"{changed.name}: {changed.limits.sentence()}.")
    return redirect("keys")


def _make_key(request: HttpRequest, form: ApiKeyForm) -> str:
    now = clock.now()
    days = form.cleaned_data["days"]
    try:
        _, text = create_api_key(
            user=user_of(request),
            name=form.cleaned_data["name"],
            scopes=form.cleaned_data["scopes"],
            actor=actor_of(request),
            now=now,
            expires_at=now + timedelta(days=days) if days else None,
            limits=limits_of(form),
        )
    except InvalidInputError as error:
        form.add_error(error.field if error.field in form.fields else None, error.message)
        return ""
    return text
