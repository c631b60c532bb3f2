"""A whole fleet with vLLM and the built-in engine side by side, used as people use it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import Browser

from bench.fleet_run import FleetRun, leftovers, start_fleet, wait_until_up
from exaserve_ops.adapters.processes import ProcessIdentity, is_alive, read_environment_of
from tests.engines_live.operator import Operator
from tests.rollouts.talking import Load
from workers.engines.demo_model import make_demo_model

CODE = Path(__file__).resolve().parents[2]
START_SECONDS = 1500
"""Of one vLLM: half a minute on an idle machine, many times that on a busy one."""
LOOK_SECONDS = 0.5
FIRST, SECOND = "first", "second"
"""Models of one shape with weights of two seeds."""
BUILT_IN, VLLM = "built-in", "vllm"
"""Deployments, and the names they are served under."""
ENGINES = {BUILT_IN: "torch", VLLM: "vllm"}
VLLM_OPTIONS: dict[str, Any] = {
    "max_model_len": 4096,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 4,
    "prefix_caching_hash_algo": "sha256_cbor",
    "dtype": "float32",
    "kv_connector": "NixlConnector",
}
"""In float32 engines give the same tokens, but for what rounding makes of a tie."""
DRAIN_SECONDS = 600
SHORT: dict[str, Any] = {"turns": 6, "words": 8, "talkers": 2}
"""Conversations by few enough talkers for engines of one thread."""

Json = dict[str, Any]


@dataclass(frozen=True)
class EngineFleet:
    """A running fleet of two nodes, an operator at its pages, and a program that reads its API."""

    run: FleetRun
    api: httpx.Client
    operator: Operator

    # -- reading ----------------------------------------------------------------------------------------
    def get(self, path: str, **parameters: str | int) -> Any:
        """An answer of the API. Raises `httpx.HTTPError`."""
        return self.api.get(path, params=parameters).raise_for_status().json()

    def folder(self, model: str) -> Path:
        """Where its weights lie."""
        return self.run.var / "models" / model

    def named(self, kind: str, name: str) -> str:
        """Id of the deployment or model of that name."""
        return next(
            str(one["id"]) for one in self.get(f"/{kind}", page_size=500)["results"] if one["name"] == name
        )

    def replicas(self, deployment: str) -> list[Json]:
        """Those of a deployment that are meant to run."""
        return [row for row in self.running(deployment) if row["wanted"] == "run"]

    def replica(self, key: str) -> Json:
        """One replica."""
        found: Json = self.get(f"/replicas/{key}")
        return found

    def models_by_replica(self) -> dict[str, str]:
        """Name of the model of every replica that ever was."""
        rows = self.get("/replicas", page_size=500, ended="true")["results"]
        return {row["id"]: row["model_name"] for row in rows}

    def running(self, deployment: str) -> list[Json]:
        """Replicas that have not ended, wanted or not."""
        rows = self.get("/replicas", page_size=500)["results"]
        return [row for row in rows if row["deployment_name"] == deployment]

    def session(self, name: str, *, turns: int) -> Json:
        """The record of a conversation, once so many turns are on it."""
        found: list[Json] = []

        def recorded() -> bool:
            rows = self.get("/sessions", page_size=500)["results"]
            found[:] = [row for row in rows if row["session_id"] == name and row["turns"] >= turns]
            return bool(found)

        self.wait_until(recorded, f"{turns} turns of {name} are on record")
        return found[0]

    def move_of(self, session: int) -> Json:
        """The only move of a conversation, once it has ended."""
        found: list[Json] = []

        def ended() -> bool:
            found[:] = self.get("/relocations", session=session)["results"]
            return bool(found) and bool(found[0]["ended_at"])

        self.wait_until(ended, "its move ends")
        (move,) = found
        return move

    def end_of(self, path: str) -> Json:
        """A rollout or validation, once it has ended."""
        self.wait_until(lambda: self.get(path)["ended_at"], f"{path} ends", seconds=2 * START_SECONDS)
        found: Json = self.get(path)
        return found

    # -- talking ----------------------------------------------------------------------------------------
    def load(self, deployment: str, *, continues: bool = False) -> Load:
        """Conversations with a deployment that begin on entering."""
        summary = self.run.summary()
        return Load(
            summary["gateway_url"], summary["api_token"], model=deployment, continues=continues, **SHORT
        )

    def gateway(self) -> httpx.Client:
        """A client of the gateway, signed in."""
        summary = self.run.summary()
        headers = {"Authorization": f"Bearer {summary['api_token']}"}
        return httpx.Client(base_url=summary["gateway_url"], headers=headers, timeout=300)

    # -- waiting ----------------------------------------------------------------------------------------
    def wait_until(self, holds: Callable[[], object], what: str, *, seconds: float = 120) -> float:
        """Wait until something holds; returns how many seconds that took. Raises `FleetRunError`."""
        began = time.monotonic()

        def look() -> bool:
            with contextlib.suppress(httpx.TransportError):
                if holds():
                    return True
            time.sleep(LOOK_SECONDS)  # engines need the processor more than who looks at them
            return False

        self.run.wait_until(look, what, seconds=seconds)
        return time.monotonic() - began

    def have(self, deployment: str, replicas: int) -> float:
        """Have so many serve, scaling on the page where it takes that; returns the seconds until then."""
        if len(self.replicas(deployment)) != replicas:
            self.operator.scale(self.named("deployments", deployment), replicas)
        return self.wait_until(
            lambda: [state_of(one) for one in self.replicas(deployment)] == ["ready, reached"] * replicas,
            f"{replicas} replicas of {deployment} serve",
            seconds=START_SECONDS,
        )

    def until_routed(self, load: Load, replicas: set[str]) -> None:
        """Wait until each of these has answered."""
        self.wait_until(lambda: replicas <= load.replicas(), f"answers of {len(replicas)} replicas")

    # -- processes --------------------------------------------------------------------------------------
    def processes_of(self, replica: str) -> tuple[ProcessIdentity, ...]:
        """All that carry a replica's label: its shim, its engine, and what that has started."""
        found = (one.identity for one in leftovers(self.run.var) if one.is_replica)
        return tuple(one for one in found if read_environment_of(one.pid).get("EXAOPS_REPLICA_ID") == replica)

    def kill_core(self, replica: str) -> tuple[ProcessIdentity, ...]:
        """Send SIGKILL to vLLM's EngineCore alone; returns all processes of the replica as they were."""
        group = self.processes_of(replica)
        (core,) = [one for one in group if psutil.Process(one.pid).name().startswith("VLLM::EngineCor")]
        os.kill(core.pid, signal.SIGKILL)
        return group


