"""How engine processes start, end and fail."""

from __future__ import annotations

import json
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from tests.engines.conftest import MODEL_NAME, EngineProcess, StartEngine, wait_until

CHAT = "/v1/chat/completions"
BODY = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "ignore_eos": True,
}
TOKENS_IN_A_SECOND = {"torch": 800, "simulated": 100}  # about; the simulated one is paced


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_sigterm_lets_open_streams_end_and_takes_nothing_new(
    start_engine: StartEngine, demo_model: Path, engine: str
) -> None:
    running = start_engine(engine, demo_model)
    running.wait_ready()
    body = {**BODY, "max_tokens": 2 * TOKENS_IN_A_SECOND[engine], "stream": True}
    with (
        running.client() as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _status(running) == "draining")
        with running.client() as other:
            refused = other.post(CHAT, json={**BODY, "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    finish = json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
    assert finish == "length"
    assert running.process.wait(timeout=15) == 0


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_drain_is_bounded(start_engine: StartEngine, demo_model: Path, engine: str) -> None:
    running = start_engine(engine, demo_model, drain_seconds=0.2, max_num_seqs=1)
    running.wait_ready()
    with running.client() as client:
        request = client.build_request("POST", CHAT, json={**BODY, "max_tokens": 4000, "stream": True})
        answer = client.send(request, stream=True)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=15) == 0
        answer.close()


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_unknown_flag_ends_the_engine_with_its_usage_message(
    start_engine: StartEngine, demo_model: Path, engine: str
) -> None:
    running = start_engine(engine, demo_model, extra_arguments="--no-such-flag 1")
    assert running.process.wait(timeout=30) == 2
    assert "unrecognized arguments: --no-such-flag" in running.log()


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_engine_without_key_does_not_serve(start_engine: StartEngine, demo_model: Path, engine: str) -> None:
    running = start_engine(engine, demo_model, api_key="")
    assert running.process.wait(timeout=30) == 2
    assert "never serves without a key" in running.log()


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_taken_port_ends_the_engine(start_engine: StartEngine, demo_model: Path, engine: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        running = start_engine(engine, demo_model, port=holder.getsockname()[1])
        assert running.process.wait(timeout=30) == 2
    assert "cannot listen" in running.log()


def test_port_answers_while_loading(start_engine: StartEngine, demo_model: Path) -> None:
    running = start_engine("simulated", demo_model, load_seconds=3600)
    wait_until(lambda: running.health() is not None)
    answer = running.health()
    assert answer is not None
    assert answer.status_code == 503
    assert answer.json()["status"] == "loading"
    assert 0 <= answer.json()["progress"] <= 1
    with running.client() as client:
        assert client.post(CHAT, json=BODY).status_code == 503
        assert client.get("/metrics").status_code == 200
    assert running.sample().kv_used_ratio is None
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=15) == 0


def test_sigterm_while_loading_ends_the_torch_engine_in_order(
    start_engine: StartEngine, demo_model: Path
) -> None:
    running = start_engine("torch", demo_model)
    wait_until(lambda: _status(running) == "loading")
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=15) == 0


def test_unknown_architecture_is_refused_by_name(
    start_engine: StartEngine, demo_model: Path, tmp_path: Path
) -> None:
    folder = _copy_with_config(demo_model, tmp_path, architectures=["MambaForCausalLM"])
    running = start_engine("torch", folder)
    assert running.process.wait(timeout=30) == 2
    assert "unsupported architecture MambaForCausalLM" in running.log()


def test_weights_that_do_not_fit_the_config_end_the_engine(
    start_engine: StartEngine, demo_model: Path, tmp_path: Path
) -> None:
    folder = _copy_with_config(demo_model, tmp_path, num_hidden_layers=5)
    running = start_engine("torch", folder)
    assert running.process.wait(timeout=60) == 1
    assert "the weights lack model.layers.4." in running.log()


def test_failing_load_ends_the_simulated_engine(start_engine: StartEngine, demo_model: Path) -> None:
    running = start_engine("simulated", demo_model, fail_loading=True)
    assert running.process.wait(timeout=30) == 1


def test_dead_model_loop_shows_in_health_and_ends_open_requests(
    start_engine: StartEngine, demo_model: Path
) -> None:
    running = start_engine("simulated", demo_model, fail_after=1, itl_ms=50)
    running.wait_ready()
    answers: list[str] = []

    def stream_to_its_end() -> None:
        with (
            running.client() as client,
            client.stream("POST", CHAT, json={**BODY, "stream": True}) as answer,
        ):
            answers.extend(line for line in answer.iter_lines() if line)

    reader = threading.Thread(target=stream_to_its_end)
    reader.start()
    wait_until(lambda: running.sample().requests_running == 1)
    with running.client() as client:
        assert client.post(CHAT, json=BODY).status_code == 500
    reader.join(timeout=15)
    assert "[DONE]" not in answers[-1]
    assert "engine_failed" in answers[-1]
    assert _status(running) == "failed"


def test_simulated_crash_exits_with_the_wanted_status(start_engine: StartEngine, demo_model: Path) -> None:
    running = start_engine("simulated", demo_model, exit_after_seconds=0.1, exit_code=42)
    assert running.process.wait(timeout=30) == 42


def test_hanging_engine_accepts_and_never_answers(start_engine: StartEngine, demo_model: Path) -> None:
    running = start_engine("simulated", demo_model, hang=True)
    wait_until(lambda: "listening" in running.log())
    with running.client(with_key=False) as client, pytest.raises(httpx.ReadTimeout):
        client.get("/health", timeout=0.3)
    running.process.kill()


def test_engine_that_ignores_sigterm_needs_sigkill(start_engine: StartEngine, demo_model: Path) -> None:
    running = start_engine("simulated", demo_model, ignore_sigterm=True)
    running.wait_ready()
    running.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "ignoring signal 15" in running.log())
    assert _status(running) == "ready"
    running.process.kill()
    assert running.process.wait(timeout=15) == -signal.SIGKILL


def _status(running: EngineProcess) -> str | None:
    answer = running.health()
    return None if answer is None else answer.json()["status"]


def _copy_with_config(model: Path, tmp_path: Path, **changes: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder
