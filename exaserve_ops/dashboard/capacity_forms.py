"""The question of the capacity page: a form that travels in the address, so that an answer can be sent on."""

from __future__ import annotations

from typing import Any

from django import forms
from django.forms import BoundField
from django.http import QueryDict

from exaserve_ops.dashboard.forms import read_value
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.lib.json_text import read_json
from exaserve_ops.serving.domain.engine_launch import SGLANG, TORCH, VLLM
from exaserve_ops.serving.domain.fleet_plan import Load, NodeKind
from exaserve_ops.serving.domain.lifecycle import DELETED
from exaserve_ops.serving.domain.memory_plan import AcceleratorMemory
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.selectors.capacity import AcceleratorKind, CapacityAsk, accelerator_kinds

GIB = 1 << 30
MAX_TOKENS = 100_000_000
MAX_GIB = 1 << 20
MAX_CONFIG_CHARACTERS = 40_000
"""Of a pasted config: it travels in the address."""
_WITHIN = {"min_value": 1, "max_value": MAX_TOKENS}


def _number(label: str, help_text: str = "", **more: Any) -> forms.IntegerField:  # noqa: ANN401 - of the field
    return forms.IntegerField(label=label, help_text=help_text, required=False, **_WITHIN | more)


def _decimal(label: str, help_text: str = "", *, highest: float = 1e9) -> forms.FloatField:
    return forms.FloatField(
        label=label, help_text=help_text, required=False, min_value=1e-6, max_value=highest
    )


