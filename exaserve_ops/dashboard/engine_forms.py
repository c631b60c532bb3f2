"""The typed options of an engine as a form: what each is for, what it takes, and what holds without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django import forms
from django.forms import BoundField
from django.http import QueryDict

from exaserve_ops.dashboard.forms import read_value
from workers.protocol.engines.kinds import (
    ChoiceOption,
    EngineOptionError,
    IntegerOption,
    JsonOption,
    NumberOption,
    SwitchOption,
    TextOption,
)
from workers.protocol.engines.option import ENVIRONMENT, EXTRA_ARGUMENTS, EngineOption, EngineTable
from workers.protocol.engines.tables import TABLES

PREFIX = "o"
"""Before the names of these fields: an option may be called as a field of the deployment is."""
GROUPS = {
    "parallel": "Over several accelerators",
    "length": "Lengths and batches",
    "memory": "Memory",
    "cache": "KV cache",
    "model": "Model and start",
    "pace": "Pace",
    "faults": "Faults",
    "rest": "Anything else",
}
_LONGEST = 8000


@dataclass(frozen=True, slots=True)
class Group:
    """Fields that are shown together."""

    title: str
    fields: list[BoundField]
    used: int
    """How many of them say something."""


class EngineOptionsForm(forms.Form):
    """One field for each option that the engine has today; empty ones are left to the engine."""

    def __init__(
        self, engine: str, data: QueryDict | None = None, initial: Mapping[str, Any] | None = None
    ) -> None:
        """Make the fields of an engine; none for one whose options are not known."""
        super().__init__(data, prefix=PREFIX, initial={k: shown(v) for k, v in (initial or {}).items()})
        self.table: EngineTable | None = TABLES.get(engine)
        self._groups: dict[str, str] = {}
        if self.table is None:
            return
        for option in self.table.options:
            if not option.until:
                self.fields[option.name] = _field_of(option)
                self._groups[option.name] = option.group
        self._add_rest(self.table)

    def _add_rest(self, table: EngineTable) -> None:
        agent = (
            "Split as a shell would; nothing that decides where it listens, what it serves or who may ask."
        )
        self._add_text(EXTRA_ARGUMENTS, "Extra arguments", agent)
        if table.environment_prefixes:
            names = ", ".join(table.environment_prefixes[:4])
            self._add_text(
                ENVIRONMENT, "Environment", f"NAME=value, as many as you like; names such as {names}."
            )

    def _add_text(self, name: str, label: str, help_text: str) -> None:
        widget = forms.Textarea(attrs={"rows": 2, "spellcheck": "false", "class": "mono"})
        self.fields[name] = forms.CharField(
            label=label, help_text=help_text, required=False, max_length=_LONGEST, widget=widget
        )
        self._groups[name] = "rest"

    @property
    def groups(self) -> list[Group]:
        """Fields by group, in the order of `GROUPS`."""
        found = []
        for group, title in GROUPS.items():
            fields = [self[name] for name, of in self._groups.items() if of == group]
            if fields:
                used = sum(bool(field.errors) or field.value() not in (None, "") for field in fields)
                found.append(Group(title, fields, used))
        return found

    @property
    def options(self) -> dict[str, Any]:
        """What a valid form says; what was left empty is left out."""
        return {name: value for name, value in self.cleaned_data.items() if value not in (None, "")}


def _field_of(option: EngineOption) -> forms.Field:
    common: dict[str, Any] = {
        "label": option.label,
        "required": False,
        "help_text": f"{option.help} Default: {option.default}.",
    }
    match option.kind:
        case IntegerOption(lowest, highest):
            return forms.IntegerField(min_value=lowest, max_value=highest, **common)
        case NumberOption(least, most):
            return forms.FloatField(min_value=least, max_value=most, **common)
        case ChoiceOption(choices):
            return forms.ChoiceField(choices=[("", "default"), *((c, c) for c in choices)], **common)
        case SwitchOption():
            words = [("", "default"), ("true", "on"), ("false", "off")]
            return forms.TypedChoiceField(choices=words, coerce=read_value, empty_value="", **common)
        case JsonOption(longest):
            widget = forms.Textarea(attrs={"rows": 2, "spellcheck": "false", "class": "mono"})
            return forms.CharField(
                max_length=longest, widget=widget, validators=[_checked_by(option)], **common
            )
        case TextOption(longest):
            return forms.CharField(max_length=longest, **common)


def _checked_by(option: EngineOption) -> Callable[[str], None]:
    """Validator that asks the option's kind."""

    def check(value: str) -> None:
        try:
            option.kind.to_text(option.name, value)
        except EngineOptionError as error:
            raise forms.ValidationError(str(error)) from error

    return check


def shown(value: object) -> object:
    """Return a value as the form's fields have it."""
    return str(value).lower() if isinstance(value, bool) else value
