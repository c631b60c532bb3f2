"""What every engine of ours promises over HTTP; the same tests run against each of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.engines.conftest import MODEL_NAME, EngineProcess, wait_until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat_body(content: str = "Hello, who are you?", **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}


def text_body(prompt: object = "Once upon a time", **fields: object) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}


def stream_events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def chat_text(client: httpx.Client, body: dict[str, Any]) -> str:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_health_needs_no_key_and_tells_nothing_else(server: EngineProcess) -> None:
    answer = server.health()
    assert answer is not None
    assert answer.json() == {"status": "ready"}


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", CHAT, TEXT, "/docs", "/nowhere"])
@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer", "Basic abc"])
def test_every_other_route_needs_the_key(server: EngineProcess, path: str, key: str | None) -> None:
    with server.client(with_key=False) as client:
        headers = {} if key is None else {"authorization": key}
        answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_models_names_the_model_and_who_simulates(server: EngineProcess, client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == MODEL_NAME
    assert card["max_model_len"] > 0
    assert ("simulated" in card["owned_by"]) == (server.adapter.name == "simulated")


def test_chat_answers_with_text_and_usage(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=chat_body()).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"].strip()
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


def test_streamed_text_equals_whole_text(client: httpx.Client) -> None:
    whole = chat_text(client, chat_body())
    *events, last = stream_events(client, CHAT, chat_body())
    chunks = [json.loads(event) for event in events]
    assert last == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)


def test_stream_carries_usage_when_asked(client: httpx.Client) -> None:
    body = chat_body(stream_options={"include_usage": True})
    *_, usage_event, _ = stream_events(client, CHAT, body)
    chunk = json.loads(usage_event)
    assert chunk["choices"] == []
    assert chunk["usage"]["completion_tokens"] == 12


def test_completions_take_text_and_token_ids(client: httpx.Client) -> None:
    by_text = client.post(TEXT, json=text_body()).json()
    assert by_text["object"] == "text_completion"
    assert by_text["choices"][0]["text"].strip()
    by_ids = client.post(TEXT, json=text_body([5, 6, 7, 8])).json()
    assert by_ids["usage"]["prompt_tokens"] == 4
    *events, last = stream_events(client, TEXT, text_body())
    assert last == "[DONE]"
    joined = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert joined == by_text["choices"][0]["text"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_come_with_the_text_when_asked_for(client: httpx.Client, path: str) -> None:
    body = {**(chat_body() if path == CHAT else text_body()), "return_token_ids": True}
    whole = client.post(path, json=body).json()
    place = whole if path == CHAT else whole["choices"][0]
    events = [json.loads(event) for event in stream_events(client, path, body)[:-1]]
    first = events[0] if path == CHAT else events[0]["choices"][0]
    assert len(place["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert first["prompt_token_ids"] == place["prompt_token_ids"]
    streamed = [token for event in events for token in event["choices"][0].get("token_ids", ())]
    assert streamed == whole["choices"][0]["token_ids"]
    assert len(streamed) == whole["usage"]["completion_tokens"]


def test_completion_with_null_for_its_length_has_all_the_room(client: httpx.Client) -> None:
    room = 20
    (card,) = client.get("/v1/models").json()["data"]
    prompt = [5] * (card["max_model_len"] - room)
    asked = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    for fields, tokens in (({"max_tokens": None}, room), ({}, 16)):
        usage = client.post(TEXT, json={**asked, **fields}).json()["usage"]
        assert usage["completion_tokens"] == tokens


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.1, "top_p": 0.9, "seed": 5}])
def test_another_request_goes_on_from_any_token(client: httpx.Client, sampling: dict[str, Any]) -> None:
    """As another engine would after this one's death: same tokens, same text, same stop string."""
    asked = {**text_body(max_tokens=24), **sampling, "ignore_eos": True, "return_token_ids": True}
    text = client.post(TEXT, json=asked).json()["choices"][0]["text"]
    asked["stop"] = text[-12:-4]
    whole = client.post(TEXT, json=asked).json()["choices"][0]
    parts = [json.loads(event)["choices"][0] for event in stream_events(client, TEXT, asked)[1:-2]]
    prompt, tokens = whole["prompt_token_ids"], whole["token_ids"]
    for cut in range(1, len(tokens)):
        rest = {"prompt": prompt + tokens[:cut], "max_tokens": 24 - cut, "continued_tokens": cut}
        continued = client.post(TEXT, json={**asked, **rest}).json()["choices"][0]
        assert continued["token_ids"] == tokens[cut:]
        assert continued["finish_reason"] == whole["finish_reason"] == "stop"
        assert "".join(part["text"] for part in parts[:cut]) + continued["text"] == whole["text"]


def test_text_keeps_its_stop_string_when_asked_to(client: httpx.Client) -> None:
    text = chat_text(client, chat_body())
    stop = text[5:9]
    cut = chat_text(client, chat_body(stop=stop))
    assert chat_text(client, chat_body(stop=stop, include_stop_str_in_output=True)) == cut + stop


@pytest.mark.parametrize("count", [-1, 3, 4])
def test_more_continued_tokens_than_a_prompt_can_have_are_refused(client: httpx.Client, count: int) -> None:
    answer = client.post(TEXT, json=text_body([1, 2, 3], continued_tokens=count))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continued_tokens")


def test_stop_string_across_tokens_cuts_the_text(client: httpx.Client) -> None:
    whole = chat_text(client, chat_body())
    middle = len(whole) // 2
    stop = whole[middle : middle + 9]  # longer than any word here, so it spans tokens
    answer = client.post(CHAT, json=chat_body(stop=["never there", stop])).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    *events, _ = stream_events(client, CHAT, chat_body(stop=stop))
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == whole[: whole.index(stop)]