class CapacityForm(forms.Form):
    """One model, the accelerators, and the load."""

    model = forms.ChoiceField(required=False, help_text="Registered, or one whose config.json you paste.")
    config = forms.CharField(
        label="config.json",
        required=False,
        max_length=MAX_CONFIG_CHARACTERS,
        widget=forms.Textarea(attrs={"rows": 5, "spellcheck": "false", "class": "mono"}),
        help_text="Of a model that is not registered.",
    )
    weights_gib = _decimal("Weights, GiB", "Sum of its files; known of a registered model.", highest=MAX_GIB)
    engine = forms.ChoiceField(
        choices=[(VLLM, "vLLM"), (SGLANG, "SGLang"), (TORCH, "built-in (torch)")],
        initial=VLLM,
        required=False,
    )
    engine_version = forms.RegexField(
        r"^[0-9A-Za-z.+-]*$",
        max_length=40,
        required=False,
        help_text="Rules differ; empty is the newest known.",
    )
    engine_options = forms.CharField(
        required=False,
        max_length=4000,
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false", "class": "mono"}),
        help_text="One “name = value” a line, such as kv_cache_dtype = fp8.",
    )
    accelerator = forms.ChoiceField(required=False, help_text="Of this fleet, or of a size that you give.")
    memory_gib = _decimal("Memory of one, GiB", highest=MAX_GIB)
    per_node = _number("Accelerators per node", max_value=1024)
    spare_percent = forms.IntegerField(
        label="Spare nodes, %",
        required=False,
        min_value=0,
        max_value=90,
        help_text="Of all nodes, for failures and standbys.",
    )
    prompt_tokens = _number("Prompt, mean tokens")
    output_tokens = _number("Answer, mean tokens")
    limit_tokens = _number("Longest request, tokens", "Prompt and answer.")
    requests_per_second = _decimal("Requests a second")
    seconds_per_request = _decimal("Seconds a request takes", "With these: requests at once (Little's law).")
    tokens_per_second = _decimal("Tokens a second of a replica", "Most output tokens that one makes.")
    measured_from = forms.ChoiceField(
        required=False, help_text="Its last day stands in for these two where they are empty."
    )
    sequences = _number(
        "Sequences each replica holds", "Then several may share an accelerator. Empty: all that fit."
    )
    concurrency = _number("Requests at once", "Where that is what is known.")
    sessions = _number("Conversations whose KV stays")
    replicas = _number("Replicas", "As many as that, whatever the load.", max_value=100_000)
    memory_per_replica_gib = _decimal(
        "Memory per replica, GiB", "As a deployment of the built-in engine sets aside.", highest=MAX_GIB
    )
    measured_kv = _number(
        "Measured KV bytes a token", "By an engine's own report; for an unknown layout.", max_value=1 << 40
    )
    accept_upper_bound = forms.BooleanField(
        required=False, label="Plan an unknown layout with its upper bound"
    )

    def __init__(self, data: QueryDict | None) -> None:
        """Bind to the address. One that asks nothing yet shows first values, and those that it names."""
        asks = data is not None and "prompt_tokens" in data
        super().__init__(data if asks else None, initial=_INITIAL | (data.dict() if data else {}))
        self.kinds = accelerator_kinds()
        names = list(Model.objects.order_by("name").values_list("name", flat=True))
        running = Deployment.objects.exclude(status=DELETED).order_by("name").values_list("name", flat=True)
        self._offer("model", "paste a config.json", [(name, name) for name in names])
        self._offer("accelerator", "a size that I give", [(_key(k), _words(k)) for k in self.kinds])
        self._offer("measured_from", "nothing is measured", [(name, name) for name in running])

    def group(self, *names: str) -> list[BoundField]:
        """Fields of one part of the form."""
        return [self[name] for name in names]

    @property
    def model_fields(self) -> list[BoundField]:
        """What runs."""
        return self.group("model", "weights_gib", "config", "engine", "engine_version", "engine_options")

    @property
    def node_fields(self) -> list[BoundField]:
        """Where it runs."""
        return self.group("accelerator", "memory_gib", "per_node", "spare_percent")

    @property
    def load_fields(self) -> list[BoundField]:
        """What is asked of it."""
        return self.group(
            "prompt_tokens", "output_tokens", "limit_tokens", "requests_per_second", "seconds_per_request",
            "sequences",
        )  # fmt: skip

    @property
    def more_fields(self) -> list[BoundField]:
        """What few need."""
        return self.group(
            "tokens_per_second", "measured_from", "concurrency", "sessions", "replicas",
            "memory_per_replica_gib", "measured_kv", "accept_upper_bound",
        )  # fmt: skip

    @property
    def more_is_used(self) -> bool:
        """Whether one of these is filled in, so that it is shown."""
        return any(field.value() not in (None, "", False) for field in self.more_fields)

    def clean_config(self) -> dict[str, Any]:
        """Read the pasted JSON."""
        text = self.cleaned_data["config"].strip()
        if not text:
            return {}
        try:
            value = read_json(text)
        except ValueError as error:
            raise forms.ValidationError(f"This is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise forms.ValidationError("This is no JSON object.")
        return value

    def clean_engine_options(self) -> dict[str, Any]:
        """Read lines of `name = value`, or of a command line: `--name value`."""
        options: dict[str, Any] = {}
        extra: list[str] = []
        for line in self.cleaned_data["engine_options"].splitlines():
            name, equals, value = line.partition("=")
            if line.strip().startswith("--"):
                extra.append(line.strip())
            elif equals and name.strip():
                options[name.strip()] = read_value(value.strip())
            elif line.strip():
                raise forms.ValidationError(f"“{line.strip()}” is not “name = value”.")
        return {**options, "extra_arguments": " ".join(extra)} if extra else options

    def ask(self) -> CapacityAsk:
        """The model and its load. Raises `InvalidInputError`."""
        given = self.cleaned_data
        prompt, output = given["prompt_tokens"] or 0, given["output_tokens"] or 0
        if not prompt + output:
            raise InvalidInputError("prompt_tokens", "say how long prompts and answers are")
        names = ("requests_per_second", "concurrency", "sessions", "replicas")
        load = Load(
            prompt,
            output,
            max(given["limit_tokens"] or 0, prompt + output),
            **{name: given[name] for name in names},
        )
        return CapacityAsk(
            load=load,
            model=given["model"],
            config={} if given["model"] else given["config"],
            weights_bytes=_bytes(given["weights_gib"]) or 0,
            engine=given["engine"] or VLLM,
            engine_version=given["engine_version"],
            engine_options=given["engine_options"],
            sequences=given["sequences"],
            budget_bytes=_bytes(given["memory_per_replica_gib"]),
            seconds_per_request=given["seconds_per_request"],
            tokens_per_second=given["tokens_per_second"],
            measured_from=given["measured_from"],
            measured_kv_bytes_per_token=given["measured_kv"],
            accepts_upper_bound=given["accept_upper_bound"],
        )

    def node_kind(self) -> NodeKind:
        """The nodes. Raises `InvalidInputError`."""
        given = self.cleaned_data
        known = next((kind for kind in self.kinds if _key(kind) == given["accelerator"]), None)
        size = _bytes(given["memory_gib"]) or (known.memory_bytes if known else None)
        if size is None:
            raise InvalidInputError("memory_gib", "choose an accelerator, or say how much memory one has")
        per_node = given["per_node"] or (known.per_node if known else 1)
        kind, shares = (known.kind, known.shares_memory) if known else ("", False)
        room = AcceleratorMemory(size, kind, shares_memory=shares)
        return NodeKind(room, per_node, (given["spare_percent"] or 0) / 100)

    def _offer(self, name: str, none: str, choices: list[tuple[str, str]]) -> None:
        field: Any = self.fields[name]
        field.choices = [("", none), *choices]


_INITIAL = {
    "engine": VLLM,
    "memory_gib": 80,
    "per_node": 8,
    "spare_percent": 10,
    "prompt_tokens": 384,
    "output_tokens": 128,
    "limit_tokens": 4096,
    "requests_per_second": 100,
    "seconds_per_request": 8,
}


def _key(kind: AcceleratorKind) -> str:
    return f"{kind.memory_bytes}|{kind.name}"


def _words(kind: AcceleratorKind) -> str:
    return f"{kind.name}, {kind.memory_bytes / GIB:.4g} GiB, {kind.per_node} on each of {kind.nodes} nodes"


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
