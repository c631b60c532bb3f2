"""API keys and idempotency keys in the Django admin."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from django import forms
from django.contrib import admin
from django.contrib.auth.models import AbstractUser
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from exaserve_ops.access.models import ApiKey, IdempotencyRecord, Scope
from exaserve_ops.access.selectors import keys_managed_by, may_make_keys_for
from exaserve_ops.access.services import create_api_key, revoke_api_key
from exaserve_ops.lib import clock
from exaserve_ops.lib.admin import ReadOnlyAdmin, ServiceAdmin, actor_of, show_secret_once


class ApiKeyForm(forms.ModelForm[ApiKey]):
    """Asks for a new key."""

    scopes = forms.MultipleChoiceField(choices=Scope.choices, widget=forms.CheckboxSelectMultiple)
    maker: ClassVar[AbstractUser]

    class Meta:
        model = ApiKey
        fields = ("name", "user", "scopes", "expires_at")

    def clean_user(self) -> AbstractUser:
        """Refuse a key that could do more than its maker."""
        owner = cast("AbstractUser", self.cleaned_data["user"])
        if not may_make_keys_for(self.maker, owner):
            raise ValidationError("You may not make keys for this user.")
        return owner


@admin.register(ApiKey)
class ApiKeyAdmin(ServiceAdmin[ApiKey]):
    """Keys are made and revoked, never changed."""

    list_display = ("name", "user", "prefix", "scopes", "created_at", "expires_at", "revoked_at")
    list_filter = ("revoked_at", "expires_at")
    search_fields = ("name", "prefix", "user__username")
    list_select_related = ("user",)
    actions = ("revoke",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[ApiKey]:
        """Return one's own keys, or all for those who may manage them."""
        return keys_managed_by(cast("AbstractUser", request.user))

    def get_form(
        self,
        request: HttpRequest,
        obj: ApiKey | None = None,
        change: bool = False,  # noqa: FBT001, FBT002 - Django's signature
        **kwargs: Any,  # noqa: ANN401 - Django's signature
    ) -> type[forms.ModelForm[ApiKey]]:
        """Return the form for a new key, bound to who makes it."""
        if obj is not None:
            return super().get_form(request, obj, change, **kwargs)
        form = type("ApiKeyFormOfMaker", (ApiKeyForm,), {"maker": request.user})
        return super().get_form(request, obj, change, **{**kwargs, "form": form})

    def has_change_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        """Nobody changes a key; the list, with its action to revoke, is for those who may."""
        return obj is None and super().has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:  # noqa: ARG002 - Django's signature
        """Nobody deletes a key: revoked ones stay for the record."""
        return False

    def save_model(
        self,
        request: HttpRequest,
        obj: ApiKey,
        form: forms.ModelForm[ApiKey],
        change: bool,  # noqa: ARG002, FBT001 - Django's signature
    ) -> None:
        """Make the key."""
        made, text = create_api_key(
            user=form.cleaned_data["user"],
            name=form.cleaned_data["name"],
            scopes=form.cleaned_data["scopes"],
            actor=actor_of(request),
            now=clock.now(),
            expires_at=form.cleaned_data["expires_at"],
        )
        obj.pk = made.pk
        request.META["exaops.secret"] = text

    def response_add(
        self,
        request: HttpRequest,
        obj: ApiKey,  # noqa: ARG002 - Django's signature
        post_url_continue: str | None = None,  # noqa: ARG002 - Django's signature
    ) -> HttpResponse:
        """Show the text of the new key, this once."""
        return show_secret_once(self, request, title="New API key", secret=request.META.pop("exaops.secret"))

    @admin.action(description="Revoke the chosen keys", permissions=["change"])
    def revoke(self, request: HttpRequest, keys: QuerySet[ApiKey]) -> None:
        """Revoke keys, at once for REST and within seconds at every gateway."""
        for key in keys:
            revoke_api_key(key, actor=actor_of(request), now=clock.now())
        self.message_user(request, "Revoked.")


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin[IdempotencyRecord]):
    """Answers kept for repetitions; their bodies are for their callers."""

    list_display = ("key", "user", "response_status", "created_at")
    list_select_related = ("user",)
    search_fields = ("key", "user__username")
    exclude = ("response_body",)
