"""The stages of the start, in order. Each waits until what it started can be used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from exaserve_ops.management.allinone import programs, readiness
from exaserve_ops.management.allinone.console import StartError
from exaserve_ops.management.allinone.errands import Errand, run_errand
from exaserve_ops.management.allinone.fleet import INFERENCE_KEY, Fleet
from exaserve_ops.management.allinone.rest import RestClient

_MODEL_FOLDER = "demo-llama"
_STORE_SECONDS = 120
_TAIL_BYTES = 8192
_TAIL_LINES = 12
_ERRAND_SECONDS = 300
_DEMO_BLOCKS = 192
"""KV blocks of a demo replica: 3,072 tokens, so that a few chats are seen to fill it."""
_SERVICE_SECONDS = 120
_REPLICA_SECONDS = 600


def bring_up(fleet: Fleet) -> None:
    """Start everything and wait until a client would be answered.

    Raises `StartError`, `StoreError` or `InterruptedStartError`; what was started is left running.
    """
    _start_stores(fleet)
    with contextlib.ExitStack() as errands:
        model = errands.enter_context(_model_errand(fleet)) if fleet.shape.with_demo else None
        _run(fleet, "database schema", ("manage.py", "migrate_once"), limit_seconds=_ERRAND_SECONDS)
        _start_control_plane(fleet)
        if model is not None:
            _wait_for_errand(fleet, "demo model", model, told="made")
    _run(fleet, "accounts, keys, model", _provision_arguments(fleet), limit_seconds=_ERRAND_SECONDS)
    _join_nodes(fleet)
    _start_agents(fleet)
    if fleet.shape.with_demo:
        _deploy_demo(fleet)
    if fleet.shape.with_demo and _wait_for_replicas(fleet) > 0:
        _wait_for_answer(fleet)
    if fleet.shape.with_load:
        _start(fleet, "background load", (programs.LOAD,), lambda: "", limit_seconds=_SERVICE_SECONDS)


def model_folder(fleet: Fleet) -> Path:
    """Folder of the demo model."""
    return fleet.files.var / "models" / _MODEL_FOLDER


def api(fleet: Fleet) -> RestClient:
    """Return a client of the REST API with the rights of the administrator."""
    return RestClient(fleet.addresses.web_url, fleet.files.secret_path(INFERENCE_KEY).read_text().strip())


# ------------------------------------------------------------------------------------------------
# Stages
# ------------------------------------------------------------------------------------------------
def _start_stores(fleet: Fleet) -> None:
    embedded = fleet.postgres is not None
    _start(
        fleet,
        "Postgres" if embedded else "Postgres (DATABASE_URL)",
        (programs.POSTGRES,) if embedded else (),
        lambda: readiness.database_missing(fleet),
        limit_seconds=_STORE_SECONDS,
    )
    embedded = fleet.valkey is not None
    _start(
        fleet,
        "Valkey" if embedded else "Redis (REDIS_URL)",
        (programs.VALKEY,) if embedded else (),
        lambda: readiness.redis_missing(fleet),
        limit_seconds=_STORE_SECONDS,
    )


def _start_control_plane(fleet: Fleet) -> None:
    web = RestClient(fleet.addresses.web_url)
    gateway = RestClient(fleet.addresses.gateway_url)
    # All at once: each spends most of its start importing, and the cores are there to be used.
    for name in (programs.WEB, programs.GATEWAY, programs.CONTROLLERS):
        fleet.supervisor.start(name)
    _start(fleet, "web", (programs.WEB,), lambda: web.unreachable("/readyz"), limit_seconds=_SERVICE_SECONDS)
    _start(
        fleet,
        "gateway",
        (programs.GATEWAY,),
        lambda: gateway.unreachable("/v1/models"),
        limit_seconds=_SERVICE_SECONDS,
    )
    _start(
        fleet,
        "controllers, chores",
        (programs.CONTROLLERS, programs.CHORES, programs.BEAT),
        lambda: readiness.not_running(fleet, (programs.CONTROLLERS, programs.CHORES, programs.BEAT)),
        limit_seconds=_SERVICE_SECONDS,
    )


def _join_nodes(fleet: Fleet) -> None:
    for name in fleet.shape.node_names:
        token = fleet.files.secret_path(f"join-{name}")
        if not token.exists():
            continue
        arguments = (
            "-m", "workers.agent", "join",
            "--home", str(fleet.site.homes[name]),
            "--url", fleet.addresses.web_url,
            "--name", name,
            "--address", programs.LOOPBACK,
            "--token-file", str(token),
        )  # fmt: skip
        _run(fleet, f"{name} joins", arguments, limit_seconds=_SERVICE_SECONDS, secret=False, told="joined")
        token.unlink()


def _start_agents(fleet: Fleet) -> None:
    names = tuple(programs.agent_name(name) for name in fleet.shape.node_names)
    client = api(fleet)
    try:
        boots = readiness.known_boots(client)
    except (OSError, ValueError) as error:
        raise StartError(f"the API does not list the nodes: {error}") from error
    _start(
        fleet,
        "agents",
        names,
        lambda: readiness.silent_nodes(client, fleet.shape.node_names, old_boots=boots),
        limit_seconds=_SERVICE_SECONDS,
    )


def _deploy_demo(fleet: Fleet) -> None:
    """Ask for the demo once, now that every node is there to be spread over.

    Whoever scales or deletes it afterwards has the last word, also over the next start.
    """
    client = api(fleet)
    with fleet.console.stage("demo deployment") as stage:
        try:
            if client.get_all(f"/api/v1/deployments?name={readiness.DEMO}&ended=true"):
                stage.outcome = "kept as it is"
                return
            model = client.get_all(f"/api/v1/models?name={readiness.DEMO_MODEL}")[0]
            wish = {
                "name": readiness.DEMO,
                "model": model["id"],
                "served_name": readiness.DEMO,
                "engine": "torch",
                "engine_options": {"num_blocks": _DEMO_BLOCKS},
                "replicas": fleet.shape.replicas,
            }
            client.post("/api/v1/deployments", wish)
        except (OSError, ValueError, LookupError) as error:
            raise StartError(f"the demo cannot be deployed: {error}") from error
        stage.outcome = f"{fleet.shape.replicas} replicas asked for"


def _wait_for_replicas(fleet: Fleet) -> int:
    """Wait for the demo's replicas, and return how many: somebody may have asked for none."""
    client = api(fleet)
    with fleet.console.stage("replicas") as stage:
        look = readiness.Replicas(0, 0, "")

        def missing() -> str:
            nonlocal look
            look = readiness.look_at_replicas(client, fleet.shape.node_names)
            return look.missing

        fleet.console.wait_until_done(
            stage,
            missing,
            limit_seconds=_REPLICA_SECONDS,
            advice=f"See the replicas at {fleet.addresses.public_url}.",
        )
        stage.outcome = f"{look.ready} ready"
    return look.ready


