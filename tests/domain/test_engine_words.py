"""What engines are told and what they say about memory, in their own words."""

from __future__ import annotations

import pytest

from exaserve_ops.serving.domain.engine_complaints import read_complaint
from exaserve_ops.serving.domain.engine_launch import LaunchError, read_launch
from exaserve_ops.serving.domain.kv_bytes import KvBytes, kv_bytes_of

SERVE_ONE = (
    "To serve at least one request with the models's max seq len (118000), (6.30 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (6.11 GiB). Based on the available memory, the "
    "estimated maximum model length is 114432. Try increasing `gpu_memory_utilization`"
)
SERVE_ONE_WITHOUT_ESTIMATE = (
    "To serve at least one request with the model's max seq len (1000), 2.00 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (1.00 GiB)."
)
CARD_TAKEN = (
    "ValueError: Free memory on device cuda:0 (15.32/22.04 GiB) on startup is less than desired GPU memory "
    "utilization (0.88, 19.39 GiB). Decrease GPU memory utilization"
)


def test_number_in_an_engines_own_error_is_offered_as_the_fix() -> None:
    first = "ERROR engine.py:366] ValueError: The model's max seq len (29000) is larger than the maximum"
    complaint = read_complaint(
        [first, "number of tokens that can be stored in KV cache (23,648). Try increasing"]
    )
    assert complaint is not None
    assert (complaint.kind, complaint.asked_tokens, complaint.possible_tokens) == ("too_long", 29_000, 23_648)
    assert complaint.options == (("max_model_len", "23648"),)


@pytest.mark.parametrize(
    ("line", "kind", "options"),
    [
        (SERVE_ONE, "too_long", (("max_model_len", "114432"),)),
        (SERVE_ONE_WITHOUT_ESTIMATE, "too_long", (("max_model_len", "500"),)),
        (CARD_TAKEN, "card_taken", (("gpu_memory_utilization", "0.68"),)),
        ("ValueError: No available memory for the cache blocks. Try increasing", "no_room_for_kv", ()),
        ("Not enough memory. Please try to increase --mem-fraction-static.", "no_room_for_kv", ()),
        ("ValueError: 0 bytes are left for KV, and one block takes 8192", "no_room_for_kv", ()),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0",
            "out_of_memory",
            (),
        ),
    ],
)
def test_complaints_of_all_engines_are_understood(
    line: str, kind: str, options: tuple[tuple[str, str], ...]
) -> None:
    complaint = read_complaint(["before", line, "after"])
    assert complaint is not None
    assert (complaint.kind, complaint.options) == (kind, options)
    assert complaint.text


def test_lines_about_other_things_are_no_complaint_about_memory() -> None:
    assert read_complaint(["Killed", "ValueError: no such file", "max seq len is fine"]) is None


STORED = "max seq len ({0}) is larger than the maximum number of tokens that can be stored in KV cache ({0})"


@pytest.mark.parametrize("number", ["9" * 5000, "1.2.3", ",", "_", "1e9"])
def test_a_number_that_is_none_in_a_complaint_breaks_nothing(number: str) -> None:
    for line in (
        STORED.format(number),
        SERVE_ONE.replace("114432", number),
        CARD_TAKEN.replace("15.32", number).replace("0.88", number),
        f"CUDA out of memory. Tried to allocate {number} GiB",
        f"ValueError: {number} bytes are left for KV, and one block takes {number}",
    ):
        read_complaint([line])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_model_len", "long"),
        ("gpu_memory_utilization", 1.5),
        ("tensor_parallel_size", 0),
        ("max_model_len", "9" * 400),
        ("hf_overrides", "{"),
        ("hf_overrides", "[1]"),
        ("hf_overrides", "[" * 100_000),
        ("hf_overrides", '{"model_type": "\\ud800"}'),
        ("extra_arguments", "--name 'open"),
    ],
)
def test_option_that_makes_no_sense_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(LaunchError) as caught:
        read_launch("vllm", {option: value})
    assert caught.value.option == option


def test_built_in_engine_keeps_8_bit_floats_with_a_scale_beside_each_vector() -> None:
    """As `exaserve_engine_kv_info` of the demo model says: a block of 16 tokens takes 16,896 bytes."""
    demo = {
        "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 256, "head_dim": 64, "vocab_size": 1523, "torch_dtype": "float32",
    }  # fmt: skip
    found, formulas = {}, []
    for name in ("model", "fp8_e4m3"):
        kept = kv_bytes_of(demo, read_launch("torch", {"kv_dtype": name}).kv)
        assert isinstance(kept, KvBytes)
        found[name] = 16 * kept.growth_bytes_per_token
        [term] = kept.terms
        assert term.bytes == kept.growth_bytes_per_token
        formulas.append(term.formula)
    assert found == {"model": 65_536, "fp8_e4m3": 16_896}
    assert formulas[1] == "2 x 4 layers x 2 KV heads x (64 x 1 + 2 of scale) B"
    with pytest.raises(LaunchError, match="auto, model or fp8_e4m3"):
        read_launch("torch", {"kv_dtype": "fp8"})


def test_engine_whose_rules_are_not_known_is_refused() -> None:
    with pytest.raises(LaunchError, match="vllm, sglang, torch"):
        read_launch("other", {})


@pytest.mark.parametrize(
    ("text", "tokens"), [("32k", 32_000), ("32K", 32_768), ("1.5M", 1_572_864), (4096, 4096)]
)
def test_lengths_are_read_as_engines_write_them(text: object, tokens: int) -> None:
    assert read_launch("vllm", {"--max-model-len": text}).length_tokens == tokens
    assert read_launch("vllm", {"max_model_len": "auto"}).length_tokens is None
