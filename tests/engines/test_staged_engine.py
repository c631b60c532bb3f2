"""A replica whose layers are split over processes answers as one process does, and lives and dies as one."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.stages import MODEL_NAME, StagedReplica, StageForks, stage_forks, wait_until
from workers.engines.demo_model import HEAD_SIZE, KV_HEADS
from workers.protocol.digests import KV_BLOCK_TOKENS

SILENCE_SECONDS = 15.0
"""So short that a stage that stands still is noticed soon, so long that a busy machine is none."""
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 1.0, "seed": 11}
NUCLEUS = {"temperature": 0.8, "top_p": 0.7, "seed": 12}
PROMPT = "Once upon a time there was a pipeline. " * 16
"""Some 200 tokens or more: it takes several steps, and the first one goes through the stages in parts."""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageForks]:
    with stage_forks(tmp_path_factory.mktemp("stages")) as starter:
        yield starter


@pytest.fixture(scope="module")
def single(forks: StageForks, demo_model: Path) -> StagedReplica:
    replica = forks.start(demo_model, 1)
    replica.wait_ready()
    return replica


@pytest.fixture(scope="module")
def staged(forks: StageForks, demo_model: Path) -> StagedReplica:
    replica = forks.start(demo_model, 3, max_num_batched_tokens=192)
    replica.wait_ready()
    return replica


def ask(client: httpx.Client, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize("how", [GREEDY, SEEDED, NUCLEUS], ids=["greedy", "seeded", "nucleus"])
def test_three_stages_say_what_one_process_says(
    single: StagedReplica, staged: StagedReplica, how: dict[str, Any]
) -> None:
    with single.client() as one, staged.client() as three:
        expected, told = ask(one, PROMPT, **how), ask(three, PROMPT, **how)
        again = ask(three, PROMPT, **how)
    assert tokens_of(told) == tokens_of(expected)
    assert tokens_of(again) == tokens_of(expected)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_requests_at_once_each_get_the_tokens_that_they_get_alone(
    single: StagedReplica, staged: StagedReplica
) -> None:
    prompts = [PROMPT[: 40 * n] + str(n) for n in range(1, 6)]
    with single.client() as one:
        expected = [tokens_of(ask(one, prompt, **SEEDED)) for prompt in prompts]
    told: dict[int, list[int]] = {}

    def ask_for(number: int) -> None:
        with staged.client() as client:
            told[number] = tokens_of(ask(client, prompts[number], **SEEDED))

    askers = [threading.Thread(target=ask_for, args=(number,)) for number in range(len(prompts))]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert [told[number] for number in range(len(prompts))] == expected


def test_an_answer_that_was_begun_elsewhere_goes_on_with_its_seed(
    single: StagedReplica, staged: StagedReplica
) -> None:
    with single.client() as one, staged.client() as three:
        prompt = [int(token) for token in range(20, 60)]
        whole = tokens_of(ask(one, prompt, **SEEDED))
        rest = ask(three, prompt + whole[:10], max_tokens=14, continued_tokens=10, **SEEDED)
    assert tokens_of(rest) == whole[10:]


def test_a_client_that_goes_leaves_no_block_held(staged: StagedReplica) -> None:
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with staged.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())

        def is_idle() -> bool:
            page = client.get("/metrics").text
            return "exaserve_engine_kv_used_ratio 0.0\n" in page and "requests_running 0.0\n" in page

        wait_until(is_idle)


def test_what_needs_all_layers_in_one_process_is_not_offered(staged: StagedReplica) -> None:
    with staged.client() as client:
        assert client.post("/kv/moves", json={}).status_code == 404
        page = client.get("/metrics").text
    assert 'pool="private"' in page
    keys_and_values_of_four_layers = 2 * 4 * KV_BLOCK_TOKENS * KV_HEADS * HEAD_SIZE * 4
    assert f'block_bytes="{keys_and_values_of_four_layers}"' in page


@pytest.mark.parametrize("lost", [0, 1])
def test_killing_any_stage_ends_all_and_says_which(forks: StageForks, demo_model: Path, lost: int) -> None:
    replica = forks.start(demo_model, 2)
    replica.wait_ready()
    replica.stages[lost].send(signal.SIGKILL)
    assert replica.stages[lost].end() == -signal.SIGKILL
    other = replica.stages[1 - lost]
    assert other.end() == 1
    assert f"stage {lost} (127.0.0.1) went away" in other.log()


def test_a_stage_that_stands_still_ends_the_others_and_all_open_answers(
    forks: StageForks, demo_model: Path
) -> None:
    """Both kinds at once, since what takes time is to wait for a sign of life."""
    without_stage, without_head = (
        forks.start(demo_model, 2, silence_seconds=SILENCE_SECONDS) for _ in range(2)
    )
    for replica in (without_stage, without_head):
        replica.wait_ready()
    without_head.stages[0].send(signal.SIGSTOP)
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with without_stage.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        without_stage.stages[1].send(signal.SIGSTOP)
        rest = list(lines)
    events = [json.loads(line.removeprefix("data: ")) for line in rest if line != "data: [DONE]"]
    assert "error" in events[-1]
    for number, survivor in ((1, without_stage.stages[0]), (0, without_head.stages[1])):
        assert survivor.end() == 1
        assert f"stage {number} (127.0.0.1) has given no sign of life" in survivor.log()


def test_told_to_end_a_replica_answers_what_is_open_and_its_stages_end_in_order(
    forks: StageForks, demo_model: Path
) -> None:
    replica = forks.start(demo_model, 2)
    replica.wait_ready()
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with replica.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        for stage in reversed(replica.stages):
            stage.send(signal.SIGTERM)
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert [stage.end() for stage in replica.stages] == [0, 0]


def test_a_stage_with_another_key_is_let_in_nowhere(forks: StageForks, demo_model: Path) -> None:
    head, stranger = forks.start(demo_model, 2, keys={1: "xg-of-an-earlier-start"}).stages
    assert stranger.end() == 1
    for stage in (head, stranger):
        wait_until(lambda stage=stage: "no proof that it belongs to this start" in stage.log())
    assert head.process.exitcode is None
    head.send(signal.SIGKILL)
    head.end()


def test_a_head_whose_stages_do_not_come_in_time_ends_and_names_them(
    forks: StageForks, demo_model: Path
) -> None:
    """However late the other one is, it knows another key and never belongs."""
    replica = forks.start(demo_model, 2, keys={1: "xg-of-an-earlier-start"}, join_seconds=1)
    assert [stage.end() for stage in replica.stages] == [1, 1]
    assert "stage 1 did not come within 1 s" in replica.stages[0].log()
