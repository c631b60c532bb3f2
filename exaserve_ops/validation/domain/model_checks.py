"""Checks that ask no engine: of the model's record, and of what engines answered. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exaserve_ops.validation.domain import catalogue
from exaserve_ops.validation.domain.asking import Finding
from exaserve_ops.validation.domain.judging import NEAR_TIE_NATS, Divergence, find_divergences
from exaserve_ops.validation.domain.lifecycle import FAILED, PASSED, SKIPPED

_HASH_OPTION = "prefix_caching_hash_algo"
_STABLE_HASHES = frozenset({"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"})
"""Of vLLM's: those that do not depend on the process, given one PYTHONHASHSEED, which every launch gets."""


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What is recorded of a model."""

    family: str
    layers: int
    context_tokens: int | None
    vocabulary: int
    kv_bytes_per_token: int | None
    kv_refusal: str
    """Why what KV takes is not known; empty where it is."""
    files: tuple[tuple[str, int, str], ...]
    """Path, bytes and SHA-256, by path."""
    manifest_files: tuple[tuple[str, int, str], ...] | None
    """The same as the manifest has it; `None` where there is no manifest, or none that can be read."""
    manifest_problem: str = ""


def judge_config(model: ModelRecord) -> Finding:
    """Whether the configuration says enough to plan with."""
    figure = f"{model.family or 'unknown'}, {model.layers} layers"
    if model.kv_refusal:
        return Finding(FAILED, figure, why=model.kv_refusal)
    missing = [
        name
        for name, value in (("a vocabulary", model.vocabulary), ("a context length", model.context_tokens))
        if not value
    ]
    if missing:
        return Finding(FAILED, figure, why=f"config.json does not give {' nor '.join(missing)}")
    why = f"{model.kv_bytes_per_token or 0:,} bytes of KV a token, up to {model.context_tokens:,} tokens"
    return Finding(PASSED, figure, why=why)


def judge_weights(model: ModelRecord) -> Finding:
    """Whether the manifest lists what was registered, to the last byte.

    Headers and index were read when it was registered, and a file of the same digest has the same ones; a
    node that starts from these files compares digests first.
    """
    total = sum(size for _, size, _ in model.files)
    figure = f"{len(model.files)} files, {total:,} bytes"
    if model.manifest_files is None:
        why = model.manifest_problem or "it has no manifest: register it again from its folder"
        return Finding(FAILED, figure, why=why)
    recorded, listed = dict(_by_path(model.files)), dict(_by_path(model.manifest_files))
    for path in sorted(recorded.keys() | listed.keys()):
        if recorded.get(path) != listed.get(path):
            return Finding(FAILED, figure, why=f"{path} is not the same in the record and in the manifest")
    if not any(path.endswith(".safetensors") for path in recorded):
        return Finding(FAILED, figure, why="there is no safetensors file among them")
    return Finding(PASSED, figure, why="manifest and record agree; nodes compare digests before they launch")


def judge_hashing(engine: str, options: Mapping[str, Any]) -> Finding:
    """Whether blocks of the same content have the same hash in every launch."""
    if engine != "vllm":
        return Finding(PASSED, "by content", why="blocks are named by a digest of their tokens alone")
    chosen = str(options.get(_HASH_OPTION, "sha256"))
    if chosen not in _STABLE_HASHES:
        why = f"'{chosen}' may differ from process to process: choose sha256_cbor"
        return Finding(FAILED, chosen, ", ".join(sorted(_STABLE_HASHES)), why)
    return Finding(PASSED, chosen, why="all launches hash alike: one algorithm, one PYTHONHASHSEED")


def judge_agreement(golden: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Compare golden answers of the engines, each with the first; near ties are no disagreement."""
    told = {engine: details.get("tokens", ()) for engine, details in golden.items() if details.get("tokens")}
    if len(told) < 2:  # noqa: PLR2004 - it takes two to compare
        return Finding(SKIPPED, why="fewer than two engines have golden answers")
    (first, tokens), *others = told.items()
    found: list[tuple[str, Divergence]] = []
    for engine, answers in others:
        alternatives = _alternatives(golden[engine]) or _alternatives(golden[first])
        found += [(engine, one) for one in find_divergences(tokens, answers, alternatives)]
    prompts = len(tokens) * len(others)
    figure = f"{prompts - len(found)} of {prompts} the same"
    limit = f"the same, or a tie within {NEAR_TIE_NATS} nats"
    details = {"divergences": [_row(first, engine, one) for engine, one in found]}
    apart = [(engine, one) for engine, one in found if not one.is_near_tie]
    if apart:
        engine, one = apart[0]
        gap = "no engine told by how little" if one.gap_nats is None else f"{one.gap_nats:.3f} nats apart"
        why = f"{first} and {engine} part at token {one.place + 1} of prompt {one.prompt + 1}, {gap}"
        return Finding(FAILED, figure, limit, why, details)
    ties = f", {len(found)} part at a tie" if found else ""
    return Finding(PASSED, figure, limit, f"{', '.join(told)} agree{ties}", details)


def _by_path(files: Sequence[tuple[str, int, str]]) -> list[tuple[str, tuple[int, str]]]:
    return [(path, (size, sha256)) for path, size, sha256 in files]


def _alternatives(details: Mapping[str, Any]) -> list[list[dict[int, float]]]:
    """Log-probabilities by prompt and place, out of a report's JSON; empty where the engine told none."""
    told = [
        [{int(token): value for token, value in place.items()} for place in prompt]
        for prompt in details.get("alternatives", ())
    ]
    return told if any(told) else []


def _row(first: str, other: str, one: Divergence) -> dict[str, Any]:
    return {
        "engines": [first, other],
        "prompt": one.prompt,
        "place": one.place,
        "tokens": list(one.tokens),
        "gap_nats": one.gap_nats,
    }


MODEL_JUDGES = {catalogue.CONFIG: judge_config, catalogue.WEIGHTS: judge_weights}
