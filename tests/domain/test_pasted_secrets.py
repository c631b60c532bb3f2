"""No secret of a pasted launch is kept or shown, wherever in the text it stands."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain.launch_words import PasteError
from exaserve_ops.serving.domain.paste_import import read_paste
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.option import option_arguments
from workers.protocol.engines.tables import TABLES

SECRET = "correct-horse-battery"
SHAPED = "hf_" + "Ab3" * 10
SPEC = "modelSpec:\n- name: a\n  modelURL: m\n"
PLACES = (
    "vllm serve m --api-key {}",
    "vllm serve m --api-key={} --seed 1",
    "vllm serve m --api-key one-key {} third-key",
    "vllm serve m --hf-token {}",
    "vllm serve m --token {}",
    "vllm serve m --ssl-keyfile-password {}",
    "vllm serve m --made-up-credentials={}",
    "vllm serve m\n--api-key {}",
    "VLLM_API_KEY={} vllm serve m",
    "MY_TOKEN={} vllm serve m",
    "env -u X DB_PASSWORD={} vllm serve m",
    "export AWS_SECRET_ACCESS_KEY={}\nvllm serve m",
    'bash -lc "export OPENAI_KEY={} && vllm serve m --seed 1"',
    "docker run -e HF_TOKEN={} vllm/vllm-openai:v0.9.1 --model m",
    "docker run --env=SOME_PASS={} vllm/vllm-openai:v0.9.1 --model m",
    "docker run -eREGISTRY_AUTH={} vllm/vllm-openai:v0.9.1 --model m",
    "docker run -u bob:{} vllm/vllm-openai:v0.9.1 --model m",
    "srun --export=ALL,HF_TOKEN={} vllm serve m",
    "vllm serve s3://user:{}@host/m",
    'vllm serve m --speculative-config \'{{"model": "d", "api_key": "{}"}}\'',
    'vllm serve m --kv-transfer-config \'{{"kv_connector": "NixlConnector", "auth_token": "{}"}}\'',
    'vllm serve m --made-up \'{{"password": "{}"}}\'',
    SPEC + "  hf_token: {}\n",
    SPEC + "  vllmApiKey: {{value: {}}}\n",
    SPEC + "  vllmConfig: {{apiKey: {}}}\n",
    SPEC + '  vllmConfig: {{extraArgs: ["--api-key", "{}"]}}\n',
    SPEC + "  env: [{{name: WANDB_KEY, value: {}}}]\n",
    SPEC + "  raySpec: {{headNode: {{env: [{{name: MY_TOKEN, value: {}}}]}}}}\n",
    "containers:\n- image: vllm/vllm-openai\n  args: [--model, m]\n  env: [{{name: MY_PAT, value: {}}}]\n",
    "services:\n  a:\n    image: vllm/vllm-openai\n    command: --model m\n    environment: [MY_PWD={}]\n",
)
SHAPED_PLACES = (
    "vllm serve m --served-model-name {}",
    "vllm serve {}",
    "vllm serve m --tool-call-parser {}",
    "vllm serve m --nnodes {}",
    "vllm serve m --port {}",
    "vllm serve m; curl -H {}",
    "NCCL_DEBUG={} vllm serve m",
    "{} vllm serve m",
    SPEC + "  path: {}\n",
    SPEC + "  chatTemplate: {}\n",
)


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_known_by_what_it_is_called(place: str) -> None:
    pasted = read_paste(place.format(SECRET))
    assert SECRET not in repr(pasted.drafts)
    assert "***" in repr(pasted.drafts) or "raySpec" in place


@pytest.mark.parametrize("place", [place for place in PLACES if "raySpec" not in place])
def test_the_paste_is_shown_again_without_the_secrets_that_were_found(place: str) -> None:
    pasted = read_paste(place.format(SECRET))
    assert SECRET not in pasted.text
    assert read_paste(pasted.text).drafts[0].options == pasted.drafts[0].options


@pytest.mark.parametrize("place", [*PLACES, *SHAPED_PLACES])
def test_a_secret_is_known_by_its_shape(place: str) -> None:
    pasted = read_paste(place.format(SHAPED))
    assert SHAPED not in repr(pasted.drafts)
    assert SHAPED not in pasted.text


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --api-key '{}",
        'vllm serve m --seed "1\n--api-key {}',
        "{} serve m",
        "a: [1\nhf_token: {}",
        "hf_token: {}\nmodelSpec: []",
    ],
)
def test_what_cannot_be_read_repeats_no_secret(text: str) -> None:
    with pytest.raises(PasteError) as refused:
        read_paste(text.format(SHAPED))
    assert SHAPED not in str(refused.value)


@given(st.sampled_from(PLACES), st.from_regex(r"[a-z]{5}[0-9]{4}-[a-z0-9]{8}", fullmatch=True))
def test_no_secret_passes_in_any_place(place: str, secret: str) -> None:
    assert secret not in repr(read_paste(place.format(secret)).drafts)


def test_harmless_names_are_no_secrets() -> None:
    (draft,) = read_paste(
        "NCCL_DEBUG=INFO vllm serve m --max-num-batched-tokens 2048 --eos-token-id 2"
    ).drafts
    assert draft.options["environment"] == "NCCL_DEBUG=INFO"
    assert shlex.split(str(draft.options["extra_arguments"])) == ["--eos-token-id", "2"]


@pytest.mark.parametrize(
    ("engine", "option", "value"),
    [
        ("vllm", "speculative_config", '{"model": "d", "api_key": "abcdefgh"}'),
        ("vllm", "kv_connector_extra_config", '{"password": "abcdefgh"}'),
        ("vllm", "reasoning_parser", SHAPED),
        ("sglang", "json_model_override_args", '{"auth_token": "abcdefgh"}'),
        ("sglang", "schedule_policy", SHAPED),
    ],
)
def test_no_option_of_a_deployment_may_hold_a_secret(engine: str, option: str, value: str) -> None:
    with pytest.raises(EngineOptionError, match=f"{option} may not hold a secret"):
        option_arguments(TABLES[engine], {option: value})
