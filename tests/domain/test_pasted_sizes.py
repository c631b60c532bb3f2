"""A pasted launch over several nodes becomes nodes and accelerators on each, and what cannot is said."""

from __future__ import annotations

import pytest

from exaserve_ops.serving.domain.launch_import import Draft
from exaserve_ops.serving.domain.paste_import import read_paste


def draft_of(text: str) -> Draft:
    (draft,) = read_paste(text).drafts
    return draft


def became(draft: Draft) -> dict[str, str]:
    return {line.said: line.became for line in draft.understood}


@pytest.mark.parametrize(
    ("text", "nodes", "accelerators"),
    [
        ("vllm serve m -tp 8 -pp 4 --nnodes 4 --node-rank 0 --master-addr h", 4, 8),
        ("vllm serve m -tp 8 -pp 4 -n 4 -r 0", 4, 8),
        ("vllm serve m -tp=16 --nnodes=2 --node-rank=1 --headless --master-port=29501", 2, 8),
        ("vllm serve m -tp 8 --nnodes 1", 1, 8),
        ("vllm serve m -tp 8", 1, 8),
        ("sglang serve --model-path m --tp 16 --nnodes 2 --node-rank 0 --dist-init-addr h:5000", 2, 8),
        ("sglang serve --model-path m --tp 8 --pp 4 --nnodes 4", 4, 8),
        ("sglang serve --model-path m --tp 16 --dp 16 --enable-dp-attention --nnodes 2", 2, 8),
    ],
)
def test_nodes_of_a_launch_become_nodes_of_a_replica(text: str, nodes: int, accelerators: int) -> None:
    draft = draft_of(text)
    assert (draft.nodes, draft.accelerators) == (nodes, accelerators)
    assert (draft.problems, draft.not_understood) == ((), ())
    assert not [note for note in draft.notes if "on one node" in note]
    assert "extra_arguments" not in draft.options


def test_what_the_fleet_gives_instead_is_said() -> None:
    lines = became(draft_of("vllm serve m -tp 8 --nnodes 2 --node-rank 0 --headless --master-addr h"))
    assert lines["--nnodes 2"] == "nodes_per_replica 2"
    for said in ("--node-rank 0", "--headless", "--master-addr h"):
        assert "given by the fleet" in lines[said]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vllm serve m -tp 4 --nnodes 3", "need 4 accelerators, which 3 nodes cannot share evenly"),
        ("vllm serve m -tp 8 -pp 3 --nnodes 5", "need 24 accelerators, which 5 nodes cannot share evenly"),
        ("sglang serve --model-path m --tp 2 --nnodes 4", "need 2 accelerators, which 4 nodes"),
        ("vllm serve m -tp 4 -dp 2 --nnodes 2", "data_parallel_size does not go with several nodes"),
    ],
)
def test_sizes_that_do_not_make_up_a_replica_are_a_problem(text: str, problem: str) -> None:
    assert problem in "\n".join(draft_of(text).problems)


@pytest.mark.parametrize("count", ["0", "two", "²", "9" * 5000, "${N}", "-1"])
def test_a_number_of_nodes_that_is_none_is_not_taken(count: str) -> None:
    draft = draft_of(f"vllm serve m -tp 2 --nnodes {count}")
    assert (draft.nodes, draft.accelerators) == (1, 2)
    assert [line for line in draft.not_understood if line.said.startswith("--nnodes")]


def test_many_accelerators_on_one_node_are_noted() -> None:
    told = "need 32 accelerators on one node, and nodes with more than 8 are rare: nodes_per_replica"
    assert told in "\n".join(draft_of("vllm serve m -tp 8 -pp 4").notes)
    assert "give more nodes" in "\n".join(draft_of("vllm serve m -tp 8 -pp 4 --nnodes 2").notes)


def test_accelerators_of_a_container_are_those_of_one_node() -> None:
    text = (
        "containers:\n- name: c\n  image: vllm/vllm-openai:v0.32.0\n"
        '  args: [--model, m, -tp, "8", --nnodes, "2"]\n  resources: {limits: {nvidia.com/gpu: "%s"}}\n'
    )
    assert draft_of(text % 4).problems == ()
    assert "8 on each of 2 nodes are asked for" in "\n".join(draft_of(text % 8).problems)


@pytest.mark.parametrize(
    ("text", "said", "why"),
    [
        ("srun -N4 vllm serve m -tp 8", "srun -N4", "the fleet starts the ranks"),
        ("mpirun -np 4 /opt/v/bin/python3 -u -m sglang.launch_server --model m", "mpirun -np 4", "the fleet"),
        ("nohup vllm serve m", "nohup", "agent starts the engine itself"),
        (
            "docker run --gpus all -e NCCL_DEBUG=INFO -p 80:80 vllm/vllm-openai:v0.32.0 --model m",
            "docker run --gpus all -p 80:80",
            "not in a container",
        ),
    ],
)
def test_what_stands_before_the_engine_is_said_to_become_nothing(text: str, said: str, why: str) -> None:
    line = became(draft_of(text))[said]
    assert line.startswith("nothing: ")
    assert why in line


def test_an_interpreter_is_nothing_to_be_told_of_and_secrets_before_the_engine_are_masked() -> None:
    assert "nothing" not in " ".join(became(draft_of("python -m sglang.launch_server --model m")).values())
    draft = draft_of("srun --export=ALL,HF_TOKEN=verysecret --api-key verysecret vllm serve m")
    assert "verysecret" not in repr(draft)
