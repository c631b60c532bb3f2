"""What a node's agent lets others see: no port, closed files, and no secret where one could be read."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from exaserve_ops.adapters.store_users import RedisStoreUsers
from tests.fakes.node import Node, make_home, make_spec, wait_for
from tests.fakes.valkey import running_valkey
from workers.protocol import digests, store_user, v1
from workers.protocol.observed import ObservedState

TCP_LISTEN = "0A"
NODE_SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
HF_TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """An agent that was started out of an environment with secrets, as people's shells have them."""
    with running_valkey(tmp_path) as valkey:
        home = make_home(tmp_path / "home", valkey.url)
        identity = home.load_identity()
        RedisStoreUsers(valkey.client()).admit(identity.node_id, identity.key)
        url = store_user.url_for(valkey.url, identity.node_id, identity.key)
        home.save_identity(msgspec.structs.replace(identity, redis_url=url))
        node = Node(home, valkey, dict.fromkeys(NODE_SECRETS, HF_TOKEN))
        node.start()
        try:
            node.wish(make_spec("r1"))
            node.wait_state("r1", ObservedState.READY)
            yield node
        finally:
            node.close()


def below(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [one for child in (task / "children").read_text().split() for one in below(int(child))]
    return found


def listening_inodes() -> set[str]:
    lines = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {fields[9] for fields in lines if fields[3] == TCP_LISTEN}


def sockets_of(pid: int) -> set[str]:
    return {
        target.removeprefix("socket:[").removesuffix("]")
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if (target := str(link.readlink())).startswith("socket:[")
    }


def test_agent_and_intake_listen_on_no_port_and_the_engine_on_one(node: Node) -> None:
    assert node.process is not None
    engine = node.wait_state("r1", ObservedState.READY).pid
    assert engine is not None
    listening = listening_inodes()
    own = [pid for pid in below(node.process.pid) if pid != engine]
    assert len(own) >= 2, "the agent and its intake"
    assert {pid: sockets_of(pid) & listening for pid in own} == {pid: set() for pid in own}
    assert len(sockets_of(engine) & listening) == 1


def test_all_files_of_the_agent_are_closed_to_others(node: Node) -> None:
    root = node.home.root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for path in (root / "identity.json", node.home.intake_socket, node.home.run / "link.json"):
        wait_for(path.exists, str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for log in node.home.logs.rglob("*.log"):
        assert stat.S_IMODE(log.stat().st_mode) == 0o600, log


def test_no_secret_of_the_node_stands_in_a_file_a_command_line_or_a_report(node: Node) -> None:
    assert node.process is not None
    identity = node.identity
    secrets = [identity.node_key, digests.store_password(identity.key), HF_TOKEN]
    secrets.append(digests.engine_api_key(identity.key, "r1", 1))
    engine = node.wait_state("r1", ObservedState.READY).pid
    assert engine is not None
    for pid in {*below(node.process.pid), engine}:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert not [one for one in secrets if one in line], line
    environment = Path(f"/proc/{engine}/environ").read_bytes().decode()
    assert secrets[-1] in environment, "how an engine of ours learns its key"
    assert not [one for one in secrets[:-1] if one in environment], "an engine gets its own key and no other"
    os.kill(engine, signal.SIGKILL)  # for a report with a log tail
    node.wait_state("r1", ObservedState.READY, attempt=2)
    node.signal(signal.SIGTERM)
    said = repr([report for report in node.read() if not isinstance(report, v1.Hello)])
    assert not [one for one in secrets if one in said]
    told = node.home.logs / "r1"  # this engine says its own key on purpose, so that masking can be seen
    for path in node.home.root.rglob("*"):
        if path.is_file() and path != node.home.identity_file and told not in path.parents:
            text = path.read_bytes().decode(errors="replace")
            assert not [one for one in secrets if one in text], path
