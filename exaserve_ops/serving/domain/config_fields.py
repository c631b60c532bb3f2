"""Reading a model's config.json: which part is the language model, and fields that go by many names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as cut_short
from typing import Any

from exaserve_ops.serving.domain.class_defaults import ClassDefaults

_NESTED = ("thinker_config", "text_config", "llm_config", "language_config", "text_model_config", "llm")
"""Keys under which multimodal models keep their language model, in the order in which they are tried."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "kv_n_heads")
HEAD_DIM = ("head_dim", "kv_channels")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
    "n_ctx",
)
MOST_LAYERS = 10_000
"""More are a slip or an attack: readers make a row for each, whoever pasted the config."""
LARGEST = 1 << 40
"""Of any number that says a size or a count; larger ones are no model's and overflow floats."""
INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "moe_intermediate_size")


class LayoutError(ValueError):
    """The layout cannot be known; the message says why."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """The language model inside a config, and what only the outer levels say."""

    config: Mapping[str, Any]
    model_type: str
    outer: tuple[Mapping[str, Any], ...]
    """All levels, innermost first; the language model's own is the first."""

    def anywhere(self, *names: str) -> object:
        """First value that is set under one of these names, from the inside out; `None` if none is."""
        for level in self.outer:
            for name in names:
                if level.get(name) is not None:
                    return level[name]
        return None


def find_text_model(config: Mapping[str, Any]) -> TextModel:
    """Go down to the language model. A vision or audio tower counts in weights only."""
    levels = [config]
    while (inner := _inner(levels[0])) is not None:
        levels.insert(0, inner)
    return TextModel(levels[0], _model_type(levels), tuple(levels))


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for name in _NESTED:
        value = config.get(name)
        if isinstance(value, Mapping) and value:
            return value
    return None


def _model_type(levels: list[Mapping[str, Any]]) -> str:
    """Type of the language model; `<outer>_text` where only the outer level is named."""
    own = levels[0].get("model_type")
    if isinstance(own, str) and own:
        return own
    for outer in levels[1:]:
        name = outer.get("model_type")
        if isinstance(name, str) and name:
            return f"{name}_text"
    return ""


class Fields:
    """Fields of one language model, with its class's defaults; remembers what was assumed."""

    def __init__(self, config: Mapping[str, Any], defaults: ClassDefaults | None, model_type: str) -> None:
        """Read `config`; `defaults` is `None` for a class that has none worth trusting."""
        self._config = config
        self._defaults = defaults
        self._model_type = model_type
        self._assumed: dict[str, str] = {}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the config leaves out, and what was taken for it."""
        return tuple(self._assumed.values())

    @property
    def model_type(self) -> str:
        """Class that the config names."""
        return self._model_type

    def assume(self, name: str, text: str) -> None:
        """Remember an assumption."""
        self._assumed[name] = text

    def raw(self, name: str) -> Any:  # noqa: ANN401  # a field may hold anything that JSON can
        """Value as it stands; `None` if absent."""
        return self._config.get(name)

    def is_set(self, name: str) -> bool:
        """Whether a field is there and says something: neither null, false, zero nor empty."""
        return bool(self._config.get(name))

    def whole(self, names: tuple[str, ...], default: int | None = None) -> int:
        """First field that is set, a positive whole number, else the class's default.

        Raises `LayoutError` if neither is there, or if it is no such number.
        """
        found = self.optional(names)
        if found is not None:
            return found
        if default is None or default < 1:
            raise LayoutError(f"config.json has no usable '{names[0]}'")
        self.assume(names[0], f"'{names[0]}' is left out: {default}, as class {self._model_type} has it")
        return default

    def optional(self, names: tuple[str, ...]) -> int | None:
        """First field that is set; `None` if none is. Raises `LayoutError` if it is no positive number."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            return _usable(name, value, lowest=1)
        return None

    def count(self, name: str, default: int) -> int:
        """A whole number that may be 0; `default` if absent. Raises `LayoutError` if it is no such number."""
        value = self._config.get(name)
        if value is None:
            return default
        return _usable(name, value, lowest=0)

    def numbers(self, *names: str) -> frozenset[int] | None:
        """First list of whole numbers under one of these names; `None` if none is there.

        Raises `LayoutError` if it holds anything else.
        """
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
                raise LayoutError(f"'{name}' is no list of whole numbers")
            return frozenset(value)
        return None

    def layers(self) -> int:
        """Number of decoder layers. Raises `LayoutError`, also for more than `MOST_LAYERS`."""
        return within_layers(self.whole(LAYERS, self._defaults.layers if self._defaults else None))

    def heads(self) -> int:
        """Number of query heads."""
        return self.whole(HEADS, self._defaults.heads if self._defaults else None)

    def hidden(self) -> int:
        """Hidden size."""
        return self.whole(HIDDEN, self._defaults.hidden if self._defaults else None)

    def kv_heads(self) -> int:
        """Key-value heads: as told, else by the class, else as many as query heads.

        One where all query heads share (`multi_query`), whatever other fields say; the flag means nothing
        in Falcon's newer architecture.
        """
        if self._config.get("multi_query", self._class_multi_query()) and not self.is_set(
            "new_decoder_architecture"
        ):
            return 1
        told = self.optional(KV_HEADS)
        if told is not None:
            return told
        if self._defaults is not None and self._defaults.kv_heads is not None:
            return self.whole(KV_HEADS, self._defaults.kv_heads)
        return self.heads()

    def head_dim(self) -> int:
        """Head size: as told, else by the class, else hidden size over heads. Raises `LayoutError`."""
        told = self.optional(HEAD_DIM)
        if told is not None:
            return told
        if self._defaults is not None and self._defaults.head_dim is not None:
            return self.whole(HEAD_DIM, self._defaults.head_dim)
        hidden, heads = self.hidden(), self.heads()
        if hidden % heads:
            raise LayoutError(f"no 'head_dim', and {heads} heads do not divide a hidden size of {hidden}")
        return hidden // heads

    def window_tokens(self) -> int | None:
        """Sliding window: as told (null or 0 is none), else by the class."""
        if "sliding_window" not in self._config:
            default = self._defaults.window_tokens if self._defaults else None
            if default is not None:
                self.assume(
                    "sliding_window",
                    f"'sliding_window' is left out: {default}, as class {self._model_type} has it",
                )
            return default
        value = self._config["sliding_window"]
        if not value:
            return None
        return self.whole(("sliding_window",))

    def _class_multi_query(self) -> bool:
        return self._model_type in _MULTI_QUERY_CLASSES


def within_layers(count: int) -> int:
    """Return a number of layers. Raises `LayoutError` above `MOST_LAYERS`."""
    if count > MOST_LAYERS:
        raise LayoutError(f"config.json says {count:,} layers; no more than {MOST_LAYERS:,} are counted")
    return count


def _usable(name: str, value: object, *, lowest: int) -> int:
    """Return it as the whole number that it has to be. Raises `LayoutError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= LARGEST:
        raise LayoutError(f"config.json has no usable '{name}' (found {cut_short(value)})")
    return value


_MULTI_QUERY_CLASSES = frozenset({"falcon", "RefinedWebModel", "gpt_bigcode"})
"""Classes where all query heads share one key-value head unless the config says otherwise."""
