"""An engine that is forked off a template looks, ends and is cleaned up like one that was started."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec, wait_for
from tests.fakes.tiny_adapter import ForkedTinyAdapter, PreparedTinyAdapter
from workers.agent import processes
from workers.agent.config import AgentConfig
from workers.agent.processes import LaunchLabel
from workers.protocol import names
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ModelRef, ReplicaSpec, WantedState


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(tmp_path / "home", adapter=ForkedTinyAdapter())
    yield node
    node.close()


def parent_of(pid: int) -> int:
    stat = processes.read_stat(pid)
    assert stat is not None
    return stat.parent


def shim_of(node: LocalNode, replica_id: str) -> int:
    (row,) = (row for row in node.journal.attempts() if row.replica_id == replica_id)
    assert row.pid is not None
    return row.pid


def template_of(node: LocalNode, replica_id: str) -> int:
    """The process that a replica was forked off."""
    pid = parent_of(shim_of(node, replica_id))
    assert b"workers.agent.template_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return pid


def environment_of(replica: ReplicaObserved) -> dict[str, str]:
    with urllib.request.urlopen(f"http://{replica.address}/environ", timeout=5) as answer:
        return dict(json.load(answer))


def ready(node: LocalNode, replica_id: str, *, attempt: int | None = None) -> int:
    pid = node.wait_state(replica_id, ObservedState.READY, attempt=attempt).pid
    assert pid is not None
    return pid


def test_replicas_are_forked_off_one_template_and_shown_as_what_they_are(node: LocalNode) -> None:
    node.wish(make_spec("r1"), make_spec("r2"))
    engines = [ready(node, "r1"), ready(node, "r2")]
    assert template_of(node, "r1") == template_of(node, "r2")
    for replica_id, engine in zip(("r1", "r2"), engines, strict=True):
        label = LaunchLabel(node.node_id, replica_id, 1)
        assert {member.pid for member in processes.members(None, label)} == {
            engine,
            shim_of(node, replica_id),
        }
        command = Path(f"/proc/{engine}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert command[2:5] == [b"-m", b"tests.fakes.tiny_engine", b"127.0.0.1"]


def test_forked_engine_sees_its_own_environment_and_shows_no_secret(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXAOPS_FLEET_SECRET", "f" * 64)
    node.wish(make_spec("r1"))
    replica = node.wait_state("r1", ObservedState.READY)
    seen = environment_of(replica)
    assert seen[names.ENV_ENGINE_API_KEY] == node.runner.api_key("r1", 1)
    assert names.ENV_REPLICA in seen
    assert not {"EXAOPS_FLEET_SECRET", "EXAOPS_TEMPLATE_ROOM"} & seen.keys()
    for process in processes.labelled(node.node_id):
        for file in ("cmdline", "environ"):
            shown = Path(f"/proc/{process.pid}/{file}").read_bytes()
            assert node.runner.api_key("r1", 1).encode() not in shown


def test_killed_engine_is_relaunched_with_its_exit_signal(node: LocalNode) -> None:
    node.wish(make_spec("r1", engine_options={"children": 2}))
    engine = ready(node, "r1")
    group = processes.members(None, LaunchLabel(node.node_id, "r1", 1))
    assert len(group) == 4
    os.kill(engine, signal.SIGKILL)
    replica = node.wait_state("r1", ObservedState.READY, attempt=2)
    assert replica.last_exit is not None
    assert replica.last_exit.signal == signal.SIGKILL
    assert not [process for process in group if processes.is_alive(process)]


def test_exit_code_and_last_lines_are_known(node: LocalNode) -> None:
    node.wish(make_spec("r1", engine_options={"exit": 2}))
    replica = node.wait_backing_off("r1")
    assert replica.last_exit is not None
    assert (replica.last_exit.code, replica.last_exit.signal) == (2, None)
    assert "error: unrecognized arguments: --quantization nope" in replica.last_exit.log_tail


def test_engine_is_asked_to_end_before_it_is_killed(node: LocalNode) -> None:
    spec = make_spec("r1")
    node.wish(spec)
    ready(node, "r1")
    node.wish(msgspec.structs.replace(spec, generation=2, wanted=WantedState.STOP))
    replica = node.wait_state("r1", ObservedState.STOPPED)
    assert replica.last_exit is not None
    assert replica.last_exit.signal != signal.SIGKILL
    assert not list(node.home.run.glob("r1.*"))


def test_replicas_outlive_the_template_and_the_agent(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    engine, template = ready(node, "r1"), template_of(node, "r1")
    node.runner.close()
    assert processes.read_stat(template) is None
    node.begin()
    assert ready(node, "r1", attempt=1) == engine


def test_killed_template_costs_one_launch_without_it(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    ready(node, "r1")
    template = template_of(node, "r1")
    os.kill(template, signal.SIGKILL)
    wait_for(lambda: processes.read_stat(template) is None, "the template is gone")
    node.wish(make_spec("r1"), make_spec("r2"))
    ready(node, "r2")
    assert parent_of(shim_of(node, "r2")) == os.getpid()
    assert processes.read_stat(shim_of(node, "r1")) is not None


def test_template_that_cannot_import_is_no_obstacle(tmp_path: Path) -> None:
    adapter = ForkedTinyAdapter()
    adapter.preload = ("no_such_module",)
    node = LocalNode(tmp_path / "home", adapter=adapter)
    try:
        node.wish(make_spec("r1"))
        ready(node, "r1")
        assert parent_of(shim_of(node, "r1")) == os.getpid()
        assert "no_such_module" in (node.home.logs / "template.log").read_text()
    finally:
        node.close()


def test_operator_can_do_without_templates(tmp_path: Path) -> None:
    config = AgentConfig(address="127.0.0.1", template_processes=False)
    node = LocalNode(tmp_path / "home", adapter=ForkedTinyAdapter(), config=config)
    try:
        node.wish(make_spec("r1"))
        ready(node, "r1")
        assert parent_of(shim_of(node, "r1")) == os.getpid()
    finally:
        node.close()


def test_template_ends_when_its_engine_is_not_wanted_any_more(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    ready(node, "r1")
    template = template_of(node, "r1")
    node.runner.rest((), now=1e12)
    assert processes.read_stat(template) is None
    assert processes.read_stat(shim_of(node, "r1")) is not None


@pytest.fixture
def prepared_node(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(tmp_path / "home", adapter=PreparedTinyAdapter())
    yield node
    node.close()


def spec_of(replica_id: str, digest: str) -> ReplicaSpec:
    return make_spec(replica_id, model=ModelRef(name="tiny", digest=digest, source="file:///tmp"))


def notes_of(node: LocalNode, replica_id: str) -> list[str]:
    """What a replica found read when it was forked."""
    replica = node.wait_state(replica_id, ObservedState.READY)
    with urllib.request.urlopen(f"http://{replica.address}/notes", timeout=5) as answer:
        return list(json.load(answer))


def test_replicas_of_a_model_are_forked_off_the_process_that_read_it(prepared_node: LocalNode) -> None:
    node = prepared_node
    node.wish(spec_of("r1", "a"), spec_of("r2", "a"), spec_of("r3", "b"))
    branches = {name: template_of(node, name) for name in ("r1", "r2", "r3") if ready(node, name)}
    assert branches["r1"] == branches["r2"] != branches["r3"]
    assert notes_of(node, "r1") == notes_of(node, "r2") == [f"{branches['r1']} a"]
    assert notes_of(node, "r3") == [f"{branches['r3']} b"]
    trunks = {parent_of(branch) for branch in branches.values()}
    assert len(trunks) == 1
    assert parent_of(trunks.pop()) == os.getpid()


def test_replica_forked_off_a_branch_is_killed_and_relaunched_as_any(prepared_node: LocalNode) -> None:
    node = prepared_node
    node.wish(spec_of("r1", "a"))
    engine, branch = ready(node, "r1"), template_of(node, "r1")
    os.kill(engine, signal.SIGKILL)
    replica = node.wait_state("r1", ObservedState.READY, attempt=2)
    assert replica.last_exit is not None
    assert replica.last_exit.signal == signal.SIGKILL
    assert template_of(node, "r1") == branch


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("fails", "the note cannot be read"), ("leaves a thread", "left 2 threads, so nothing can be forked")],
)
def test_model_that_cannot_be_read_ahead_is_launched_without(tmp_path: Path, trouble: str, said: str) -> None:
    node = LocalNode(tmp_path / "home", adapter=PreparedTinyAdapter(trouble))
    try:
        node.wish(spec_of("r1", "a"))
        ready(node, "r1")
        assert notes_of(node, "r1") == []
        assert parent_of(template_of(node, "r1")) == os.getpid()
        assert said in (node.home.logs / "template.log").read_text()
    finally:
        node.close()


def test_killed_branch_costs_a_launch_what_was_read_and_no_more(prepared_node: LocalNode) -> None:
    node = prepared_node
    node.wish(spec_of("r1", "a"))
    ready(node, "r1")
    branch = template_of(node, "r1")
    trunk = parent_of(branch)
    os.kill(branch, signal.SIGKILL)
    wait_for(lambda: processes.read_stat(branch) is None, "the branch is gone")
    node.wish(spec_of("r1", "a"), spec_of("r2", "a"))
    ready(node, "r2")
    assert template_of(node, "r2") == trunk
    assert processes.read_stat(shim_of(node, "r1")) is not None


def test_branch_ends_with_the_agent_and_its_replicas_do_not(prepared_node: LocalNode) -> None:
    node = prepared_node
    node.wish(spec_of("r1", "a"))
    engine, branch = ready(node, "r1"), template_of(node, "r1")
    trunk = parent_of(branch)
    node.runner.close()
    assert (processes.read_stat(branch), processes.read_stat(trunk)) == (None, None)
    node.begin()
    assert ready(node, "r1", attempt=1) == engine


def test_branch_ends_when_its_model_is_not_wanted_any_more(prepared_node: LocalNode) -> None:
    node = prepared_node
    node.wish(spec_of("r1", "a"), spec_of("r2", "b"))
    branches = {name: template_of(node, name) for name in ("r1", "r2") if ready(node, name)}
    node.runner.rest(("tiny", "b"), now=1e12)
    assert processes.read_stat(branches["r1"]) is None
    assert processes.read_stat(branches["r2"]) is not None
    assert processes.read_stat(shim_of(node, "r1")) is not None
