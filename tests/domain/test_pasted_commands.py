"""Whatever runs an engine, a shell, a container or a scheduler, its command is found, and nothing is lost."""

from __future__ import annotations

import pytest

from exaserve_ops.serving.domain.launch_import import Draft
from exaserve_ops.serving.domain.launch_words import PasteError
from exaserve_ops.serving.domain.paste_import import read_paste


def draft_of(text: str) -> Draft:
    (draft,) = read_paste(text).drafts
    return draft


def refused(draft: Draft) -> dict[str, str]:
    return {line.said: line.became for line in draft.not_understood}


@pytest.mark.parametrize(
    "text",
    [
        "bash -c 'vllm serve m --seed 1'",
        'bash -lc "cd /x && source v/bin/activate && exec vllm serve m --seed 1"',
        "sh -ec 'ulimit -l unlimited; vllm serve m --seed 1'",
        "ssh gpu1 'vllm serve m --seed 1'",
        "tmux new -d 'vllm serve m --seed 1'",
        "docker run vllm/vllm-openai:v0.9.1 bash -c 'vllm serve m --seed 1'",
        """docker run --gpus all img bash -c "srun bash -c 'vllm serve m --seed 1'" """,
        "cd /srv && vllm serve m --seed 1",
        "source /opt/v/bin/activate; vllm serve m --seed 1",
        "export A=1\nvllm serve m --seed 1",
        "pip install vllm\n\nvllm serve m --seed 1\n",
        "nohup vllm serve m --seed 1 > log.txt 2>&1 &",
        "vllm serve m --seed 1 2>&1 | tee log",
        "vllm serve m --seed 1 &> log",
        "sudo -E -u bob vllm serve m --seed 1",
        "env -i PATH=/bin vllm serve m --seed 1",
        "$ vllm serve m --seed 1",
        "root@host:~# /opt/v/bin/vllm serve m --seed 1",
        "vllm serve m --seed 1 # not --seed 2",
        "vllm serve m \\\r\n  --seed 1\r\n",
        "vllm serve m \\   \n  --seed 1",
        "vllm serve m ^\n  --seed 1",
        "vllm serve m `\n  --seed 1",
        "# a server\nvllm serve m \\\n  --seed 1",
        "uv run --with vllm python -u -m vllm.entrypoints.openai.api_server --model m --seed 1",
        "docker run --entrypoint python3 img:v1 -m vllm.entrypoints.openai.api_server --model m --seed 1",
        "docker run r:5000/vllm/vllm-openai:v0.9.1@sha256:abc --model m --seed 1",
    ],
)
def test_the_command_of_an_engine_is_found_whatever_runs_it(text: str) -> None:
    draft = draft_of(text)
    assert (draft.engine, draft.model, draft.options) == ("vllm", "m", {"seed": 1})


def test_json_over_several_lines_stays_whole() -> None:
    draft = draft_of("vllm serve m --hf-overrides '{\n  \"a\": 1\n}' \\\n  --seed 1")
    assert draft.options == {"hf_overrides": '{\n  "a": 1\n}', "seed": 1}


def test_variables_reach_the_engine_whoever_gives_them() -> None:
    for text in (
        "NCCL_DEBUG=INFO vllm serve m",
        "env -u X NCCL_DEBUG=INFO vllm serve m",
        "sudo -E NCCL_DEBUG=INFO vllm serve m",
        "export NCCL_DEBUG=INFO\ncd /x; vllm serve m",
        "bash -c 'NCCL_DEBUG=INFO vllm serve m'",
        "NCCL_DEBUG=INFO bash -c 'vllm serve m'",
        "docker run -e NCCL_DEBUG=INFO vllm/vllm-openai:v0.9.1 --model m",
        "docker run --env=NCCL_DEBUG=INFO vllm/vllm-openai:v0.9.1 --model m",
        "docker run -eNCCL_DEBUG=INFO vllm/vllm-openai:v0.9.1 --model m",
        'docker run --env "NCCL_DEBUG=INFO" img vllm serve m',
    ):
        assert draft_of(text).options == {"environment": "NCCL_DEBUG=INFO"}, text
    draft = draft_of("docker run --env-file x.env -e HOSTS vllm/vllm-openai:v0.9.1 --model m")
    assert set(refused(draft)) == {"--env-file x.env", "-e HOSTS"}


def test_each_engine_of_several_commands_becomes_a_draft() -> None:
    pasted = read_paste("vllm serve a --port 1 &\nsglang serve --model-path b --port 2 &\nwait")
    assert [(draft.engine, draft.model) for draft in pasted.drafts] == [("vllm", "a"), ("sglang", "b")]
    assert all("not read, since no engine is started by it: wait" in draft.notes for draft in pasted.drafts)


