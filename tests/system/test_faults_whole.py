"""Both stores stand still under the whole product while somebody chats: no restart, no refusal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.chat_client import ChatError
from bench.fleet_run import FleetRun, fleet_up, leftovers

pytestmark = [pytest.mark.system, pytest.mark.outage, pytest.mark.timeout(400)]

CODE = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FleetRun]:
    var = tmp_path / "var"
    with fleet_up(CODE, var) as fleet:
        yield fleet
    assert leftovers(var) == ()


class Chatter:
    """Asks one short question after another, each in one of a few sessions."""

    def __init__(self, run: FleetRun) -> None:
        self.failures: list[str] = []
        self.turns = 0
        self._client = run.chat()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._chat, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        self._leaving.set()
        self._thread.join(130)

    def _chat(self) -> None:
        while not self._leaving.wait(0.1):
            try:
                self._client.ask(
                    [{"role": "user", "content": "Hello"}], session_id=f"s{self.turns % 4}", max_tokens=2
                )
            except ChatError as error:
                self.failures.append(f"turn {self.turns}: {error}")
            self.turns += 1


def signal_all(pid: int, number: signal.Signals) -> None:
    """A program and all its children: Postgres has one for each connection."""
    program = psutil.Process(pid)
    for process in [*program.children(recursive=True), program]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a connection that ended meanwhile
            process.send_signal(number)


def attempts(run: FleetRun) -> Mapping[str, tuple[int, Any]]:
    return {one["id"]: (one["attempt"], one["pid"]) for one in run.replicas()}


def events(run: FleetRun, name: str) -> int:
    return len(run.get(f"/api/v1/events?event={name}&page_size=100")["results"])


@pytest.mark.parametrize("stores", [("valkey",), ("postgres",), ("valkey", "postgres")], ids="+".join)
def test_stores_that_stand_still_cost_no_restart_and_no_answer(
    run: FleetRun, stay_away: Callable[[], None], stores: tuple[str, ...]
) -> None:
    before, pids = attempts(run), run.summary()["pids"]
    chatter = Chatter(run)
    run.wait_until(lambda: chatter.turns > 4, "the first turns", seconds=60)
    try:
        for store in stores:
            signal_all(pids[store], signal.SIGSTOP)
        stay_away()
        turns = chatter.turns
        run.wait_until(lambda: chatter.turns > turns + 8, "chats meanwhile", seconds=60)
    finally:
        for store in stores:
            signal_all(pids[store], signal.SIGCONT)
    run.wait_until(
        lambda: {node["liveness"] for node in run.get("/api/v1/nodes")["results"]} == {"alive"},
        "all nodes to be alive",
        seconds=60,
    )
    run.wait_until(
        lambda: run.get("/api/v1/incidents?status=open")["count"] == 0, "no open incident", seconds=60
    )
    chatter.leave()
    assert chatter.failures == []
    assert events(run, "lost") == 0
    assert attempts(run) == before, "no replica was started again"
    assert run.summary()["pids"] == pids, "no program was started again"
    assert events(run, "leader_changed") == 1
