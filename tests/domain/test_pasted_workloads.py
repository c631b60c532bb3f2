"""Workloads, services and Helm values become deployments with their replicas, nodes and variables."""

from __future__ import annotations

import pytest

from exaserve_ops.serving.domain.launch_import import Draft
from exaserve_ops.serving.domain.launch_words import PasteError
from exaserve_ops.serving.domain.paste_import import read_paste


def draft_of(text: str) -> Draft:
    (draft,) = read_paste(text).drafts
    return draft


def lines(draft: Draft) -> dict[str, str]:
    return {line.said: line.became for line in (*draft.understood, *draft.not_understood)}


WORKLOAD = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat-llm}
spec:
  replicas: 3
  template:
    spec:
      initContainers: [{name: fetch, image: "vllm/vllm-openai:v0.9.1", command: [python, fetch.py]}]
      containers:
      - name: chat
        image: vllm/vllm-openai:v0.32.0
        command: ["/bin/sh", "-c"]
        args:
        - |
          ulimit -l unlimited
          vllm serve meta-llama/Llama-3.1-8B \\
            --tensor-parallel-size 2 --api-key $(API_KEY)
        env:
        - {name: NCCL_DEBUG, value: INFO}
        - {name: API_KEY, valueFrom: {secretKeyRef: {name: hf, key: token}}}
        envFrom: [{secretRef: {name: s}}]
        ports: [{containerPort: 8000}]
        resources: {limits: {nvidia.com/gpu: 2, memory: 64Gi}}
        livenessProbe: {httpGet: {path: /health, port: 8000}}
"""


def test_a_workload_has_replicas_around_and_a_script_inside() -> None:
    draft = draft_of(WORKLOAD)
    assert (draft.name, draft.model, draft.version) == ("chat", "meta-llama/Llama-3.1-8B", "0.32.0")
    assert (draft.replicas, draft.accelerators, draft.problems) == (3, 2, ())
    assert draft.options == {"tensor_parallel_size": 2, "environment": "NCCL_DEBUG=INFO"}
    told = lines(draft)
    assert "stands elsewhere" in told["API_KEY"]
    assert "stand elsewhere" in told["envFrom"]
    assert "the fleet's" in told["ports, livenessProbe"]


def test_a_group_of_pods_is_one_replica_over_nodes() -> None:
    draft = draft_of(
        """
kind: LeaderWorkerSet
spec:
  replicas: 2
  leaderWorkerTemplate:
    size: 2
    leaderTemplate: {spec: {containers: [{name: leader, image: 'vllm/vllm-openai:v0.9.1',
      command: [sh, -c, 'ray start --head && vllm serve m -tp 8 -pp 2'],
      resources: {limits: {nvidia.com/gpu: '8'}}}]}}
    workerTemplate: {spec: {containers: [{name: worker, image: 'vllm/vllm-openai:v0.9.1',
      command: [sh, -c, 'ray start --block']}]}}
"""
    )
    assert (draft.name, draft.replicas, draft.nodes, draft.accelerators) == ("leader", 2, 2, 8)
    assert draft.problems == ()


def test_a_service_says_its_replicas_and_devices_elsewhere_than_a_workload() -> None:
    draft = draft_of(
        """
services:
  llm:
    image: vllm/vllm-openai:v0.10.0
    command: >
      --model m --max-model-len 4096 -tp 2
    environment: {NCCL_DEBUG: INFO, VLLM_USE_V1: }
    deploy:
      replicas: 2
      resources: {reservations: {devices: [{driver: nvidia, count: 2, capabilities: [gpu]}]}}
  db: {image: postgres}
  helper: {image: "vllm/vllm-openai:v0.10.0", entrypoint: [python, warm.py]}
"""
    )
    assert (draft.model, draft.replicas, draft.accelerators, draft.problems) == ("m", 2, 2, ())
    assert draft.options["environment"] == "NCCL_DEBUG=INFO"
    assert "stands elsewhere" in lines(draft)["VLLM_USE_V1"]
    every = draft_of(
        "services: {a: {image: vllm/vllm-openai, command: --model m, deploy: {resources: "
        "{reservations: {devices: [{count: all}]}}}}}"
    )
    assert every.accelerators == 1


def test_workloads_as_json_are_read_too() -> None:
    draft = draft_of('{"services": {"a": {"image": "vllm/vllm-openai:v0.9", "command": ["--model", "m"]}}}')
    assert (draft.model, draft.version) == ("m", "0.9")


STACK = """
servingEngineSpec:
  runtimeClassName: ""
  modelSpec:
  - name: llama3
    repository: vllm/vllm-openai
    tag: v0.10.1
    modelURL: meta-llama/Llama-3.1-8B-Instruct
    replicaCount: 2
    requestGPU: 1
    nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [H100]}]}]
    enableTool: true
    toolCallParser: llama3_json
    vllmConfig:
      enableChunkedPrefill: false
      maxModelLen: 16384
      speculativeConfig: {method: ngram, num_speculative_tokens: 4}
      extraArgs: ["--disable-log-requests", "--seed=4"]
    lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "20", nixlRole: sender}
  - name: second
    repository: lmcache/vllm-openai
    modelURL: m2
    vllmConfig: {}
    lmcacheConfig: {enabled: false}
routerSpec: {routingLogic: session}
"""


def test_values_of_the_production_stack_are_read_with_what_stands_beside_the_engine() -> None:
    first, second = read_paste(STACK).drafts
    assert first.options == {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "llama3_json",
        "enable_chunked_prefill": False,
        "max_model_len": 16384,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}',
        "seed": 4,
        "kv_connector": "LMCacheConnectorV1",
        "lmcache_cpu_gb": 20.0,
    }
    assert (first.name, first.replicas, second.name, second.options) == ("llama3", 2, "second", {})
    told = lines(first)
    assert "not known here" in told["nodeSelectorTerms: […]"]
    assert "LMCACHE_" in told["lmcacheConfig: nixlRole: sender"]
    assert all("no engine is described by it: routerSpec" in "\n".join(one.notes) for one in (first, second))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("services:\n  a: [1, 2\n  b: 3\n", "line 3: expected ',' or ']'"),
        ("services:\n\ta: 1\n", "line 2: found character"),
        ("a: !!python/object/apply:os.system ['ls']\n", "line 1: could not determine a constructor"),
        ("a: 2026-99-99\n", "no YAML"),
        ("a: " + "[" * 15_000, "no YAML"),
        ("a: " + "{a: " * 4_000, "no YAML"),
        ("modelSpec:\n" + "- {name: a, modelURL: m}\n" * 21, "more than 20 deployments"),
        (
            "services: {a: {image: vllm/vllm-openai, entrypoint: [sleep, '9']}}",
            "nothing in it starts an engine",
        ),
        ("services: {a: 1, b: [], c: {image: 3}}", "nothing in it starts an engine"),
    ],
)
def test_yaml_that_is_none_is_refused_with_the_line(text: str, reason: str) -> None:
    with pytest.raises(PasteError) as refused:
        read_paste(text)
    assert reason in str(refused.value)


def test_a_specification_without_its_model_is_a_draft_that_says_so() -> None:
    drafts = read_paste("modelSpec: [{name: a, modelURL: m}, {name: b, replicaCount: 2}]").drafts
    assert [(draft.name, draft.model) for draft in drafts] == [("a", "m"), ("b", "")]
    assert [any("no model is named" in note for note in draft.notes) for draft in drafts] == [False, True]


def test_a_command_without_its_model_says_so() -> None:
    assert any("no model is named" in note for note in draft_of("vllm serve --seed 4").notes)