def test_same_seed_gives_the_same_text(client: httpx.Client) -> None:
    def drawn(seed: int) -> str:
        body = chat_body(temperature=1.0, top_p=0.95, seed=seed, max_tokens=24, ignore_eos=True)
        return chat_text(client, body)

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) > 1


def test_requests_in_one_batch_do_not_disturb_each_other(client: httpx.Client) -> None:
    contents = [f"Question number {number}: what comes next?" for number in range(6)]
    alone = [chat_text(client, chat_body(content)) for content in contents]
    with ThreadPoolExecutor(len(contents)) as pool:
        together = list(pool.map(lambda content: chat_text(client, chat_body(content)), contents))
    assert together == alone


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "stranger", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 100_000}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_bad_chat_request_is_refused_with_the_field_at_fault(
    client: httpx.Client, change: dict[str, Any], param: str
) -> None:
    answer = client.post(CHAT, json={**chat_body(), **change})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_missing_field_is_named(client: httpx.Client) -> None:
    answer = client.post(CHAT, json={"model": MODEL_NAME})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["one", "two"]},
        {"prompt": [1, "two"]},
        {"prompt": [-1]},
        {"prompt": [10_000_000]},
        {"prompt": "word " * 9000},
        {"logprobs": 1},
        {"echo": True},
        {"best_of": 3},
    ],
)
def test_bad_completion_request_is_refused(client: httpx.Client, change: dict[str, Any]) -> None:
    answer = client.post(TEXT, json={**text_body(), **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_body_that_is_no_json_is_refused(client: httpx.Client) -> None:
    assert client.post(CHAT, content=b"{not json").json()["error"]["code"] == "invalid_json"
    assert client.post(CHAT, content=b'"\xff"').status_code == 400


def test_unknown_model_and_unknown_route_are_404(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=chat_body(model="other"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert client.get("/docs").status_code == 404
    assert client.get(CHAT).status_code == 405


def test_unknown_fields_are_ignored(client: httpx.Client) -> None:
    assert client.post(CHAT, json=chat_body(user="me", metadata={"a": 1})).status_code == 200


def test_second_turn_reuses_the_blocks_of_the_first(server: EngineProcess, client: httpx.Client) -> None:
    before = server.sample()
    first_question = "Tell me about the river and the mountain. " * 4
    messages = [{"role": "user", "content": first_question}]
    body = chat_body(max_tokens=20)
    first = client.post(CHAT, json={**body, "messages": messages}).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "And then?"})
    second = client.post(CHAT, json={**body, "messages": messages}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached % 16 == 0
    assert cached >= first["usage"]["prompt_tokens"] - 32
    after = server.sample()
    assert after.prefix_hit_tokens is not None
    assert before.prefix_hit_tokens is not None
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == cached
    missed = sum(
        server.metric(f'exaserve_engine_prefix_cache_miss_tokens_total{{reason="{reason}"}}')
        for reason in ("no_shared_prefix", "shorter_than_a_block", "evicted")
    )
    assert missed + after.prefix_hit_tokens == after.prefix_query_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_hangs_up_frees_its_blocks(server: EngineProcess, *, stream: bool) -> None:
    aborted = 'exaserve_engine_requests_total{outcome="aborted"}'
    before = server.metric(aborted)
    body = chat_body(max_tokens=3000, ignore_eos=True, stream=stream)
    with server.client() as client:
        if stream:
            request = client.build_request("POST", CHAT, json=body)
            answer = client.send(request, stream=True)
            next(answer.iter_lines())
            answer.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=body, timeout=httpx.Timeout(60.0, read=0.2))
    wait_until(lambda: server.metric('exaserve_engine_kv_blocks{state="used",tier="accelerator"}') == 0)
    assert server.sample().requests_running == 0
    assert server.metric(aborted) == before + 1
    assert server.process.poll() is None


def test_metrics_page_says_everything_that_the_port_asks_for(
    server: EngineProcess, client: httpx.Client
) -> None:
    before = server.sample()
    chat_text(client, chat_body())
    after = server.sample()
    missing = {name for name in after.__slots__ if getattr(after, name) is None}
    # Nothing lies below its blocks or beyond them, and none had to leave them yet; what it counts it counts.
    assert missing == {
        *("kv_evicted_idle_seconds", "kv_swaps", "external_query_tokens", "external_hit_tokens"),
        *("prefix_hit_ratio", "generation_tokens_per_second", "kv_cached_tokens"),
    }
    assert [(tier.name, tier.capacity_blocks) for tier in after.kv_tiers] == [("accelerator", 512)]
    assert after.notes == ()
    assert after.kv_total_blocks == 512
    assert after.kv_block_tokens == 16
    assert before.generation_tokens is not None
    assert after.generation_tokens == before.generation_tokens + 12
    assert before.ttft is not None
    assert before.itl is not None
    assert after.ttft is not None
    assert after.itl is not None
    assert after.ttft.counts[-1] == before.ttft.counts[-1] + 1
    assert after.itl.counts[-1] == before.itl.counts[-1] + 11


def test_official_client_streams_unchanged(server: EngineProcess) -> None:
    with (
        openai.OpenAI(base_url=f"http://{server.address}/v1", api_key=server.api_key) as client,
        client.chat.completions.create(**chat_body(), stream=True) as stream,
    ):
        chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip()
