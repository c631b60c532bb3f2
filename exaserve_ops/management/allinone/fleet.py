"""A fleet on this machine, made ready to start: its folders, stores, programs and addresses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from exaserve_ops.adapters import stores
from exaserve_ops.adapters.fleet_files import FleetFiles, choose_port
from exaserve_ops.adapters.processes import FLEET_VARIABLE, PROGRAM_VARIABLE, identify
from exaserve_ops.adapters.supervision import (
    Program,
    Supervisor,
    control_socket,
    render_config,
    start_supervisord,
    write_config,
)
from exaserve_ops.management.allinone import programs
from exaserve_ops.management.allinone.console import Console, Interrupts
from exaserve_ops.management.allinone.errands import plain_environment

SUPERVISORD_STATE = "supervisord.json"
INFERENCE_KEY = "api_token"


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that the stages of the start and the stop need to know."""

    files: FleetFiles
    shape: programs.FleetShape
    site: programs.FleetSite
    addresses: programs.FleetAddresses
    environment: Mapping[str, str]
    """Of the control plane; holds secrets."""
    programs: tuple[Program, ...]
    postgres: stores.PostgresSite | None
    """`None` where `DATABASE_URL` names a Postgres that somebody else runs."""
    valkey: stores.ValkeySite | None
    supervisor: Supervisor
    console: Console
    interrupts: Interrupts


def assemble_fleet(
    files: FleetFiles,
    shape: programs.FleetShape,
    console: Console,
    interrupts: Interrupts,
    *,
    code: Path,
) -> Fleet:
    """Decide on addresses and programs, and write down what starts them. Starts nothing.

    Raises `StoreError`, `FleetFilesError` or `SupervisionError`.
    """
    postgres = None if os.environ.get("DATABASE_URL") else stores.prepare_postgres(files)
    valkey = None if os.environ.get("REDIS_URL") else stores.prepare_valkey(files)
    site = programs.FleetSite(
        fleet_id=files.fleet_id,
        code=code,
        var=files.var,
        homes={name: files.node_home(name) for name in shape.node_names},
        inference_key_file=files.secret_path(INFERENCE_KEY),
        tuning=dict(os.environ),
    )
    addresses = _addresses(files, postgres, valkey)
    secrets = programs.FleetSecrets(
        secret_key=files.secret("secret_key", random_bytes=48),
        fleet_secret=files.secret("fleet_secret", random_bytes=32),
    )
    environment = programs.control_environment(site, addresses, secrets)
    all_programs = (
        *programs.store_programs(
            site,
            postgres.command() if postgres else None,
            valkey.command() if valkey else None,
        ),
        *programs.control_programs(site, environment),
        programs.gateway_program(site, environment),
        *programs.agent_programs(site, shape),
        *((programs.load_program(site, addresses),) if shape.with_load else ()),
    )
    control = control_socket(files)
    text = render_config(all_programs, files, control, as_root=os.geteuid() == 0)
    write_config(files, text)
    return Fleet(
        files, shape, site, addresses, environment, all_programs, postgres, valkey,
        Supervisor(control), console, interrupts,
    )  # fmt: skip


def start_process_manager(fleet: Fleet) -> None:
    """Start supervisord, and note who it is, so that it is found for certain when it has to end."""
    label = {FLEET_VARIABLE: fleet.files.fleet_id, PROGRAM_VARIABLE: "supervisord"}
    pid = start_supervisord(fleet.files.var / "supervisor.conf", plain_environment() | label)
    identity = identify(pid)
    if identity is not None:
        fleet.files.write_json(SUPERVISORD_STATE, dataclasses.asdict(identity))
    with fleet.console.stage("process manager") as stage:
        fleet.console.wait_until_done(
            stage,
            lambda: "" if fleet.supervisor.is_answering() else "supervisord",
            limit_seconds=30,
            advice=f"See {fleet.files.logs / 'supervisord.log'}.",
        )


def _addresses(
    files: FleetFiles, postgres: stores.PostgresSite | None, valkey: stores.ValkeySite | None
) -> programs.FleetAddresses:
    given = os.environ
    addresses = programs.FleetAddresses(
        database_url=(
            postgres.url(files.secret("postgres_password")) if postgres else given.get("DATABASE_URL", "")
        ),
        redis_url=(valkey.url(files.secret("valkey_password")) if valkey else given.get("REDIS_URL", "")),
        web_port=choose_port(files, "web", wanted=given.get("EXAOPS_WEB_PORT", "")),
        gateway_port=choose_port(files, "gateway", wanted=given.get("EXAOPS_GATEWAY_PORT", "")),
        public_url="",
    )
    return replace(addresses, public_url=given.get("EXAOPS_PUBLIC_URL") or addresses.web_url)
