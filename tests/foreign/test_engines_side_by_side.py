"""vLLM and the built-in engine in one fleet: offered, placed, started, asked and scaled away."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, scale_deployment
from tests.fakes.leader import Leader, leading
from tests.fakes.real_agent import RealAgent
from tests.fakes.valkey import Valkey
from workers.engines.demo_model import make_demo_model
from workers.protocol import digests

pytestmark = [pytest.mark.vllm, pytest.mark.django_db(transaction=True), pytest.mark.timeout(3600)]
START_SECONDS = 1500
OPTIONS = {"max_model_len": 1024, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 4}


class TestsOwnStore(Valkey):
    """The store that the tests already run, as the agent's fake wants to see one."""

    __test__ = False

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self._url)


@pytest.fixture
def leader(redis_client: redis.Redis) -> Iterator[Leader]:
    with leading(redis_client) as leader:
        yield leader


@pytest.fixture
def agent(
    tmp_path: Path,
    vllm_python: Path,
    leader: Leader,  # noqa: ARG001 - reads first
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[RealAgent]:
    monkeypatch.setenv("EXAOPS_AGENT_VLLM_PYTHON", str(vllm_python))
    monkeypatch.setenv("EXAOPS_AGENT_CPU_THREADS", "1")
    store = TestsOwnStore(os.environ["REDIS_URL"])
    agent = RealAgent(tmp_path / "home", store, name="n1", address="127.0.0.1")
    agent.start()
    yield agent
    agent.close()


def settle(leader: Leader, done: str, condition: Callable[[], object], *, seconds: float) -> None:
    """Let the leader work until it is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        rows = Replica.objects.exclude(status="stopped").values_list("name", "status", "reason")
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {done}; {list(rows)}"
        leader.work()
        time.sleep(0.5)


def deploy(name: str, engine: str, model: Model, options: dict[str, Any]) -> Deployment:
    wish = DeploymentWish(
        name=name,
        model_id=model.pk,
        replicas=1,
        engine=engine,
        engine_options=options,
        served_name="demo",
        replica_memory_bytes=512 << 20,
        start_seconds=START_SECONDS,
        stall_seconds=0,
    )
    return create_deployment(wish, actor="user:test", now=clock.now())


def chat(agent: RealAgent, replica: Replica) -> dict[str, Any]:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": 6,
        "temperature": 0,
    }
    key = digests.engine_api_key(agent.identity.key, str(replica.pk), replica.attempt)
    request = urllib.request.Request(
        f"http://{replica.address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - http, above
        return dict(json.load(answer))


def test_both_engines_serve_one_model_in_one_fleet(leader: Leader, agent: RealAgent, tmp_path: Path) -> None:
    make_demo_model(tmp_path / "model")
    source = f"file://{tmp_path / 'model'}"
    model = Model.objects.create(name="demo", digest="d", source=source, weights_bytes=10 << 20)
    settle(leader, "the node says hello", lambda: agent.row().engines, seconds=120)
    assert agent.row().engines == ["simulated", "torch", "vllm"]
    assert agent.row().engine_versions["vllm"].startswith("0.32")

    with pytest.raises(InvalidInputError, match="kv_offloading_size"):
        deploy("refused", "vllm", model, {"swap_space": 4})
    ours = deploy("ours", "torch", model, {"num_blocks": 64})
    theirs = deploy("theirs", "vllm", model, OPTIONS)
    ready = Replica.objects.filter(status="ready")
    settle(leader, "both are ready", lambda: ready.count() == 2, seconds=START_SECONDS)

    answers = {replica.deployment_id: chat(agent, replica) for replica in ready}
    assert answers[ours.pk]["usage"]["completion_tokens"] == 6
    assert answers[theirs.pk]["usage"]["completion_tokens"] == 6
    texts = {answer["choices"][0]["message"]["content"] for answer in answers.values()}
    assert len(texts) == 1  # the same weights, and the same greedy tokens

    (replica,) = ready.filter(deployment=theirs)
    scale_deployment(theirs.pk, replicas=0, actor="user:test", now=clock.now())
    gone = Replica.objects.filter(deployment=theirs, status="stopped")
    settle(leader, "vLLM has ended", gone.exists, seconds=300)
    assert not agent.runs(str(replica.pk))
    assert ready.get().deployment_id == ours.pk