@pytest.mark.parametrize(
    "text",
    [
        "python -m sglang_router.launch_router --worker-urls http://a:30000 http://b:30000",
        "python -m sglang_router.launch_server --model-path m --dp-size 4",
        "smg launch --worker-urls http://a:1",
        "vllm-router --static-backends http://a:1",
        "docker run lmsysorg/sglang-router:v0.2 --worker-urls http://a:1",
    ],
)
def test_a_router_is_told_from_an_engine(text: str) -> None:
    with pytest.raises(PasteError, match="starts a router and no engine"):
        read_paste(text)


@pytest.mark.parametrize(
    "text",
    [
        "vllm bench serve --model m",
        "vllm chat",
        "docker run vllm/vllm-openai:v0.9.1 python3 download.py",
        "docker run vllm/vllm-openai:v0.9.1 bash -c 'sleep 1000'",
        "pip install vllm",
        "echo 'vllm serves'",
        "sh -c " + "'a vllm b' " * 1600,
    ],
)
def test_what_starts_no_engine_is_no_deployment(text: str) -> None:
    with pytest.raises(PasteError, match="no engine is started by it"):
        read_paste(text)


def test_what_editors_make_of_dashes_and_quotes_is_said() -> None:
    draft = draft_of("vllm serve \u201cm\u201d \u2013\u2013seed 1 \u2014max-model-len=5")
    assert (draft.model, draft.options) == ("", {})
    assert "typographic quotes" in refused(draft)["\u201cm\u201d"]
    assert "typographic dash" in refused(draft)["\u2013\u2013seed 1"]
    assert "typographic dash" in refused(draft)["\u2014max-model-len 5"]


def test_a_place_for_the_reader_to_write_in_is_no_value() -> None:
    draft = draft_of("vllm serve <your model> --max-model-len <N> --seed 1")
    assert (draft.model, draft.options) == ("", {"seed": 1})
    assert set(refused(draft)) == {"<your model>", "--max-model-len <N>"}


def test_what_is_said_twice_is_noted_whatever_it_is() -> None:
    draft = draft_of("vllm serve a --model b --nnodes 2 --nnodes 1 --seed 1 --seed 2")
    for told in ("model is said twice, a and b", "nodes_per_replica is said twice", "seed is said twice"):
        assert told in "\n".join(draft.notes)


def test_a_beginning_of_several_options_is_none_of_them() -> None:
    assert "--max-model-len, --max-num-seqs" in refused(draft_of("vllm serve m --max 3"))["--max 3"]


def test_one_name_is_served_and_the_others_are_said() -> None:
    draft = draft_of("vllm serve --served-model-name a b c --seed 1")
    assert draft.served_name == "a"
    assert "one name" in refused(draft)["--served-model-name b c"]


def test_a_flag_without_a_value_takes_no_word_behind_it() -> None:
    for flag in ("--disable-log-requests", "--headless", "--enable-log-outputs", "--enforce-eager"):
        assert draft_of(f"vllm serve {flag} m").model == "m", flag


def test_objects_that_are_made_of_options_come_apart() -> None:
    draft = draft_of(
        """vllm serve m --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both","""
        """"kv_port":14579,"kv_connector_extra_config":{"a":1},"made_up":2}' --kv-events-config """
        """'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"}'"""
    )
    assert draft.options == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": '{"a": 1}',
        "kv_events": True,
    }
    assert list(refused(draft)) == ["--kv-transfer-config made_up 2"]
    off = draft_of("""sglang serve --model-path m --kv-events-config '{"publisher":"null"}'""")
    assert off.options == {"kv_events": False}
    for broken in ("{", "[]", '{"publisher":"kafka"}'):
        assert refused(draft_of(f"vllm serve m --kv-events-config '{broken}'"))


@pytest.mark.parametrize("number", ["9" * 400 + "k", "9" * 5000, "1." + "9" * 400 + "G", "1e400", "nan"])
def test_numbers_beyond_all_bounds_are_refused(number: str) -> None:
    draft = draft_of(f"vllm serve m --max-model-len {number} --gpu-memory-utilization {number}")
    assert draft.options == {}
    assert len(draft.not_understood) == 2


def test_units_count_as_the_engine_counts_them() -> None:
    draft = draft_of(
        "vllm serve m --max-model-len 128K --max-num-batched-tokens 1.5k --kv-cache-memory-bytes 1T"
    )
    assert draft.options == {
        "max_model_len": 131072,
        "max_num_batched_tokens": 1500,
        "kv_cache_memory_bytes": 1 << 40,
    }
