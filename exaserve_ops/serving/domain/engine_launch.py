"""What an engine's options say about memory, in one shape for all engines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exaserve_ops.lib.json_text import read_json
from exaserve_ops.serving.domain.kv_bytes import KvOptions
from exaserve_ops.serving.domain.kv_dtypes import AUTO

TORCH, VLLM, SGLANG = "torch", "vllm", "sglang"
_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
FP8 = "fp8_e4m3"
_TORCH_SCALE_BYTES = 2
_LARGEST = 1 << 60
"""Of any count: no option of an engine means more, and floats end somewhere."""
_NUMBER = re.compile(r"^(\d+(?:\.\d+)?)([kmgKMG]?)$")
_MTP_METHODS = ("mtp", "deepseek_mtp", "qwen3_next_mtp", "nextn", "ernie_mtp", "glm4_moe_mtp")


@dataclass(frozen=True, slots=True)
class _Names:
    """How one engine calls what we ask of it."""

    length: tuple[str, ...]
    share: str
    kv_bytes: str
    kv_tokens: str
    sequences: tuple[str, ...]
    default_sequences: int
    batched_tokens: tuple[str, ...]
    tensor: tuple[str, ...]
    pipeline: tuple[str, ...]
    windows_off: tuple[str, ...]
    eager: tuple[str, ...]
    overrides: tuple[str, ...]
    block: tuple[str, ...]
    default_block_tokens: int


_NAMES: Mapping[str, _Names] = {
    VLLM: _Names(
        length=("max_model_len",),
        share="gpu_memory_utilization",
        kv_bytes="kv_cache_memory_bytes",
        kv_tokens="",
        sequences=("max_num_seqs",),
        default_sequences=256,
        batched_tokens=("max_num_batched_tokens",),
        tensor=("tensor_parallel_size", "tp"),
        pipeline=("pipeline_parallel_size", "pp"),
        windows_off=("disable_hybrid_kv_cache_manager",),
        eager=("enforce_eager",),
        overrides=("hf_overrides",),
        block=("block_size",),
        default_block_tokens=16,
    ),
    SGLANG: _Names(
        length=("context_length",),
        share="mem_fraction_static",
        kv_bytes="",
        kv_tokens="max_total_tokens",
        sequences=("max_running_requests",),
        default_sequences=256,
        batched_tokens=("chunked_prefill_size",),
        tensor=("tp_size", "tensor_parallel_size", "tp"),
        pipeline=("pp_size", "pipeline_parallel_size"),
        windows_off=("disable_hybrid_swa_memory",),
        eager=("disable_cuda_graph",),
        overrides=("json_model_override_args",),
        block=("page_size",),
        default_block_tokens=1,
    ),
    TORCH: _Names(
        length=("max_model_len",),
        share="",
        kv_bytes="kv_memory_bytes",
        kv_tokens="",
        sequences=("max_num_seqs",),
        default_sequences=64,
        batched_tokens=("max_num_batched_tokens",),
        tensor=(),
        pipeline=("pipeline_stages",),
        windows_off=(),
        eager=(),
        overrides=(),
        block=(),
        default_block_tokens=16,
    ),
}

LENGTH_OPTION = {engine: names.length[0] for engine, names in _NAMES.items()}
SHARE_OPTION = {engine: names.share for engine, names in _NAMES.items() if names.share}
SEQUENCES_OPTION = {engine: names.sequences[0] for engine, names in _NAMES.items()}


class LaunchError(ValueError):
    """An option has a value that no engine takes; `option` names it."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """What a launch says about memory."""

    engine: str
    version: tuple[int, ...] = ()
    """Empty: not known."""
    kv: KvOptions = field(default_factory=KvOptions)
    length_tokens: int | None = None
    share_ratio: float | None = None
    """Share of the accelerator's memory; `None`: the engine's default."""
    kv_bytes: int | None = None
    """KV memory of each accelerator, if told in bytes."""
    kv_blocks: int | None = None
    """Blocks of KV memory, if told so."""
    kv_tokens: int | None = None
    """Tokens of KV memory, if told so."""
    sequences: int = 256
    batched_tokens: int | None = None
    """Tokens of one step; `None`: the engine's default, which depends on its version."""
    graphs: bool = True
    block_tokens: int = 16
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Of config.json."""
    window_limits_length: bool = False
    """The window is switched off by serving no longer sequences than it."""
    quantised_at_load: str = ""
    shares_weights: bool = False
    """Replicas on one node can hold one copy of the weights."""

    @property
    def ways(self) -> int:
        """Accelerators of one replica."""
        return self.kv.tensor_parallel * self.kv.pipeline_parallel


def known_engine(engine: str) -> bool:
    """Whether this engine's rules are known."""
    return engine in _NAMES


