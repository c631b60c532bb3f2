"""Who may see a page or press a button, and the page that says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast

from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponse]


def requires(permission: str) -> Callable[[View[P]], View[P]]:
    """Answer 403, and name the permission, for a user who lacks it; 400 for text that no database takes."""

    def decorate(view: View[P]) -> View[P]:
        @wraps(view)
        def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
            if not request.user.has_perm(permission):
                return render(request, "403.html", {"permission": permission}, status=403)
            if _has_nul(request):
                return render(request, "unreadable.html", status=400)
            return view(request, *args, **kwargs)

        guarded.required_permission = permission  # type: ignore[attr-defined]  # read by tests
        return cast("View[P]", guarded)

    return decorate


def _has_nul(request: HttpRequest) -> bool:
    """Whether the address or the form has a NUL, which Postgres takes in no text: no browser sends one."""
    given = (values for fields in (request.GET, request.POST) for _, values in fields.lists())
    return any("\x00" in value for values in given for value in values)


def actor_of(request: HttpRequest) -> str:
    """Name of the user for the audit record."""
    return f"user:{request.user.get_username()}"


def user_of(request: HttpRequest) -> User:
    """The logged-in user. Raises `TypeError` on a page that anybody may open."""
    user: Any = request.user
    if isinstance(user, AnonymousUser) or not isinstance(user, User):
        raise TypeError("this page needs a login")
    return user
