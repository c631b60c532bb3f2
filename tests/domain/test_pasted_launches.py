"""Launch settings that people really use become deployments, and what does not is said with the reason."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain.launch_import import Draft
from exaserve_ops.serving.domain.launch_words import PasteError, read_commands
from exaserve_ops.serving.domain.paste_import import read_paste
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.option import option_arguments
from workers.protocol.engines.tables import TABLES


def draft_of(text: str) -> Draft:
    (draft,) = read_paste(text).drafts
    return draft


def said(draft: Draft) -> str:
    """All words that a person would read of it."""
    lines = [*draft.understood, *draft.not_understood]
    return "\n".join([*(f"{line.said} -> {line.became}" for line in lines), *draft.notes, *draft.problems])


def refused(draft: Draft) -> Mapping[str, str]:
    return {line.said: line.became for line in draft.not_understood}


def test_short_forms_underscores_and_keys_out_of_the_environment() -> None:
    draft = draft_of(
        'VLLM_API_KEY=verysecretvalue vllm serve "$model" --host 0.0.0.0 --port 4015 -tp=4 '
        '--served-model-name="Qwen3" --max_num_seqs=64 --max_model_len=10240 '
        "--gpu-memory-utilization=0.85 --disable-log-requests"
    )
    assert draft.engine == "vllm"
    assert draft.options == {
        "tensor_parallel_size": 4,
        "max_num_seqs": 64,
        "max_model_len": 10240,
        "gpu_memory_utilization": 0.85,
    }
    assert (draft.served_name, draft.accelerators) == ("Qwen3", 4)
    assert draft.model == ""  # the shell's variable is nobody's model
    assert "write it out" in refused(draft)["$model"]
    assert "verysecretvalue" not in said(draft)
    assert "its agent leases the ports" in said(draft)


def test_secrets_with_several_values_are_masked_and_logged_answers_are_warned_of() -> None:
    draft = draft_of(
        "vllm serve m --api-key KEYONE KEYTWO --enable-log-requests --enable-log-outputs --seed 3"
    )
    assert "KEYONE" not in said(draft)
    assert "KEYTWO" not in said(draft)
    assert "what people are answered" in said(draft)
    assert draft.options == {"seed": 3, "extra_arguments": "--enable-log-requests"}


def test_module_form_behind_variables_and_a_path_with_a_slash_at_its_end() -> None:
    draft = draft_of(
        "VLLM_WORKER_MULTIPROC_METHOD=spawn python -m vllm.entrypoints.openai.api_server "
        "--model /workspace/Qwen2-VL-72B-Instruct-AWQ/ --disable-custom-all-reduce "
        "--tensor-parallel-size 2 --gpu-memory-utilization 0.8 --max-model-len 14000 --port 50000"
    )
    assert draft.model == "/workspace/Qwen2-VL-72B-Instruct-AWQ"
    assert draft.options["extra_arguments"] == "--disable-custom-all-reduce"
    assert draft.options["environment"] == "VLLM_WORKER_MULTIPROC_METHOD=spawn"
    assert draft.accelerators == 2
    assert "says AWQ" in said(draft)


def test_json_inside_an_argument_stays_whole_without_a_shell() -> None:
    overrides = (
        '{"architectures": ["Qwen3ForSequenceClassification"],"classifier_from_token": ["no", "yes"],'
        '"is_original_qwen3_reranker": true}'
    )
    draft = draft_of(f"vllm serve /m/Qwen3-Reranker-0.6B --max-model-len 8192 --hf_overrides={overrides}")
    assert json.loads(str(draft.options["hf_overrides"])) == json.loads(overrides)
    assert "pooling model" in said(draft)
    quoted = draft_of(f"vllm serve /m/x --hf-overrides '{overrides}' --max-model-len 8192")
    assert quoted.options == draft.options


def test_a_beginning_of_an_option_is_read_as_that_option_and_noted() -> None:
    draft = draft_of(
        "vllm serve Qwen3.5-27B --trust-remote-code --max-model-len 32768 --max-num-seqs 16 "
        "--max-num-batched-token 16384 --load-format dummy"
    )
    assert draft.options["max_num_batched_tokens"] == 16384
    assert "--max-num-batched-token is no option; it is the beginning of --max-num-batched-tokens" in said(
        draft
    )
    assert "only nodes that allow it" in said(draft)
    assert "makes weights up" in said(draft)


def test_a_cache_folder_given_as_model_and_a_length_that_nobody_said_are_noted() -> None:
    draft = draft_of(
        "python -m vllm.entrypoints.openai.api_server --served-model-name Qwen1.5-7B-Chat "
        "--model /models--Qwen--Qwen1.5-7B-Chat"
    )
    assert "looks like a folder of Hugging Face's cache" in said(draft)
    assert "max_model_len is not said" in said(draft)


def test_sglang_with_other_names_for_the_same_and_a_loopback_host() -> None:
    draft = draft_of(
        "python -m sglang.launch_server --model /deepseek/deepseek-ai/DeepSeek-V3.1/ --host 127.0.0.1 "
        "--served-model-name mozz --port 9122 --tensor-parallel-size 8 --mem-fraction-static 0.88 "
        "--max-running-requests 12 --context-length 15000"
    )
    assert draft.engine == "sglang"
    assert draft.options == {
        "tp_size": 8,
        "mem_fraction_static": 0.88,
        "max_running_requests": 12,
        "context_length": 15000,
    }
    assert "cannot be reached from other machines" in said(draft)


def test_a_share_that_leaves_no_room_is_noted() -> None:
    draft = draft_of(
        "sglang serve --model-path m --tp 8 --mem-fraction-static 0.93 --disable-radix-cache "
        "--max-running-requests 250 --port 40001"
    )
    assert draft.options["disable_radix_cache"] is True
    assert "mem_fraction_static 0.93 leaves 7% for activations" in said(draft)
    v1 = draft_of("VLLM_USE_V1=1 vllm serve m/x-70B-Instruct-quantized.w8a8 --gpu-memory-utilization 0.98")
    assert v1.options["gpu_memory_utilization"] == 0.98
    assert "leaves 2%" in said(v1)
    assert "says w8a8" in said(v1)


def test_attention_in_parts_takes_the_accelerators_of_one_copy_and_keeps_its_environment() -> None:
    draft = draft_of(
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256 NVSHMEM_QP_DEPTH=2048 sglang serve "
        "--model-path deepseek-ai/DeepSeek-V4-Pro --tp 8 --dp 8 --enable-dp-attention "
        "--moe-a2a-backend deepep --swa-full-tokens-ratio 0.075 "
        """--deepep-config '{"normal_dispatch":{"num_sms":96}}'"""
    )
    assert draft.accelerators == 8
    assert draft.options["deepep_config"] == '{"normal_dispatch":{"num_sms":96}}'
    assert draft.options["environment"] == (
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256 NVSHMEM_QP_DEPTH=2048"
    )
    without = draft_of("sglang serve --model-path m --tp 8 --dp 2")
    assert without.accelerators == 16


def test_what_a_shell_would_have_computed_is_refused_by_name() -> None:
    draft = draft_of(
        "python -m sglang.launch_server --model-path m --dist-init-addr ${master_ip}:5757 "
        "--nnodes ${num_prefill} --node-rank ${node_rank} --tp-size $((${num_prefill}*4)) "
        "--disaggregation-mode prefill --context-length `nproc`"
    )
    assert "tp_size" not in draft.options
    assert "context_length" not in draft.options
    assert [line for line in refused(draft) if line.startswith("--tp-size $((")]
    assert "given by the fleet: it starts the ranks of a replica together" in said(draft)


HELM = """
servingEngineSpec:
  modelSpec:
  - name: deepcoder-14b-preview
    repository: vllm/vllm-openai
    tag: v0.7.2
    modelURL: /data/DeepCoder-14B-Preview
    replicaCount: 1
    requestCPU: 6
    requestGPU: 4
    limitGPU: 4
    shmSize: 128Gi
    pvcStorage: 512Gi
    pvcAccessMode: [ReadWriteMany]
    hf_token: hf_abcdefghijklmnopqrstuvwxyz
    vllmConfig:
      maxModelLen: "131072"
      tensorParallelSize: 4
      pipelineParallelSize: 2
      v1: 1
      dtype: "bfloat16"
      extraArgs: ["--tensor-parallel-size", "4", "--disable-custom-all-reduce"]
