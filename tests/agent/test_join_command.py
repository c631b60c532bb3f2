"""Joining, against a real HTTP server that answers as the control plane does."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.agent.allocation import NoTaskError, task_of
from workers.agent.home import Home

TOKEN = "one-time-token-1234567890"


class ControlPlane(http.server.ThreadingHTTPServer):
    """Accepts the token once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), JoinEndpoint)
        self.seen: list[dict[str, object]] = []
        self.busy = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class JoinEndpoint(http.server.BaseHTTPRequestHandler):
    server: ControlPlane

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.busy > 0:
            self.server.busy -= 1
            self._answer(503, {"error": {"code": "unavailable", "message": "the database is away"}})
            return
        if self.path != "/api/v1/agent/join" or body["token"] != TOKEN or self.server.seen:
            self._answer(401, {"detail": "the token is used up or expired"})
            return
        self.server.seen.append(body)
        self._answer(
            201,
            {
                "node_id": body["node_id"],
                "name": "gpu01-2",
                "node_key": "ab" * 32,
                "key_epoch": 1,
                "redis_url": "redis://127.0.0.1:6379/0",
                "a_field_of_later": True,
            },
        )

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def control() -> Iterator[ControlPlane]:
    server = ControlPlane()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def agent(*arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workers.agent", *arguments],
        env=os.environ | {"EXAOPS_JOIN_TOKEN": token},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_join_keeps_the_key_closed_and_uses_the_name_it_was_given(
    control: ControlPlane, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    made = home.ensure_identity()
    done = agent(
        "join", "--home", str(home.root), "--url", control.url, "--name", "gpu01", "--address", "::1"
    )
    assert done.returncode == 0, done.stderr
    identity = home.load_identity()
    assert (identity.node_id, identity.name, identity.address) == (made.node_id, "gpu01-2", "::1")
    assert identity.key == b"\xab" * 32
    assert home.identity_file.stat().st_mode & 0o777 == 0o600
    (asked,) = control.seen
    assert (asked["name"], asked["major"]) == ("gpu01", 1)
    for secret in (TOKEN, "ab" * 32):
        assert secret not in done.stdout + done.stderr


def test_used_token_is_refused_with_the_servers_words_and_the_id_stays(
    control: ControlPlane, tmp_path: Path
) -> None:
    control.seen.append({})
    home = Home(tmp_path / "home")
    done = agent("join", "--home", str(home.root), "--url", control.url)
    assert done.returncode == 1
    assert "401: the token is used up or expired" in done.stderr
    assert TOKEN not in done.stderr
    assert not home.load_identity().joined


def test_server_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    done = agent("join", "--home", str(tmp_path / "home"), "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "cannot reach http://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_before_join_says_what_to_do(tmp_path: Path) -> None:
    done = agent("run", "--home", str(tmp_path / "home"))
    assert done.returncode == 1
    assert "join first" in done.stderr


def launched(**variables: str) -> dict[str, str]:
    """The environment of a task of `srun`."""
    return {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "gpu07.cluster"} | variables


def test_each_task_of_an_allocation_has_a_home_and_a_name_of_its_own() -> None:
    task = task_of(launched())
    assert (task.label, task.rank, task.name("exp"), task.home(Path("/s"))) == (
        "gpu07-1",
        5,
        "exp-gpu07-1",
        Path("/s/gpu07-1"),
    )
    assert task_of(launched(SLURM_LOCALID="0")).label == "gpu07"
    open_mpi = {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert task_of(open_mpi, host="n_1.x").label == "n_1-3"
    assert task_of({"PMI_RANK": "2"}, host="n1").label == "n1"
    with pytest.raises(NoTaskError, match="needs a launcher"):
        task_of({"SLURM_JOB_ID": "1"})


def test_join_under_a_launcher_goes_to_the_home_of_its_task(control: ControlPlane, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "workers.agent", "join", "--per-task", "--name-suffix"),
            *("--home", str(tmp_path / "homes"), "--url", control.url),
        ],
        env=os.environ | launched() | {"EXAOPS_JOIN_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert Home(tmp_path / "homes" / "gpu07-1").load_identity().joined
    (asked,) = control.seen
    assert (asked["name"], asked["name_suffix"]) == ("gpu07-1", True)


def test_per_task_without_a_launcher_says_what_is_missing(tmp_path: Path) -> None:
    done = agent("status", "--per-task", "--home", str(tmp_path / "home"))
    assert done.returncode == 2
    assert "--per-task needs a launcher" in done.stderr


def test_busy_control_plane_is_asked_again_and_a_refusal_is_not(
    control: ControlPlane, tmp_path: Path
) -> None:
    control.busy = 2
    home = Home(tmp_path / "home")
    done = agent("join", "--home", str(home.root), "--url", control.url, "--wait-seconds", "20")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("event=join_again") == 2
    refused = agent("join", "--home", str(tmp_path / "b"), "--url", control.url, "--wait-seconds", "20")
    assert refused.returncode == 1
    assert "event=join_again" not in refused.stderr


def test_up_joins_once_and_runs(control: ControlPlane, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    arguments = (
        "up",
        "--home",
        str(home.root),
        "--join-url",
        control.url,
        "--config",
        str(tmp_path / "none"),
    )
    for _ in range(2):
        done = agent(*arguments)
        # Running ends at once for want of the settings file: by then it has joined.
        assert done.returncode == 2, done.stderr
        assert "none" in done.stderr
        assert home.load_identity().joined
    assert len(control.seen) == 1