def read_launch(engine: str, options: Mapping[str, object], *, version: str = "") -> EngineLaunch:
    """Read an engine's options, with `extra_arguments` as a command line has them.

    Raises `LaunchError` for an engine whose rules are not known, and for values that make no sense.
    """
    names = _NAMES.get(engine)
    if names is None:
        raise LaunchError("engine", f"memory rules are known of {', '.join(_NAMES)}, not of '{engine}'")
    given = _Options(options)
    return EngineLaunch(
        engine=engine,
        version=_version(version),
        kv=KvOptions(
            kv_dtype=_torch_kv_dtype(given) if engine == TORCH else given.text("kv_cache_dtype") or AUTO,
            vector_scale_bytes=_TORCH_SCALE_BYTES if engine == TORCH and given.text("kv_dtype") == FP8 else 0,
            model_dtype=given.text("dtype"),
            tensor_parallel=given.whole(names.tensor) or 1,
            pipeline_parallel=given.whole(names.pipeline) or 1,
            # The built-in engine keeps all tokens of every layer.
            windows_off=engine == TORCH or given.flag(names.windows_off),
            draft_layers=_drafts(given),
        ),
        length_tokens=given.whole(names.length),
        share_ratio=given.ratio(names.share),
        kv_bytes=given.whole((names.kv_bytes,)),
        kv_blocks=given.whole(("num_blocks", "num_gpu_blocks_override")),
        kv_tokens=given.whole((names.kv_tokens,)),
        sequences=given.whole(names.sequences) or names.default_sequences,
        batched_tokens=given.whole(names.batched_tokens),
        graphs=engine != TORCH and not given.flag(names.eager),
        block_tokens=given.whole(names.block) or names.default_block_tokens,
        overrides=_overrides(given, names),
        window_limits_length=engine == VLLM and given.flag(("disable_sliding_window",)),
        quantised_at_load=given.text("quantization"),
        shares_weights=engine == TORCH and given.text("weights") in ("", "shared"),
    )


class _Options:
    """Options by plain names, whether given as such or as arguments."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._values = {_plain(name): value for name, value in options.items()}
        extra = self._values.pop("extra_arguments", "")
        for name, value in _arguments(extra):
            self._values.setdefault(name, value)

    def text(self, name: str) -> str:
        """Value as text; empty if absent."""
        value = self._values.get(name)
        return "" if value is None else str(value)

    def flag(self, names: tuple[str, ...]) -> bool:
        """Whether a switch is on."""
        return any(self.text(name).lower() in ("true", "1", "yes", "on") for name in names)

    def whole(self, names: tuple[str, ...]) -> int | None:
        """A positive whole number, also as `32k` or `1.5M`; `None` if absent, -1 or `auto`."""
        for name in names:
            text = self.text(name) if name else ""
            if text in ("", "auto", "-1", "None"):
                continue
            match = _NUMBER.match(text)
            number = float(match[1]) * _UNITS.get(match[2], 1) if match else 0.0
            if not 1 <= number <= _LARGEST or number != int(number):
                raise LaunchError(name, f"'{name}' must be a positive whole number, not '{text[:40]}'")
            return int(number)
        return None

    def ratio(self, name: str) -> float | None:
        """A share above 0, up to 1; `None` if absent."""
        text = self.text(name) if name else ""
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1:
            raise LaunchError(name, f"'{name}' must be a share above 0, up to 1, not '{text}'")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, as such or as JSON text; empty if absent."""
        value = self._values.get(name)
        if isinstance(value, str) and value.strip():
            try:
                value = read_json(value)
            except ValueError as error:
                raise LaunchError(name, f"'{name}' is no JSON: {error}") from error
        if value in (None, ""):
            return {}
        if not isinstance(value, Mapping):
            raise LaunchError(name, f"'{name}' must be an object")
        return value


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _arguments(extra: object) -> list[tuple[str, str]]:
    """Options of a command line. Raises `LaunchError` if quotes do not match."""
    try:
        words = shlex.split(str(extra or ""))
    except ValueError as error:
        raise LaunchError("extra_arguments", f"'extra_arguments': {error}") from error
    found: list[tuple[str, str]] = []
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        if not equals:
            value = "true" if following.startswith("--") else following
        found.append((_plain(name), value))
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _torch_kv_dtype(given: _Options) -> str:
    """The built-in engine's own option; it takes no other values."""
    told = given.text("kv_dtype") or AUTO
    if told not in (AUTO, "model", FP8):
        raise LaunchError("kv_dtype", f"'kv_dtype' must be {AUTO}, model or {FP8}, not '{told[:40]}'")
    return FP8 if told == FP8 else AUTO


def _drafts(given: _Options) -> bool:
    method = given.mapping("speculative_config").get("method") or given.text("speculative_algorithm")
    return str(method or "").lower() in _MTP_METHODS


def _overrides(given: _Options, names: _Names) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for name in names.overrides:
        overrides.update(given.mapping(name))
    scaling = given.mapping("rope_scaling")
    if scaling:
        overrides["rope_scaling"] = dict(scaling)
    return overrides
