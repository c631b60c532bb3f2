"""Engines with their options, and launches that are read into drafts of deployments."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.serving.domain.launch_import import Draft, Line
from exaserve_ops.serving.domain.launch_words import LONGEST


class EngineOptionSerializer(serializers.Serializer[Any]):
    """One option of an engine."""

    name = serializers.CharField()
    group = serializers.CharField()
    help = serializers.CharField(help_text="What it is for.")
    takes = serializers.CharField(help_text="What may be given.", source="kind.words")
    default = serializers.CharField(help_text="What holds where nobody says it, in words.")
    flag = serializers.CharField(source="written", help_text="What it is on the engine's command line.")
    since = serializers.SerializerMethodField(help_text="First version that has it; empty: all known.")
    until = serializers.SerializerMethodField(help_text="First version without it; empty: none.")
    instead = serializers.CharField(help_text="What to use in versions that lack it.", allow_blank=True)

    def get_since(self, option: Any) -> str:  # noqa: ANN401 - an EngineOption
        """Version in numbers and dots."""
        return ".".join(map(str, option.since))

    def get_until(self, option: Any) -> str:  # noqa: ANN401 - an EngineOption
        """Version in numbers and dots."""
        return ".".join(map(str, option.until))


class EngineSerializer(serializers.Serializer[Any]):
    """One engine."""

    name = serializers.CharField(source="engine")
    title = serializers.CharField()
    versions = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Nodes that offer it, by version; the version of engines of this product is empty.",
    )
    options = EngineOptionSerializer(many=True)
    environment_prefixes = serializers.ListField(
        child=serializers.CharField(), help_text="What names of variables in `environment` may begin with."
    )


class LaunchImportSerializer(StrictSerializer):
    """What somebody would paste."""

    text = serializers.CharField(
        max_length=LONGEST,
        trim_whitespace=False,
        help_text="A launch command, Helm values, a custom resource, a workload or a Compose file.",
    )


class LineSerializer(serializers.Serializer[Line]):
    """One thing that was said, and what became of it."""

    said = serializers.CharField(help_text="With secrets masked.")
    became = serializers.CharField()


class DraftSerializer(serializers.Serializer[Draft]):
    """A deployment as far as it was understood; nothing of it is stored."""

    engine = serializers.CharField()
    version = serializers.CharField(allow_blank=True, help_text="That an image's tag says; empty: none.")
    engine_options = serializers.SerializerMethodField(help_text="As a new deployment takes them.")
    name = serializers.CharField(allow_blank=True)
    model = serializers.CharField(allow_blank=True, help_text="Path or name as it was written.")
    served_name = serializers.CharField(allow_blank=True)
    replicas = serializers.IntegerField(allow_null=True)
    nodes_per_replica = serializers.IntegerField(source="nodes")
    accelerators_per_replica = serializers.IntegerField(
        source="accelerators", help_text="On each of its nodes."
    )
    accelerator = serializers.CharField(allow_blank=True)
    understood = LineSerializer(many=True)
    not_understood = LineSerializer(many=True, help_text="With the reason.")
    notes = serializers.ListField(child=serializers.CharField(), help_text="What to know before it is used.")
    problems = serializers.ListField(child=serializers.CharField(), help_text="Why it would not start.")

    @extend_schema_field(OpenApiTypes.OBJECT)
    def get_engine_options(self, draft: Draft) -> dict[str, Any]:
        """Options by name."""
        return dict(draft.options)


class DraftsSerializer(serializers.Serializer[Any]):
    """Every deployment that the text describes."""

    drafts = DraftSerializer(many=True)
