"""What a stage of the start still waits for, in words; nothing once it is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from exaserve_ops.adapters import stores
from exaserve_ops.adapters.supervision import ProgramState
from exaserve_ops.management.allinone.fleet import Fleet
from exaserve_ops.management.allinone.rest import RestClient

DEMO = "demo"
"""Name of the demo deployment, and of the model that clients ask for."""
DEMO_MODEL = "demo-llama"


@dataclass(frozen=True, slots=True)
class Replicas:
    """How far the demo deployment has come."""

    wanted: int
    ready: int
    missing: str


def database_missing(fleet: Fleet) -> str:
    """Return why the database cannot be used yet; makes the embedded one at first use."""
    try:
        if fleet.postgres is not None:
            stores.create_database(fleet.files, fleet.postgres)
        stores.connect(fleet.addresses.database_url).close()
    except stores.StoreNotReadyError as error:
        return str(error)
    return ""


def redis_missing(fleet: Fleet) -> str:
    """Return why Redis does not answer yet. Raises `StoreError` if it never will do."""
    try:
        stores.check_redis(fleet.addresses.redis_url)
    except stores.StoreNotReadyError as error:
        return str(error)
    return ""


def not_running(fleet: Fleet, names: Iterable[str]) -> str:
    """Return which programs have not stayed up for long enough yet."""
    statuses = fleet.supervisor.statuses()
    return ", ".join(
        f"{name} {statuses[name].state.value.lower()}"
        for name in names
        if statuses[name].state is not ProgramState.RUNNING
    )


def silent_nodes(client: RestClient, names: tuple[str, ...]) -> str:
    """Return which nodes the control plane does not hear yet."""
    nodes = _ask(client, "/api/v1/nodes")
    if isinstance(nodes, str):
        return nodes
    alive = {node["name"] for node in nodes if node["liveness"] == "alive"}
    missing = [name for name in names if name not in alive]
    return f"no heartbeat yet of {', '.join(missing)}" if missing else ""


def look_at_replicas(client: RestClient) -> Replicas:
    """Return how many replicas of the demo are wanted and ready."""
    deployments = _ask(client, f"/api/v1/deployments?name={DEMO}")
    if isinstance(deployments, str):
        return Replicas(0, 0, deployments)
    wanted = sum(int(one["replicas"]) for one in deployments)
    ready = sum(int(one["ready_replicas"]) for one in deployments)
    failed = sum(int(one["failed_replicas"]) for one in deployments)
    told = f"{ready} of {wanted} ready" + (f", {failed} failed" if failed else "")
    return Replicas(wanted, ready, told if ready < wanted else "")


def answer_missing(client: RestClient) -> str:
    """Return why the gateway does not answer a chat yet."""
    request = {"model": DEMO, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    try:
        client.post("/v1/chat/completions", request)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _ask(client: RestClient, path: str) -> list[dict[str, Any]] | str:
    """Return the items, or why there are none."""
    try:
        return client.get_all(path)
    except (OSError, ValueError) as error:
        return str(error)
