"""Forms of the pages. They check shapes; services check meaning."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.validators import validate_slug

from exaserve_ops.access.domain.limits import (
    INTERACTIVE,
    MOST_CONCURRENT,
    MOST_TOKENS_PER_MINUTE,
    TRAFFIC_CLASSES,
    KeyLimits,
)
from exaserve_ops.access.models import Scope
from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.serving.domain.accelerator_wish import ANY, MOST_BYTES, MOST_PERCENT, SLICE, WHOLE
from exaserve_ops.serving.domain.launch_words import LONGEST
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.services.deployments import BOUNDS, MAX_REPLICAS
from workers.protocol.engines.own import SIMULATED, TORCH

MIB = 1 << 20
MOST_MEMORY_MIB = MOST_BYTES // MIB


class EngineLines(forms.Form):
    """A form with a field `engine_options` of lines, beside which stand the fields of typed options."""

    def clean_engine_options(self) -> dict[str, Any]:
        """Read lines of `name = value`."""
        return read_options(self.cleaned_data["engine_options"])

    def take_options(self, typed: dict[str, Any]) -> bool:
        """Add options that have fields of their own; false, with an error, where lines say them, too."""
        lines = self.cleaned_data["engine_options"]
        twice = sorted(lines.keys() & typed.keys())
        if twice:
            self.add_error("engine_options", f"{', '.join(twice)}: said here and in a field below.")
        self.cleaned_data["engine_options"] = {**lines, **typed}
        return not twice


class DeploymentForm(EngineLines):
    """A new deployment."""

    name = forms.CharField(max_length=60, validators=[validate_slug], help_text="Letters, digits, dashes.")
    model = forms.ModelChoiceField(Model.objects.all(), empty_label="Choose a model")
    replicas = forms.IntegerField(min_value=0, max_value=MAX_REPLICAS, initial=1)
    engine = forms.ChoiceField(
        help_text="What the agents of your nodes can run.",
        error_messages={
            "required": "Choose an engine that a node offers, or give an agent the interpreter of the one "
            "that you mean (EXAOPS_AGENT_<ENGINE>_PYTHON) and load this page again."
        },
    )
    drafted_engine = forms.CharField(required=False, max_length=60, widget=forms.HiddenInput)
    """Of the launch that filled this in: its options stay while no engine is chosen."""
    served_name = forms.CharField(
        max_length=120,
        required=False,
        help_text="What clients send as “model”. Empty: the name of the model chosen above.",
        widget=forms.TextInput(attrs={"data-empty-is": "id_model", "autocomplete": "off"}),
    )
    nodes = forms.ModelMultipleChoiceField(
        nodes_in_service(),
        required=False,
        to_field_name="name",
        help_text="Only these nodes; none chosen is any.",
        widget=forms.SelectMultiple(attrs={"size": 4}),
    )
    engine_options = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}),
        label="Engine options as lines",
        help_text="One “name = value” a line, or fill in the fields below.",
    )
    memory_mib = forms.IntegerField(
        min_value=0,
        max_value=MOST_MEMORY_MIB,
        required=False,
        label="Memory per replica, MiB",
        help_text="Empty: weights, KV for four longest contexts, and a quarter on top.",
    )
    accelerators_per_replica = forms.IntegerField(
        min_value=1, initial=1, help_text="On each node that it runs on."
    )
    nodes_per_replica = forms.IntegerField(
        min_value=1,
        max_value=BOUNDS["nodes_per_replica"][1],
        initial=1,
        required=False,
        help_text="More than 1: it runs on so many nodes of one supernode at once, and memory is of each.",
    )
    accelerator = forms.ChoiceField(
        required=False, help_text="A slice belongs to one replica; cards may hold several."
    )
    slice_memory_mib = forms.IntegerField(
        min_value=0,
        max_value=MOST_MEMORY_MIB,
        required=False,
        label="Least memory of a slice, MiB",
        help_text="Only with a slice.",
    )
    mps_thread_percent = forms.IntegerField(
        min_value=0,
        max_value=MOST_PERCENT,
        required=False,
        label="MPS: threads, percent",
        help_text="Most of a card's threads that a replica uses at once; needs the MPS daemon on the node.",
    )
    mps_memory_mib = forms.IntegerField(
        min_value=0,
        max_value=MOST_MEMORY_MIB,
        required=False,
        label="MPS: memory, MiB",
        help_text="Most that a replica may allocate on each of its accelerators.",
    )
    drain_seconds = forms.IntegerField(min_value=0, initial=60, label="Drain, seconds")
    start_seconds = forms.IntegerField(
        min_value=1,
        required=False,
        label="Start limit, seconds",
        help_text="Empty: five minutes, and time to read the weights.",
    )
    stall_seconds = forms.IntegerField(
        min_value=0,
        initial=60,
        required=False,
        label="Stall limit, seconds",
        help_text="Requests run and no token comes for so long: restarted. 0: never.",
    )
    standbys = forms.IntegerField(
        min_value=0,
        max_value=MAX_REPLICAS,
        initial=0,
        required=False,
        help_text="Beyond the replicas: started and loaded, without requests until one is needed.",
    )
    standbys_sleep = forms.BooleanField(
        required=False,
        label="Standbys sleep",
        help_text="Their accelerators' memory is given back until they are to serve; nobody else gets it.",
    )
    drain_slow = forms.BooleanField(
        required=False,
        label="Replace slow replicas",
        help_text="Those that stay slower than their peers; one at a time.",
    )
    requires_go = forms.BooleanField(
        required=False,
        label="Rollouts need a go",
        help_text="Of a validation of their model on their engine.",
    )
    balance_sessions = forms.BooleanField(
        required=False,
        initial=True,
        label="Balance sessions",
        help_text="Those of a replica whose KV memory they overfill move to an emptier one, between turns.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever a form takes
        super().__init__(*args, **kwargs)
        offered = {name for row in nodes_in_service().values_list("engines", flat=True) for name in row}
        # The first is what stands chosen: one that answers for real, where there is one.
        engines = sorted(offered, key=lambda name: (name.startswith(SIMULATED), name != TORCH, name))
        asked = self["engine"].value()
        unchosen = [] if asked is None or asked in offered else [("", "Choose an engine")]
        choices: Any = [*unchosen, *((name, name) for name in engines)]
        engine: Any = self.fields["engine"]
        engine.choices = choices
        accelerator: Any = self.fields["accelerator"]
        accelerator.choices = _accelerator_choices()

    @property
    def first_engine(self) -> str:
        """The engine that is chosen, or that a launch was for, or that stands first."""
        engine: Any = self.fields["engine"]
        said = self["engine"].value() or self["drafted_engine"].value()
        return str(said or next((name for name, _ in engine.choices), ""))

    def offers(self, engine: str) -> bool:
        """Whether some node has it."""
        field: Any = self.fields["engine"]
        return engine in {name for name, _ in field.choices}


class ImportForm(forms.Form):
    """What is pasted to become a deployment."""

    text = forms.CharField(
        label="Command or YAML",
        max_length=LONGEST,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 10, "spellcheck": "false", "class": "mono"}),
        help_text="vllm serve …, python -m sglang.launch_server …, docker run …, Helm values, a resource,"
        " a Kubernetes workload, a Compose file.",
    )
    draft = forms.IntegerField(min_value=0, required=False, widget=forms.HiddenInput)


def read_options(text: str) -> dict[str, Any]:
    """Read lines of `name = value`. Raises `ValidationError` for a line that is none."""
    options: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise forms.ValidationError(f"“{line.strip()}” is not “name = value”.")
        options[name.strip()] = read_value(value.strip())
    return options


def _accelerator_choices() -> list[tuple[str, str]]:
    """What can be asked for, with the slices that there are."""
    profiles = Accelerator.objects.exclude(profile="").values_list("profile", flat=True).order_by("profile")
    slices = [(f"{SLICE}:{profile.lower()}", f"a slice {profile}") for profile in profiles.distinct()]
    return [(ANY, "any"), (WHOLE, "whole cards"), (SLICE, "a slice of any size"), *slices]


class BalanceForm(forms.Form):
    """When sessions move to emptier replicas."""

    balance_sessions = forms.BooleanField(required=False)
    balance_from_percent = forms.IntegerField(
        label="How full",
        min_value=BOUNDS["balance_from_percent"][0],
        max_value=BOUNDS["balance_from_percent"][1],
    )
    balance_gap_percent = forms.IntegerField(
        label="Points less",
        min_value=BOUNDS["balance_gap_percent"][0],
        max_value=BOUNDS["balance_gap_percent"][1],
    )
    reason = forms.CharField(max_length=300, label="Why")


class ScaleForm(forms.Form):
    """Another number of replicas."""

    replicas = forms.IntegerField(min_value=0, max_value=MAX_REPLICAS)
    standbys = forms.IntegerField(min_value=0, max_value=MAX_REPLICAS, required=False)
    generation = forms.IntegerField(widget=forms.HiddenInput)
    reason = forms.CharField(max_length=300, required=False, label="Why")


class DeleteForm(forms.Form):
    """The end of a deployment."""

    generation = forms.IntegerField(widget=forms.HiddenInput)
    reason = forms.CharField(max_length=300, label="Why")


class DrainForm(forms.Form):
    """The emptying of a node."""

    reason = forms.CharField(max_length=500)
    minutes = forms.IntegerField(min_value=0, max_value=7 * 24 * 60)


class ModelForm(forms.Form):
    """A model to register."""

    name = forms.CharField(max_length=120, help_text="What clients send as “model” unless overridden.")
    path = forms.CharField(
        max_length=1000,
        label="Folder",
        help_text="On the control-plane machine and on every node: config.json, tokenizer, *.safetensors.",
    )


class ApiKeyForm(forms.Form):
    """A new API key."""

    name = forms.CharField(max_length=100, help_text="Who or what will use it.")
    scopes = forms.MultipleChoiceField(
        choices=Scope.choices, widget=forms.CheckboxSelectMultiple, initial=[Scope.INFERENCE.value]
    )
    days = forms.TypedChoiceField(
        choices=[(0, "never"), (7, "in 7 days"), (30, "in 30 days"), (365, "in a year")],
        coerce=int,
        label="Expires",
        initial=30,
    )
    max_concurrent_requests = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MOST_CONCURRENT,
        label="Requests at once",
        help_text="Over all gateways together. Empty: no limit.",
    )
    tokens_per_minute = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MOST_TOKENS_PER_MINUTE,
        label="Tokens a minute",
        help_text="Prompt and completion together. Empty: no limit.",
    )
    traffic_class = forms.ChoiceField(
        choices=[("interactive", "interactive"), ("batch", "batch: waits behind everybody else")],
        initial=INTERACTIVE,
        required=False,
        label="Traffic",
        help_text="Batch requests use only replicas that have room to spare, and may wait up to a minute.",
    )


def limits_of(form: forms.Form) -> KeyLimits:
    """Limits that a valid form of a key asks for."""
    return KeyLimits(
        form.cleaned_data["max_concurrent_requests"],
        form.cleaned_data["tokens_per_minute"],
        form.cleaned_data["traffic_class"] or INTERACTIVE,
    )


class KeyLimitsForm(forms.Form):
    """Other limits for a key, with the reason."""

    max_concurrent_requests = forms.IntegerField(required=False, min_value=1, max_value=MOST_CONCURRENT)
    tokens_per_minute = forms.IntegerField(required=False, min_value=1, max_value=MOST_TOKENS_PER_MINUTE)
    traffic_class = forms.ChoiceField(choices=[(name, name) for name in TRAFFIC_CLASSES])
    reason = forms.CharField(max_length=500)


def read_value(text: str) -> bool | int | float | str:
    """Read an engine option: true, false, a whole number, a number, else text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
