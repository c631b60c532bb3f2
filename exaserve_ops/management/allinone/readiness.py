"""What a stage of the start still waits for, in words; nothing once it is over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exaserve_ops.adapters import stores
from exaserve_ops.adapters.processes import identify
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


def known_boots(client: RestClient) -> dict[str, str]:
    """Return the last known boot of each node's agent, by the node's name."""
    return {str(node["name"]): str(node["boot_id"]) for node in client.get_all("/api/v1/nodes")}


def silent_nodes(client: RestClient, names: Iterable[str], *, old_boots: Mapping[str, str]) -> str:
    """Return which nodes the control plane has not heard since their agents were started.

    After a quick restart it still believes what the last run's agents told it.
    """
    nodes = _ask(client, "/api/v1/nodes")
    if isinstance(nodes, str):
        return nodes
    heard = {
        str(node["name"])
        for node in nodes
        if node["liveness"] == "alive" and node["boot_id"] != old_boots.get(str(node["name"]), "")
    }
    missing = [name for name in names if name not in heard]
    return f"no heartbeat yet of {', '.join(missing)}" if missing else ""


def look_at_replicas(client: RestClient, own_nodes: Collection[str]) -> Replicas:
    """Return how many replicas of the demo are wanted and ready.

    A replica of a node on this machine also has to have a living process: its status may be the last
    run's until its agent's first report is in.
    """
    deployments = _ask(client, f"/api/v1/deployments?name={DEMO}")
    if isinstance(deployments, str):
        return Replicas(0, 0, deployments)
    wanted = sum(int(one["replicas"]) for one in deployments)
    ready = 0
    for deployment in deployments:
        replicas = _ask(client, f"/api/v1/replicas?status=ready&page_size=500&deployment={deployment['id']}")
        if isinstance(replicas, str):
            return Replicas(wanted, 0, replicas)
        ready += sum(_serves(replica, own_nodes) for replica in replicas)
    return Replicas(wanted, ready, f"{ready} of {wanted} ready" if ready < wanted else "")


def _serves(replica: Mapping[str, Any], own_nodes: Collection[str]) -> bool:
    return replica["node_name"] not in own_nodes or identify(int(replica["pid"] or 0)) is not None


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
