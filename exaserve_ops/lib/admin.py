"""What the Django admin of every app has in common: rows are changed through services, or not at all."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from django.contrib import admin, messages
from django.db.models import JSONField, Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from exaserve_ops.lib.errors import OpsError
from exaserve_ops.lib.json_field import JsonTextField
from exaserve_ops.lib.lifecycle import IllegalTransitionError

M = TypeVar("M", bound=Model)


class ServiceAdmin(admin.ModelAdmin[M]):
    """Turns what a service refuses into a message on the page, with nothing saved."""

    formfield_overrides: ClassVar[dict[Any, dict[str, Any]]] = {JSONField: {"form_class": JsonTextField}}

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show or save the form."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except (OpsError, IllegalTransitionError) as error:
            return self._refused(request, error)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Ask, then delete."""
        try:
            return super().delete_view(request, object_id, extra_context)
        except (OpsError, IllegalTransitionError) as error:
            return self._refused(request, error)

    def _refused(self, request: HttpRequest, error: Exception) -> HttpResponse:
        self.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())


class ReadOnlyAdmin(ServiceAdmin[M]):
    """Rows that a controller owns: to be read here, never written."""

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002 - Django's signature
        """Nobody adds."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: M | None = None) -> bool:  # noqa: ARG002 - Django's signature
        """Nobody changes."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: M | None = None) -> bool:  # noqa: ARG002 - Django's signature
        """Nobody deletes."""
        return False


def actor_of(request: HttpRequest) -> str:
    """Who is signed in, for the audit record."""
    return f"user:{request.user.get_username()}"


def show_secret_once(
    model_admin: admin.ModelAdmin[M], request: HttpRequest, *, title: str, secret: str
) -> HttpResponse:
    """Show a secret on a page of its own: in no message, cookie or cache, and not again."""
    context = {
        **model_admin.admin_site.each_context(request),
        "title": title,
        "secret": secret,
        "opts": model_admin.opts,
    }
    response = TemplateResponse(request, "access/secret_once.html", context)
    response["Cache-Control"] = "no-store"
    return response
