"""The form of a rollout. It checks shapes; services check meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django import forms
from django.http import QueryDict

from exaserve_ops.dashboard.engine_forms import EngineOptionsForm, shown
from exaserve_ops.dashboard.forms import MIB, MOST_MEMORY_MIB, EngineLines
from exaserve_ops.rollouts.domain.policy import DEFAULT, HALT, ROLL_BACK
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.releases import ReleaseWish

_PLAIN = (
    *(
        "max_surge",
        "max_unavailable",
        "canary",
        "canary_soak_seconds",
        "soak_seconds",
        "min_requests",
        "warm_up_seconds",
    ),
    *("max_ttft_ratio", "max_itl_ratio", "on_failure", "move_sessions", "sessions_wait_seconds"),
    "second_approver",
)
"""Fields that the policy calls the same."""
_FORM_FIELDS = {"replica_memory_bytes": "memory_mib", "max_error_ratio": "max_error_percent"}
"""What the form calls fields of a wish, where it asks in other units."""
_PERCENT = 100.0


class RolloutForm(EngineLines):
    """What a deployment is to run, and how it gets there."""

    model = forms.ModelChoiceField(Model.objects.all(), empty_label=None)
    engine_options = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}),
        label="Other options",
        help_text="One “name = value” a line, of options that have no field below.",
    )
    memory_mib = forms.IntegerField(
        min_value=0,
        max_value=MOST_MEMORY_MIB,
        required=False,
        label="Memory per replica, MiB",
        help_text="Empty: as now, or what another model needs.",
    )
    reason = forms.CharField(max_length=300, label="Why")
    max_surge = forms.CharField(
        max_length=10,
        initial=DEFAULT.max_surge,
        label="Surge",
        help_text="Replicas beyond what is wanted, at once: a number, or a share such as 10%.",
    )
    max_unavailable = forms.CharField(
        max_length=10,
        initial=DEFAULT.max_unavailable,
        label="Unavailable",
        help_text="Replicas that may be missing at once, where there is no room for a surge.",
    )
    canary = forms.CharField(max_length=10, initial=DEFAULT.canary, help_text="Size of the first wave.")
    growth = forms.CharField(
        max_length=200,
        initial=", ".join(DEFAULT.growth),
        help_text="Sizes of the waves after it. No wave crosses a failure domain.",
    )
    approve_waves = forms.CharField(
        max_length=100,
        required=False,
        label="Approve waves",
        help_text="Numbers of waves that begin only when somebody lets them: 2, 5.",
    )
    canary_soak_seconds = forms.IntegerField(
        min_value=0, initial=DEFAULT.canary_soak_seconds, label="Watch the canary, seconds"
    )
    soak_seconds = forms.IntegerField(
        min_value=0, initial=DEFAULT.soak_seconds, label="Watch each wave, seconds"
    )
    min_requests = forms.IntegerField(
        min_value=0,
        initial=DEFAULT.min_requests,
        label="Answers needed",
        help_text="Of the new release, before a wave is judged. 0: none, for a deployment without traffic.",
    )
    warm_up_seconds = forms.IntegerField(
        min_value=0,
        initial=DEFAULT.warm_up_seconds,
        label="Warming up, seconds",
        help_text="Answers that a new replica begins so soon count for no duration: its caches are empty.",
    )
    max_error_percent = forms.FloatField(
        min_value=0,
        max_value=_PERCENT,
        initial=DEFAULT.max_error_ratio * _PERCENT,
        label="Failed requests, percent",
        help_text="More than the old release fails in the same minutes.",
    )
    max_ttft_ratio = forms.FloatField(
        min_value=1, initial=DEFAULT.max_ttft_ratio, label="TTFT p95, times the old release's"
    )
    max_itl_ratio = forms.FloatField(
        min_value=1, initial=DEFAULT.max_itl_ratio, label="Time between tokens p95, times the old one's"
    )
    on_failure = forms.ChoiceField(
        choices=[(ROLL_BACK, "roll back"), (HALT, "halt, and ask")],
        initial=DEFAULT.on_failure,
        label="When a gate closes",
    )
    sessions_wait_seconds = forms.IntegerField(
        min_value=0, initial=DEFAULT.sessions_wait_seconds, label="Wait for sessions, seconds"
    )
    move_sessions = forms.BooleanField(
        required=False,
        initial=DEFAULT.move_sessions,
        label="Move sessions between turns",
        help_text="Else they stay until they end, as long as is waited for them.",
    )
    second_approver = forms.BooleanField(
        required=False, label="Second approver", help_text="Somebody else must agree before it begins."
    )

    def clean_growth(self) -> list[str]:
        """Read sizes, apart by commas."""
        return [size.strip() for size in self.cleaned_data["growth"].split(",") if size.strip()]

    def clean_approve_waves(self) -> list[int]:
        """Read numbers, apart by commas."""
        found = [one.strip() for one in self.cleaned_data["approve_waves"].split(",") if one.strip()]
        if not all(one.isascii() and one.isdigit() for one in found):
            raise forms.ValidationError("Give numbers of waves, apart by commas: 2, 5.")
        return [int(one) for one in found]


@dataclass(frozen=True, slots=True)
class RolloutForms:
    """The form of a rollout with the typed options of the deployment's engine."""

    wish: RolloutForm
    options: EngineOptionsForm

    @classmethod
    def of(cls, deployment: Deployment, data: QueryDict | None) -> RolloutForms:
        """What was sent, or what the deployment runs now, for somebody to change."""
        typed = EngineOptionsForm(deployment.engine, data, initial=deployment.engine_options)
        others = {k: v for k, v in deployment.engine_options.items() if k not in typed.fields}
        lines = "\n".join(f"{name} = {shown(value)}" for name, value in others.items())
        initial = {"model": deployment.model_id, "engine_options": lines}
        return cls(RolloutForm(data, initial=initial), typed)

    def is_valid(self) -> bool:
        """Whether both are, and say nothing twice."""
        return (
            self.wish.is_valid() and self.options.is_valid() and self.wish.take_options(self.options.options)
        )

    @property
    def has_errors(self) -> bool:
        """Whether something is to be mended."""
        return bool(self.wish.errors or self.options.errors)

    def show_error(self, field: str, message: str) -> None:
        """Put what a service says beside the field that it is about."""
        option = field.removeprefix("engine_options.")
        if option != field and option in self.options.fields:
            self.options.add_error(option, message)
            return
        name = field.removeprefix("policy.").partition(".")[0]
        name = _FORM_FIELDS.get(name, name)
        self.wish.add_error(name if name in self.wish.fields else None, message)


def wish_of(data: dict[str, Any]) -> ReleaseWish:
    """The release that a valid form asks for."""
    return ReleaseWish(
        model_id=data["model"].pk,
        engine_options=data["engine_options"],
        replica_memory_bytes=(data["memory_mib"] or 0) * MIB,
    )


def policy_of(data: dict[str, Any]) -> dict[str, Any]:
    """The policy that a valid form asks for, still to be checked."""
    return {
        **{name: data[name] for name in _PLAIN},
        "growth": data["growth"],
        "approve_waves": data["approve_waves"],
        "max_error_ratio": data["max_error_percent"] / _PERCENT,
    }
