"""Pytest plugin: a real Postgres for the run and a real Valkey for each process of it.

Loaded with `-p tests.real_stores`, because Django reads the addresses before any conftest is.
Addresses given from outside (`EXAOPS_TEST_DATABASE_URL`) are used as they are.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from exaserve_ops.adapters import stores
from exaserve_ops.adapters.fleet_files import open_fleet_files
from tests.fakes.valkey import Valkey

_START_SECONDS = 60.0
_running = ExitStack()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests() -> Iterator[None]:
    """Start the stores before Django's settings are imported."""
    is_xdist_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not is_xdist_worker:
        os.environ["DATABASE_URL"] = os.environ.get("EXAOPS_TEST_DATABASE_URL") or _start_postgres()
        os.environ.setdefault("EXAOPS_FLEET_SECRET", secrets.token_hex(32))
        os.environ.setdefault("EXAOPS_ALLOW_LOCAL_ADDRESSES", "on")
    os.environ["REDIS_URL"] = _start_valkey()
    return (yield)


def pytest_unconfigure() -> None:
    """Stop what this process started."""
    _running.close()


def _start_postgres() -> str:
    folder = Path(tempfile.mkdtemp(prefix="exaops-test-"))
    _running.callback(shutil.rmtree, folder, ignore_errors=True)
    files = open_fleet_files(folder / "var")
    _running.callback(shutil.rmtree, files.runtime, ignore_errors=True)
    site = stores.prepare_postgres(files)
    # Nothing here outlives the run: durability would only slow it down.
    command = (*site.command(), "-c", "fsync=off", "-c", "full_page_writes=off")
    log = _running.enter_context((folder / "postgres.log").open("wb"))
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    _running.callback(process.wait)
    _running.callback(process.send_signal, signal.SIGINT)  # ends sessions too, unlike SIGTERM
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            stores.create_database(files, site)
        except stores.StoreNotReadyError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.05)
            continue
        owner = stores.POSTGRES_OWNER
        return site.url(files.secret("postgres_owner_password"), user=owner, database=owner)


def _start_valkey() -> str:
    server = Valkey(Path(_running.enter_context(tempfile.TemporaryDirectory(prefix="exaops-vk-"))))
    _running.callback(server.close)
    server.start()
    return server.url
