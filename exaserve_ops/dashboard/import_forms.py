"""The form of an import. It checks shapes; services check meaning."""

from __future__ import annotations

from uuid import UUID

from django import forms

from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.serving.domain.origins import MAX_REVISION, MAX_SECRET_NAME
from exaserve_ops.serving.services.imports import ImportWish
from exaserve_ops.weights.domain.wanted import Origin

KINDS = (
    ("hub", "a hub, such as Hugging Face"),
    ("http", "a server that gives files"),
    ("s3", "an S3 bucket"),
)
_PLAIN = {"spellcheck": "false", "autocomplete": "off"}


class ImportForm(forms.Form):
    """A model that a node is to fetch."""

    name = forms.CharField(max_length=120, help_text="What clients send as “model” unless overridden.")
    kind = forms.ChoiceField(choices=KINDS, label="From")
    location = forms.CharField(
        max_length=1000,
        label="Address",
        widget=forms.TextInput(attrs=_PLAIN),
        help_text="https://hub/owner/name, https://host/path or s3://bucket/prefix; nodes must reach it.",
    )
    revision = forms.CharField(
        max_length=MAX_REVISION,
        required=False,
        widget=forms.TextInput(attrs=_PLAIN),
        help_text="Of a hub: branch, tag or commit. Empty: main. The commit it stands for is recorded.",
    )
    secret = forms.CharField(
        max_length=MAX_SECRET_NAME,
        required=False,
        label="Name of a secret",
        widget=forms.TextInput(attrs=_PLAIN),
        help_text="A file in secrets/ of the agent's home: a token, or JSON for S3. Never the secret itself.",
    )
    node = forms.ModelChoiceField(
        Node.objects.none(),
        required=False,
        empty_label="the one with most room",
        label="Fetched by",
        help_text="It keeps a copy, and is the first that others fetch from.",
    )
    only = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}),
        label="Only these files",
        help_text="One a line; * stands for anything where the place can be listed. Empty: safetensors, "
        "tokenizer, settings.",
    )
    reason = forms.CharField(max_length=500, label="Why")

    def __init__(self, data: object = None) -> None:
        super().__init__(data)  # type: ignore[arg-type]  # of a request, or nothing
        self.fields["node"].queryset = nodes_in_service().filter(simulated=False).order_by("name")  # type: ignore[attr-defined]  # of this field

    def wish(self) -> ImportWish:
        """What a valid form asks for."""
        asked = self.cleaned_data
        node_id: UUID | None = asked["node"].pk if asked["node"] is not None else None
        return ImportWish(
            name=asked["name"],
            origin=Origin(asked["kind"], asked["location"].strip(), asked["secret"]),
            revision=asked["revision"],
            files=tuple(line.strip() for line in asked["only"].splitlines() if line.strip()),
            node_id=node_id,
        )
