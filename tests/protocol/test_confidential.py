"""Secrets do not leave a node in a log line, and words that only look like secrets stay readable."""

from __future__ import annotations

import pytest

from workers.protocol.confidential import find_secret, mask

VALUE = "s3cr3t-Value.0123456789"


@pytest.mark.parametrize(
    "line",
    [
        f"HF_TOKEN={VALUE}",
        f"huggingface_hub_token: {VALUE}",
        f"Namespace(model='m', api_key=['{VALUE}', '{VALUE}2'], port=8000)",
        f'{{"api_key": "{VALUE}", "port": 1}}',
        f"vllm serve m --api-key {VALUE} --port 1",
        f"vllm serve m --hf-token={VALUE}",
        f"password = '{VALUE} with blanks'",
        f"authorization: Bearer {VALUE}",
        f"cannot connect to redis://user:{VALUE}@db.example:6379/0",
        f"AWS_SECRET_KEY={VALUE}",
        f'api_key="{VALUE}',
        "got hf_AbCdEfGhIjKlMnOpQrStUvWx from the hub",
        "xo-abcdefghijklmnopqrstuvwxyz was refused",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl",
    ],
)
def test_secret_is_masked_by_the_name_before_it_or_by_its_shape(line: str) -> None:
    shown = mask(line)
    assert "***" in shown
    for secret in (VALUE, "hf_AbCd", "xo-abcd", "eyJ"):
        assert secret not in shown
    if "port" in line:
        assert "port" in shown, "the rest of the line is kept"


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens=64 prompt tokens: 512, eos_token='</s>' pad_token=0",
        "INFO 128 tokens/s, KV cache usage: 12.5%, tokenizer: slow",
        "api_key=None",
        "GET http://127.0.0.1:8000/metrics 200",
        "event=loaded path=/models/llama sha256=0123456789abcdef",
        "key: value, keys: 3, monkey=1",
        "token=17 token_id=42",
    ],
)
def test_line_without_a_secret_is_left_alone(line: str) -> None:
    assert mask(line) == line
    assert find_secret(line) == "" or line == "api_key=None"


def test_known_secret_is_masked_wherever_it_stands_and_an_empty_one_masks_nothing() -> None:
    assert mask("a-b-a", ["a", ""]) == "***-b-***"


@pytest.mark.parametrize(
    "unit",
    [
        "api_",
        "api_key",
        "api_key=[",
        "--a-",
        "--",
        "://a:",
        "eyJ-",
        "eyJaaaaaaaa.",
        "bearer ",
        "sk-",
        '"',
        " ",
    ],
)
def test_hostile_line_does_not_hold_the_agent_up(unit: str) -> None:
    """A pattern that goes over the rest of the line from each place of it would take minutes for this."""
    assert mask(unit * (65_536 // len(unit)))


@pytest.mark.parametrize(
    "text", ["--api-key x", "api_key", "--hf-token=x", "HF_TOKEN", "sk-0123456789abcdef0"]
)
def test_setting_that_holds_a_secret_is_found_and_its_value_not_repeated(text: str) -> None:
    found = find_secret(text)
    assert found
    assert "x" not in found.split()
    assert "sk-" not in found
