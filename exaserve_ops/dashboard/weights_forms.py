"""Forms of the weights pages. They check shapes; services check meaning."""

from __future__ import annotations

from typing import Any

from django import forms

from exaserve_ops.lib.errors import InvalidInputError, OpsError
from exaserve_ops.serving.models import Model
from exaserve_ops.weights.domain.prewarm import (
    FASTEST_BYTES_PER_SECOND,
    MINUTES_OF_A_DAY,
    MOST_AT_ONCE,
    PrewarmRules,
)
from exaserve_ops.weights.domain.wanted import Origin
from exaserve_ops.weights.models import PrewarmPolicy

_PERCENT = 100
_MEGABYTE = 1_000_000
_HOUR = 60


class OriginsField(forms.CharField):
    """Places, one a line, nearest first: kind, address, and perhaps the name of a secret."""

    def __init__(self, *, help_text: str) -> None:
        widget = forms.Textarea(attrs={"rows": 3, "spellcheck": "false"})
        super().__init__(required=False, widget=widget, help_text=help_text)

    def clean(self, value: Any) -> list[Origin]:  # noqa: ANN401 - Django's signature
        """Read lines of two or three words. Raises `ValidationError`."""
        found = []
        for line in super().clean(value).splitlines():
            words = line.split()
            if not words:
                continue
            if len(words) not in (2, 3):
                raise forms.ValidationError(
                    f"“{line[:80]}” is not kind, address and perhaps a secret's name."
                )
            found.append(Origin(*words))
        return found


class PrewarmForm(forms.Form):
    """Rules for fetching a model ahead of being needed."""

    nodes = forms.CharField(
        required=False,
        widget=forms.TextInput(attrs={"spellcheck": "false"}),
        help_text="Names, apart by blanks; empty: every node.",
    )
    begin = forms.TimeField(
        initial="00:00", label="From, UTC", widget=forms.TimeInput(attrs={"type": "time"})
    )
    end = forms.TimeField(
        initial="00:00",
        label="Until, UTC",
        widget=forms.TimeInput(attrs={"type": "time"}),
        help_text="Before the start: past midnight. The same: at any hour.",
    )
    busiest_percent = forms.IntegerField(
        min_value=0, max_value=_PERCENT, initial=50, label="Begin while at most, percent busy"
    )
    megabytes_per_second = forms.FloatField(
        min_value=0,
        max_value=FASTEST_BYTES_PER_SECOND / _MEGABYTE,
        initial=0,
        label="Each node at most, MB/s",
        help_text="0: as fast as it goes.",
    )
    at_once = forms.IntegerField(min_value=1, max_value=MOST_AT_ONCE, initial=8, label="Nodes at once")
    reason = forms.CharField(max_length=500, label="Why")

    def rules(self, revision: str) -> PrewarmRules:
        """What a valid form asks for."""
        asked = self.cleaned_data
        begin, end = (asked[name].hour * _HOUR + asked[name].minute for name in ("begin", "end"))
        always = begin == end
        return PrewarmRules(
            revision,
            node_names=tuple(asked["nodes"].split()),
            busiest_ratio=asked["busiest_percent"] / _PERCENT,
            from_minute=0 if always else begin,
            until_minute=MINUTES_OF_A_DAY if always else end,
            bytes_per_second=round(asked["megabytes_per_second"] * _MEGABYTE),
            at_once=asked["at_once"],
        )


def initial_of(policy: PrewarmPolicy | None) -> dict[str, Any]:
    """What the form shows of a policy that is in force."""
    if policy is None:
        return {}
    return {
        "nodes": " ".join(policy.node_names),
        "begin": _clock(policy.from_minute),
        "end": _clock(policy.until_minute % MINUTES_OF_A_DAY),
        "busiest_percent": round(policy.busiest_ratio * _PERCENT),
        "megabytes_per_second": f"{policy.bytes_per_second / _MEGABYTE:g}",
        "at_once": policy.at_once,
    }


def _clock(minute: int) -> str:
    return f"{minute // _HOUR:02}:{minute % _HOUR:02}"


_FIELDS = {
    "node_names": "nodes",
    "from_minute": "begin",
    "until_minute": "end",
    "busiest_ratio": "busiest_percent",
    "bytes_per_second": "megabytes_per_second",
}
"""What forms call what services call otherwise."""


def note_refusal(form: forms.Form, error: OpsError) -> None:
    """Say beside the field that it is about why a service refused, or above all fields."""
    if isinstance(error, InvalidInputError):
        name = error.field.partition(".")[0]
        field = _FIELDS.get(name, name)
        if field in form.fields:
            form.add_error(field, error.message)
            return
    form.add_error(None, f"Not done: {error}.")


class CompiledForm(forms.Form):
    """A folder of what an engine compiled."""

    engine = forms.CharField(max_length=32, widget=forms.TextInput(attrs={"spellcheck": "false"}))
    hardware = forms.CharField(
        max_length=120,
        required=False,
        widget=forms.TextInput(attrs={"spellcheck": "false"}),
        help_text="Name or kind of an accelerator, as nodes show it. Empty: any.",
    )
    path = forms.CharField(
        max_length=1000,
        label="Folder",
        widget=forms.TextInput(attrs={"spellcheck": "false"}),
        help_text="A copy of engine-cache/<engine> from the home of an agent whose engine compiled it, below "
        "one of the folders in EXAOPS_COMPILED_FOLDERS.",
    )
    origins = OriginsField(help_text="As of the weights. Empty: that folder.")
    reason = forms.CharField(max_length=500, label="Why")


class StorageForm(forms.Form):
    """What replicas start from, and where nodes fetch it."""

    storage = forms.ChoiceField(choices=Model.Storage.choices, label="Replicas start from")
    origins = OriginsField(
        help_text="One a line, nearest first: kind (folder, http, s3, hub), address, and the name of a "
        "secret on the nodes where one is needed. Empty: the folder it was registered from.",
    )
    reason = forms.CharField(max_length=500, label="Why")
