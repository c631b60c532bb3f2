"""A simulated fleet on the real product: joins, is shown as simulated, answers chats, dies and comes back."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.chat_client import ChatClient
from bench.fleet_run import FleetRun, fleet_up, leftovers

pytestmark = [pytest.mark.system, pytest.mark.outage, pytest.mark.timeout(400)]

CODE = Path(__file__).resolve().parents[2]
NODES = 8
REPLICAS = 2
VICTIM = "sim-r01-n001"


class Simulation:
    """`manage.py simulate` in a fleet's folder, as a person runs it in a second terminal."""

    def __init__(self, run: FleetRun, *options: str) -> None:
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("EXAOPS_", "DJANGO_"))}
        for name in ("DATABASE_URL", "REDIS_URL"):
            environment.pop(name, None)
        command = ["manage.py", "simulate", "--nodes", str(NODES), "--replicas", str(REPLICAS)]
        with (run.var.parent / "simulate.output").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--racks", "4", *options],
                cwd=CODE,
                env=environment | {"EXAOPS_VAR_DIR": str(run.var)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetRun]:
    var = tmp_path_factory.mktemp("fleet") / "var"
    with fleet_up(CODE, var, "--no-demo", "--nodes", "0") as fleet:
        yield fleet
    assert leftovers(var) == ()


def nodes(run: FleetRun) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in run.get("/api/v1/nodes?page_size=100")["results"]}


def all_ready(run: FleetRun) -> bool:
    statuses = [replica["status"] for replica in run.replicas()]
    return len(statuses) == NODES * REPLICAS and set(statuses) == {"ready"}


def test_simulated_fleet_lives_dies_and_comes_back(run: FleetRun) -> None:
    simulation = Simulation(run)
    try:
        run.wait_until(lambda: all_ready(run), "all simulated replicas to be ready", seconds=120)
        shown = nodes(run)
        assert len(shown) == NODES
        assert all(node["simulated"] for node in shown.values())
        assert {node["rack"] for node in shown.values()} == {f"sim-rack-{n:02d}" for n in range(1, 5)}
        placed = [replica["node_name"] for replica in run.replicas()]
        assert {placed.count(name) for name in shown} == {REPLICAS}
        assert stat.S_IMODE((run.var / "simulated").stat().st_mode) == 0o700

        summary = run.summary()
        chat = ChatClient(summary["gateway_url"], summary["api_token"], "simulated-8b")
        turn = chat.ask([{"role": "user", "content": "Hello"}], max_tokens=8)
        assert turn.text.startswith("simulated words")
        assert turn.completion_tokens == 8
    finally:
        assert simulation.stop() == 0
    identities = {name: node["id"] for name, node in nodes(run).items()}

    # A second run is the same nodes again, one of which is off from the start for a while.
    again = Simulation(run, "--fault", f"node-death@0s+25s:nodes={VICTIM}")
    try:
        run.wait_until(
            lambda: (
                nodes(run)[VICTIM]["liveness"] == "dead"
                and sum(node["liveness"] == "alive" for node in nodes(run).values()) == NODES - 1
            ),
            "one node to be dead and the others alive",
            seconds=90,
        )
        assert {name: node["id"] for name, node in nodes(run).items()} == identities
        run.wait_until(
            lambda: nodes(run)[VICTIM]["liveness"] == "alive", "the dead node to be back", seconds=90
        )
    finally:
        assert again.stop() == 0


def ask(run: FleetRun, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    summary = run.summary()
    headers = {"Authorization": f"Bearer {summary['api_token']}"}
    answer = httpx.request(method, summary["web_url"] + path, json=body, headers=headers, timeout=20)
    assert answer.is_success, answer.text
    return dict(answer.json())


def test_slices_are_given_out_one_each_and_whole_cards_opened_under_load(run: FleetRun) -> None:
    simulation = Simulation(run, "--mig", "1:3g.40gb", "--no-deployment")
    try:
        run.wait_until(
            lambda: any(card["profile"] for card in nodes(run).get(VICTIM, {}).get("accelerators", ())),
            "the slices to be told",
            seconds=90,
        )
        [model] = run.get("/api/v1/models")["results"]
        trial = {
            "name": "trial", "model": model["id"], "replicas": 2, "engine": "simulated-node",
            "nodes": [VICTIM], "replica_memory_bytes": 10 << 30, "accelerator": "slice:3g.40gb",
        }  # fmt: skip
        made = ask(run, "POST", "/api/v1/deployments", trial)
        address = f"/api/v1/deployments/{made['id']}"

        def replicas() -> list[dict[str, Any]]:
            return list(run.get(f"/api/v1/replicas?deployment={made['id']}")["results"])

        def settled(statuses: set[str]) -> bool:
            return {replica["status"] for replica in replicas()} == statuses

        run.wait_until(lambda: settled({"ready", "pending"}), "one to have the slice", seconds=90)
        [waiting] = [replica for replica in replicas() if replica["status"] == "pending"]
        run.wait_until(
            lambda: "1 slice 3g.40gb in the fleet, taken" in {replica["reason"] for replica in replicas()},
            "the other one to say what it waits for",
            seconds=30,
        )
        ask(run, "PATCH", address, {"spill": True, "spill_reason": "launch day", "generation": 1})
        run.wait_until(lambda: settled({"ready"}), "the other one to have a whole card", seconds=90)
        node = run.get(f"/api/v1/nodes/{nodes(run)[VICTIM]['id']}")
        cards = {card["uuid"]: card for card in node["accelerators"]}
        users = {user["id"]: use["uuid"] for use in node["use"] for user in use["replicas"]}
        sorts = {replica["id"]: cards[users[replica["id"]]]["profile"] for replica in replicas()}
        assert sorted(sorts.values()) == ["", "3g.40gb"]
        assert sorts[waiting["id"]] == ""
        assert not any(cards[uuid]["split"] for uuid in users.values())
        ask(run, "DELETE", address)
        run.wait_until(lambda: not replicas(), "both to be gone", seconds=90)
    finally:
        assert simulation.stop() == 0


def test_second_simulation_without_a_fleet_says_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "simulate", "--nodes", "1"],
        cwd=CODE,
        env={"PATH": os.environ["PATH"], "EXAOPS_VAR_DIR": str(tmp_path / "var")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no fleet is up" in done.stderr
