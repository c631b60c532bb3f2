"""What the schema says beyond the serializers: authentication, and the header that makes a POST act once."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import build_bearer_security_scheme_object
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework.serializers import Serializer

_IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    OpenApiTypes.STR,
    OpenApiParameter.HEADER,
    description="A UUID of yours: the same request sent again is answered alike and not carried out again.",
)


class OpsSchema(AutoSchema):
    """Adds `Idempotency-Key` to whatever acts once."""

    def get_override_parameters(self) -> list[OpenApiParameter | Serializer[Any] | type[Serializer[Any]]]:
        """Return the parameters that no serializer or filter implies."""
        action = getattr(self.view, getattr(self.view, "action", None) or "", None)
        return [_IDEMPOTENCY_KEY] if getattr(action, "acts_once", False) else []


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """Bearer keys."""

    target_class = "exaserve_ops.api.authentication.ApiKeyAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, Any]:  # noqa: ARG002 - the base class's signature
        """Describe the header."""
        return dict(build_bearer_security_scheme_object("Authorization", "Bearer", bearer_format="xo-…"))