@contextmanager
def engine_fleet(folder: Path, browser: Browser, vllm_python: Path) -> Iterator[EngineFleet]:
    """A fleet with nothing deployed; stopped on leaving, with no process left."""
    var = folder / "v"
    for name, seed in ((FIRST, 0), (SECOND, 7)):
        make_demo_model(var / "models" / name, seed=seed)
    tuning = {"EXAOPS_AGENT_VLLM_PYTHON": str(vllm_python)}
    run = start_fleet(CODE, var, "--nodes", "2", "--no-demo", environment=tuning)
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    try:
        wait_until_up(run)
        summary = run.summary()
        operator = Operator(context.new_page(), summary["web_url"], [])
        operator.sign_in(summary["admin_user"], summary["admin_password"])
        headers = {"Authorization": f"Bearer {summary['api_token']}"}
        with httpx.Client(base_url=summary["web_url"] + "/api/v1", headers=headers, timeout=60) as api:
            yield EngineFleet(run, api, operator)
        context.close()
        assert run.stop() == 0
        assert leftovers(var) == ()
        assert operator.complaints == []
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait(30)
        kill_all(run)


def state_of(replica: Json) -> str:
    """Its status, and whether gateways connect to it: until one has, it gets no requests."""
    return f"{replica['status']}, {replica['reach']}"


def kill_all(run: FleetRun) -> None:
    """End what is left of a fleet: its process manager first, which would start the others again.

    Valkey writes over its environment, where the label is, so programs are known by what `up` wrote, too.
    """
    with contextlib.suppress(OSError, ValueError):
        pids: dict[str, int] = run.summary()["pids"]
        for name in ("supervisord", *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[name], signal.SIGKILL)
    for process in leftovers(run.var):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.identity.pid, signal.SIGKILL)


def alive(group: tuple[ProcessIdentity, ...]) -> list[ProcessIdentity]:
    """Those of them that still run."""
    return [one for one in group if is_alive(one)]
