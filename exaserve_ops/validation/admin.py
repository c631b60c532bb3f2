"""Validations in the Django admin: to be read; asked for on the dashboard or over REST."""

from __future__ import annotations

from django.contrib import admin

from exaserve_ops.lib.admin import ReadOnlyAdmin
from exaserve_ops.validation.models import Validation, ValidationCheck


class CheckInline(admin.TabularInline[ValidationCheck, Validation]):
    """Checks of a validation."""

    model = ValidationCheck
    extra = 0
    fields = ("position", "name", "engine", "status", "figure", "limit", "why", "began_at", "ended_at")
    readonly_fields = fields
    can_delete = False


@admin.register(Validation)
class ValidationAdmin(ReadOnlyAdmin[Validation]):
    """Validations with their checks."""

    list_display = ("model", "engines", "status", "why", "asked_by", "created_at", "ended_at")
    list_filter = ("status",)
    search_fields = ("model__name", "reason", "asked_by")
    inlines = (CheckInline,)


@admin.register(ValidationCheck)
class ValidationCheckAdmin(ReadOnlyAdmin[ValidationCheck]):
    """Single checks, for finding what failed where."""

    list_display = ("validation", "name", "engine", "status", "figure", "why")
    list_filter = ("status", "name", "engine")