"""


def test_helm_values_that_need_more_cards_than_they_ask_for_are_a_problem() -> None:
    draft = draft_of(HELM)
    assert (draft.name, draft.version, draft.replicas) == ("deepcoder-14b-preview", "0.7.2", 1)
    assert draft.options["max_model_len"] == 131072  # a number that was written as text
    assert draft.problems == (
        "tensor_parallel_size 4 and pipeline_parallel_size 2 need 8 accelerators, and 4 are asked for",
    )
    assert draft.options["extra_arguments"] == "--disable-custom-all-reduce"
    assert "hf_abc" not in said(draft)
    twice = draft_of(HELM.replace('"--tensor-parallel-size", "4"', '"--tensor-parallel-size", "2"'))
    assert "tensor_parallel_size is said twice, 4 and 2" in said(twice)
    assert twice.options["tensor_parallel_size"] == 2


def test_empty_text_in_a_resource_means_that_it_is_not_set() -> None:
    draft = draft_of(
        """
apiVersion: production-stack.vllm.ai/v1alpha1
kind: VLLMRuntime
spec:
  modelURL: "meta-llama/Llama-3.1-8B"
  deploymentStrategy: "Recreate"
  path: ""
  vllmConfig:
    dtype: "float16"
    maxNumSeqs: 256
    gpuMemoryUtilization: ""