def _wait_for_answer(fleet: Fleet) -> None:
    client = RestClient(fleet.addresses.gateway_url, api(fleet).token, timeout_seconds=60)
    with fleet.console.stage("first answer") as stage:
        fleet.console.wait_until_done(
            stage,
            lambda: readiness.answer_missing(client),
            limit_seconds=_SERVICE_SECONDS,
            advice=f"See {fleet.files.logs / 'gateway.log'}.",
        )


# ------------------------------------------------------------------------------------------------
# Starting and running
# ------------------------------------------------------------------------------------------------
def _start(
    fleet: Fleet,
    title: str,
    names: tuple[str, ...],
    missing: Callable[[], str],
    *,
    limit_seconds: float,
) -> None:
    with fleet.console.stage(title) as stage:
        for name in names:
            fleet.supervisor.start(name)
        try:
            fleet.console.wait_until_done(
                stage, missing, limit_seconds=limit_seconds, advice="The end of its log:"
            )
        except StartError as error:
            raise StartError("\n".join([str(error), *_log_ends(fleet, names)])) from error


def _log_ends(fleet: Fleet, names: tuple[str, ...]) -> list[str]:
    """Return the last lines that these programs wrote, each with its file."""
    lines = []
    for name in names:
        path = fleet.files.logs / f"{name}.log"
        if path.exists():
            lines += [f"  {path}", *(f"    {line}" for line in _tail(path))]
    return lines


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]


def _run(
    fleet: Fleet,
    title: str,
    arguments: tuple[str, ...],
    *,
    limit_seconds: float,
    secret: bool = True,
    told: str = "",
) -> None:
    """Run an errand to its end; `secret` lets it see the control plane's environment."""
    with run_errand(
        title,
        arguments,
        fleet_id=fleet.files.fleet_id,
        code=fleet.site.code,
        environment=fleet.environment if secret else {},
    ) as errand:
        _wait_for_errand(fleet, title, errand, limit_seconds=limit_seconds, told=told)


def _wait_for_errand(
    fleet: Fleet,
    title: str,
    errand: Errand,
    *,
    limit_seconds: float = _ERRAND_SECONDS,
    told: str = "",
) -> None:
    with fleet.console.stage(title) as stage:
        fleet.console.wait_until_done(stage, errand.missing, limit_seconds=limit_seconds, advice="Try again.")
        stage.outcome = told or errand.last_line()


def _model_errand(fleet: Fleet) -> contextlib.AbstractContextManager[Errand]:
    return run_errand(
        "demo model",
        ("-m", "workers.engines.demo_model", str(model_folder(fleet))),
        fleet_id=fleet.files.fleet_id,
        code=fleet.site.code,
        environment={},
    )


def _provision_arguments(fleet: Fleet) -> tuple[str, ...]:
    arguments = ["manage.py", "provision"]
    for name in fleet.shape.node_names:
        arguments += ["--node", f"{name}={_known_identity(fleet, name)}"]
    if fleet.shape.with_demo:
        arguments += ["--model", str(model_folder(fleet))]
    return tuple(arguments)


def _known_identity(fleet: Fleet, name: str) -> str:
    """Return the id under which a node has joined before; empty if it has not."""
    try:
        identity = json.loads((fleet.files.node_home(name) / "identity.json").read_text())
    except FileNotFoundError:
        return ""
    except json.JSONDecodeError as error:
        raise StartError(f"the identity of {name} is damaged: {error}") from error
    return str(identity["node_id"]) if identity.get("node_key") else ""
