"""What each layer of a model keeps of a sequence: the shape, before any element type or split."""

from __future__ import annotations

from dataclasses import dataclass, field

FULL = "full attention"
SLIDING = "sliding window"
CHUNKED = "attention chunk"
LATENT = "latent attention"
RECURRENT = "recurrent state"
NOTHING = "keeps nothing"


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of a layer's fixed state for each sequence, however long it is."""

    name: str
    units: int
    """Heads or channels: tensor parallel accelerators share them out."""
    elements_each: int
    element_bytes: int | None = None
    """`None`: the type that the model computes in."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What one layer keeps."""

    kind: str
    heads: int = 0
    """Key-value heads; 0 where the layer keeps nothing of single tokens."""
    elements: int = 0
    """Numbers that one head keeps of one token: key and value together."""
    key_elements: int = 0
    """Part of `elements` that is the key; for the arithmetic that people read."""
    is_split: bool = True
    """Whether tensor parallel accelerators share the heads out; a latent is kept whole by each."""
    window_tokens: int | None = None
    """No more than so many newest tokens are kept."""
    index_bytes: int = 0
    """Beside keys and values: bytes of one token in an index, whatever type the cache has."""
    state: tuple[StatePart, ...] = ()

    @property
    def elements_per_token(self) -> int:
        """Numbers that all heads keep of one token."""
        return self.heads * self.elements


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All layers in order, and what else config.json says about memory."""

    model_type: str
    layers: tuple[LayerMemory, ...]
    attention_heads: int
    """Query heads; 0 for a model without attention."""
    hidden: int
    intermediate: int
    """Widest inner size of a feed-forward block; 0 where the config does not say."""
    vocabulary: int
    """0 where the config does not say."""
    dtype: str
    """Element type of the checkpoint; empty where the config does not say."""
    kv_dtype: str = ""
    """Element type of the cache that a quantised checkpoint brings scales for; empty without."""
    draft_layers: tuple[LayerMemory, ...] = ()
    """Layers for multi-token prediction, held only if that is switched on."""
    assumptions: tuple[str, ...] = ()
    """What the config leaves out, and what was taken for it."""
    is_quantised: bool = False
    """The checkpoint says that its weights are stored in another type than it is computed in."""
    cache_default: str = ""
    """Element type that engines choose for the cache of this family by themselves; empty: the model's."""


@dataclass(frozen=True, slots=True)
class UnknownLayout:
    """The memory cannot be computed; guessing would be worse."""

    reason: str
    upper_bound_elements: int | None = None
    """Numbers a token if every layer kept full keys and values; `None` where not even that is known."""
    element_bytes: int = 2
    """Of the model's type, for the bound."""
    facts: tuple[tuple[str, object], ...] = field(default=())
    """Names and values of the fields that are not understood."""

    @property
    def upper_bound_bytes_per_token(self) -> int | None:
        """At most so many bytes a token and sequence; fixed state is not in it."""
        if self.upper_bound_elements is None:
            return None
        return self.upper_bound_elements * self.element_bytes

    def summary(self) -> str:
        """One line for people."""
        bound = self.upper_bound_bytes_per_token
        tail = f"upper bound {bound:,} bytes a token" if bound is not None else "no upper bound is known"
        return f"Unsupported attention layout: {self.reason}. Estimate not available ({tail})"