"""
    )
    assert draft.options == {"dtype": "float16", "max_num_seqs": 256}
    assert "path" not in said(draft)
    assert draft.model == "meta-llama/Llama-3.1-8B"


def test_a_slice_as_a_kind_of_card_is_understood() -> None:
    draft = draft_of(HELM.replace("requestGPU: 4", 'requestGPUType: "nvidia.com/mig-4g.71gb"'))
    assert draft.accelerator == "slice:4g.71gb"


def test_shares_of_one_card_for_several_engines_are_legal() -> None:
    draft = draft_of("vllm serve m --gpu-memory-utilization 0.45 --max-model-len 8192 --migration-limit 3")
    assert draft.options["gpu_memory_utilization"] == 0.45
    assert draft.options["extra_arguments"] == "--migration-limit 3"
    assert "not checked here" in said(draft)


def test_flags_behind_a_line_without_a_backslash_are_read_and_said() -> None:
    draft = draft_of("vllm serve m \\\n  --max-model-len 8192\n  --max-num-seqs 16 \\\n  --seed 1")
    assert draft.options == {"max_model_len": 8192, "max_num_seqs": 16, "seed": 1}
    assert "a shell would have lost what follows" in said(draft)
    with pytest.raises(PasteError, match="no engine is started by it"):
        read_paste("agent --server-url http://xx:8081 --disable-worker\n--api-port 8081")


def test_a_second_command_is_left_out_and_said() -> None:
    draft = draft_of("vllm serve m --seed 1 && rm -rf / --seed 2")
    assert draft.options == {"seed": 1}
    assert "not read, since no engine is started by it: rm" in said(draft)
    exported = draft_of("export VLLM_LOGGING_LEVEL=DEBUG\nvllm serve m --seed 1")
    assert exported.options["seed"] == 1


def test_an_option_that_the_version_lacks_is_refused_with_what_to_use() -> None:
    draft = draft_of("vllm serve m --swap-space 16 --max-model-len 4k")
    assert "kv_offloading_size" in refused(draft)["--swap-space 16"]
    assert draft.options == {"max_model_len": 4000}
    old = draft_of(
        "docker run --gpus all -e HF_TOKEN=abc -p 8000:8000 vllm/vllm-openai:v0.7.2 --model m --swap-space 16"
    )
    assert old.version == "0.7.2"
    assert old.options == {"swap_space": 16.0}
    assert "abc" not in said(old)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--max-num-seqs many", "max_num_seqs must be a whole number, not 'many'"),
        ("--max-num-seqs 0", "max_num_seqs must be from 1"),
        ("--kv-cache-dtype int3", "kv_cache_dtype must be one of auto"),
        ("--gpu-memory-utilization 85%", "gpu_memory_utilization must be a number"),
        ("--hf-overrides '{\"a\": '", "hf_overrides is no JSON"),
        ("--root-path /x", "may not hold --root-path: the agent decides that"),
        ("-n2", "may not hold -n2: the agent decides that"),
        ("--lora-auth-token=abc", "engines here get a key of their own"),
    ],
)
def test_what_no_engine_would_take_is_said_with_the_reason(text: str, reason: str) -> None:
    draft = draft_of(f"vllm serve m {text} --seed 1")
    assert reason in said(draft)
    assert draft.options == {"seed": 1}


KUBERNETES = """
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: chat
        image: vllm/vllm-openai:v0.32.0
        args: ["--model", "/models/llama", "--tensor-parallel-size", "2", "--max-model-len=8192"]
        env:
        - {name: NCCL_DEBUG, value: INFO}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: hf, key: token}}
        resources: {limits: {nvidia.com/gpu: "2"}}
      - name: proxy
        image: nginx:1
