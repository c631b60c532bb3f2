"""The form of a validation. It checks shapes; services check meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms

from exaserve_ops.dashboard.forms import MIB, MOST_MEMORY_MIB, read_options
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.domain.engine_launch import SGLANG, TORCH, VLLM
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.services.deployments import BOUNDS
from exaserve_ops.serving.services.options import BUILT_IN_ENGINES
from exaserve_ops.validation.services import (
    LEAST_LIMIT_SECONDS,
    MOST_AT_ONCE,
    MOST_IDLE_SECONDS,
    MOST_LAUNCHES,
    MOST_LIMIT_SECONDS,
    ValidationWish,
)

_FIRST = (TORCH, VLLM, SGLANG)


def engine_choices() -> list[tuple[str, str]]:
    """Engines that can be tried: those that nodes offer, the usual ones first."""
    offered = {name for names in Node.objects.values_list("engines", flat=True) for name in names}
    known = sorted(offered | BUILT_IN_ENGINES, key=lambda name: (_place(name), name))
    return [(name, f"{name} (simulated)" if name.startswith("simulated") else name) for name in known]


def _place(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


class ValidationForm(forms.Form):
    """On which engines a model is tried, and how hard."""

    engines = forms.MultipleChoiceField(
        widget=forms.CheckboxSelectMultiple,
        help_text="One after the other; with two or more their answers are compared.",
    )
    engine_options = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}),
        help_text="One “name = value” a line, for all engines that are tried; “vllm: name = value” for one."
        " Empty: as usual.",
    )
    memory_mib = forms.IntegerField(
        min_value=0,
        max_value=MOST_MEMORY_MIB,
        required=False,
        label="Memory per replica, MiB",
        help_text="Empty: computed from the model.",
    )
    accelerators_per_replica = forms.IntegerField(
        min_value=1, max_value=1024, initial=1, label="Accelerators per replica",
        help_text="On each node that it runs on.",
    )  # fmt: skip
    nodes_per_replica = forms.IntegerField(
        min_value=1, max_value=BOUNDS["nodes_per_replica"][1], initial=1, required=False,
        label="Nodes per replica",
        help_text="More than 1: it runs on so many nodes of one supernode at once, and memory is of each;"
        " options tell the engine how: “torch: pipeline_stages = 2” or “vllm: tensor_parallel_size = 2”.",
    )  # fmt: skip
    nodes = forms.CharField(
        max_length=300, required=False, help_text="Names, separated by commas. Empty: any node with room."
    )
    most_at_once = forms.IntegerField(
        min_value=1, max_value=MOST_AT_ONCE, initial=32, label="Requests at once, at most",
        help_text="Where the concurrency ramp ends.",
    )  # fmt: skip
    idle_seconds = forms.IntegerField(
        min_value=0, max_value=MOST_IDLE_SECONDS, initial=30, label="Rest, seconds",
        help_text="Before it is seen whether the first answer afterwards is as quick.",
    )  # fmt: skip
    most_launches = forms.IntegerField(
        min_value=0, max_value=MOST_LAUNCHES, initial=6, label="Launches to find the best settings, at most",
        help_text="Besides what runs: with other limits of requests at once and of tokens a step. 0: none.",
    )  # fmt: skip
    ttft_limit_seconds = forms.FloatField(
        min_value=LEAST_LIMIT_SECONDS, max_value=MOST_LIMIT_SECONDS, initial=2.0, label="TTFT limit, seconds",
        help_text="For a setting to be a good one, of 19 in 20 answers.",
    )  # fmt: skip
    itl_limit_seconds = forms.FloatField(
        min_value=LEAST_LIMIT_SECONDS, max_value=MOST_LIMIT_SECONDS, initial=0.1,
        label="Limit between tokens, seconds",
    )  # fmt: skip
    reason = forms.CharField(max_length=300, label="Why")

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Django's signature
        super().__init__(*args, **kwargs)
        field = self.fields["engines"]
        if isinstance(field, forms.MultipleChoiceField):
            field.choices = engine_choices()

    def clean_engine_options(self) -> dict[str, dict[str, Any]]:
        """Read lines of `name = value`, each for all engines or for the one that it names."""
        engines = self.cleaned_data.get("engines", [])
        return _options_by_engine(self.cleaned_data["engine_options"], engines)


def wish_of(model: Model, data: dict[str, Any]) -> ValidationWish:
    """What the form asks for."""
    return ValidationWish(
        model_id=model.pk,
        engines=tuple(data["engines"]),
        engine_options=data["engine_options"],
        replica_memory_bytes=(data["memory_mib"] or 0) * MIB,
        accelerators_per_replica=data["accelerators_per_replica"],
        nodes_per_replica=data["nodes_per_replica"] or 1,
        nodes=tuple(name.strip() for name in data["nodes"].split(",") if name.strip()),
        idle_seconds=data["idle_seconds"],
        most_at_once=data["most_at_once"],
        most_launches=data["most_launches"],
        ttft_limit_seconds=data["ttft_limit_seconds"],
        itl_limit_seconds=data["itl_limit_seconds"],
    )


def _options_by_engine(text: str, engines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options of each engine that has some; what names the engine goes before what is for all.

    Raises `ValidationError` for a line that is none, or that is for an engine that is not tried.
    """
    for_all: list[str] = []
    for_one: dict[str, list[str]] = {engine: [] for engine in engines}
    for line in text.splitlines():
        engine, colon, rest = line.partition(":")
        if not colon or "=" in engine:
            for_all.append(line)
        elif (engine := engine.strip()) in for_one:
            for_one[engine].append(rest)
        elif engines:  # else that is what is wrong
            raise forms.ValidationError(f"“{line.strip()}” is for {engine}, which is not tried.")
    common = read_options("\n".join(for_all))
    found = {engine: common | read_options("\n".join(lines)) for engine, lines in for_one.items()}
    return {engine: options for engine, options in found.items() if options}