"""


def test_workloads_and_services_are_read_by_their_containers() -> None:
    draft = draft_of(KUBERNETES)
    assert (draft.name, draft.model, draft.version) == ("chat", "/models/llama", "0.32.0")
    assert draft.options == {
        "tensor_parallel_size": 2,
        "max_model_len": 8192,
        "environment": "NCCL_DEBUG=INFO",
    }
    assert draft.problems == ()
    compose = draft_of(
        "services:\n  llm:\n    image: lmsysorg/sglang:v0.5.9\n    environment: [SGLANG_LOG_MS=1]\n"
        "    command: python3 -m sglang.launch_server --model-path /m --tp 2\n"
    )
    assert (compose.engine, compose.options["tp_size"], compose.version) == ("sglang", 2, "0.5.9")
    script = draft_of(
        KUBERNETES.replace(
            'args: ["--model"', 'command: [bash, -c, "vllm serve /m --seed 4"]\n        args: ["--model"'
        )
    )
    assert script.options["seed"] == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is nothing in it"),
        ("# only a comment", "there is nothing in it"),
        ("x" * 20_001, "at most 20,000 are read"),
        ("vllm serve m \\\n --seed '1", "a quote ' is opened in line 2 and never closed"),
        ("vllm\0serve", "NUL"),
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("a: [1\n", "no YAML"),
        ("replicas: 3\n", "nothing in it starts an engine"),
        ("python train.py --lr 3", "no engine is started by it"),
    ],
)
def test_what_cannot_be_read_at_all_says_why(text: str, reason: str) -> None:
    with pytest.raises(PasteError, match=reason):
        read_paste(text)


_WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=60
)


@given(
    st.one_of(
        _WORDS.map(lambda text: f"vllm serve {text}"), _WORDS.map(lambda text: f"vllmConfig: {text}"), _WORDS
    )
)
def test_whatever_is_pasted_is_read_or_refused(text: str) -> None:
    try:
        drafts = read_paste(text).drafts
    except PasteError:
        return
    for draft in drafts:
        try:
            option_arguments(TABLES[draft.engine], draft.options)
        except EngineOptionError as error:
            raise AssertionError(f"{draft.options} came out of {text!r}") from error


@given(
    st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12), max_size=8)
)
def test_quoted_words_come_out_as_they_went_in(words: list[str]) -> None:
    (command,) = read_commands(shlex.join(["vllm", *words]))
    assert command.words == ("vllm", *words)
