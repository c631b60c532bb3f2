"""The embedded stores under the real process manager, in the least friendly folder we could think of."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
import redis

from exaserve_ops.adapters import stores
from exaserve_ops.adapters.fleet_files import FleetFiles, open_fleet_files, remove_runtime
from exaserve_ops.adapters.processes import end_processes, find_labelled, identify, reap
from exaserve_ops.adapters.supervision import (
    Supervisor,
    control_socket,
    render_config,
    start_supervisord,
    write_config,
)
from exaserve_ops.management.allinone import programs

CODE = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 30


@dataclass(frozen=True)
class Stores:
    """Running stores, and how to reach them."""

    files: FleetFiles
    postgres: stores.PostgresSite
    supervisor: Supervisor
    database_url: str
    redis_url: str


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.05)


def answers(check: Callable[[], object]) -> bool:
    try:
        check()
    except stores.StoreNotReadyError:
        return False
    return True


def site_of(files: FleetFiles) -> programs.FleetSite:
    return programs.FleetSite(files.fleet_id, CODE, files.var, {}, files.secret_path("api_token"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    closed = tmp_path_factory.mktemp("closed")
    closed.chmod(0o700)
    deep = closed / ("a folder with 100% odd signs " + "x" * 60) / ("y" * 80)
    files = open_fleet_files(deep / "var")
    postgres = stores.prepare_postgres(files)
    valkey = stores.prepare_valkey(files)
    all_programs = programs.store_programs(site_of(files), postgres.command(), valkey.command())
    control = control_socket(files)
    config = write_config(files, render_config(all_programs, files, control, as_root=os.geteuid() == 0))
    manager = identify(start_supervisord(config, dict(os.environ)))
    assert manager is not None
    supervisor = Supervisor(control)
    try:
        wait_until(supervisor.is_answering, "supervisord")
        for program in all_programs:
            supervisor.start(program.name)
        wait_until(lambda: answers(lambda: stores.create_database(files, postgres)), "Postgres")
        redis_url = valkey.url(files.secret("valkey_password"))
        wait_until(lambda: answers(lambda: stores.check_redis(redis_url)), "Valkey")
        database_url = stores.create_database(files, postgres)
        yield Stores(files, postgres, supervisor, database_url, redis_url)
    finally:
        end_processes([manager], patience_seconds=DEADLINE_SECONDS)
        reap(manager.pid)
        end_processes(
            [found.identity for found in find_labelled(files.fleet_id)],
            stop_signal=signal.SIGKILL,
            patience_seconds=5,
        )
        remove_runtime(files)


def kill_program(running: Stores, name: str) -> int:
    """Kill a program the hard way and wait until another process has taken its place."""
    before = running.supervisor.statuses()[name].pid
    os.kill(before, signal.SIGKILL)

    def replaced() -> bool:
        return running.supervisor.statuses()[name].pid not in {0, before}

    wait_until(replaced, f"{name} to be restarted")
    return before


def test_killed_postgres_comes_back_with_its_data(running: Stores) -> None:
    with stores.connect(running.database_url) as connection:
        connection.execute("CREATE TABLE kept (what text)")
        connection.execute("INSERT INTO kept VALUES ('safe')")

    kill_program(running, programs.POSTGRES)

    wait_until(lambda: answers(lambda: stores.connect(running.database_url).close()), "Postgres")
    with stores.connect(running.database_url) as connection:
        assert connection.execute("SELECT what FROM kept").fetchall() == [("safe",)]


def test_killed_valkey_comes_back_with_its_data(running: Stores) -> None:
    with redis.Redis.from_url(running.redis_url) as client:
        client.set("kept", "safe")
        assert client.execute_command("WAITAOF", 1, 0, 5000)[0] == 1

    kill_program(running, programs.VALKEY)

    wait_until(lambda: answers(lambda: stores.check_redis(running.redis_url)), "Valkey")
    with redis.Redis.from_url(running.redis_url) as client:
        assert client.get("kept") == b"safe"


def test_strangers_on_this_machine_need_the_password(running: Stores) -> None:
    with pytest.raises(stores.StoreNotReadyError, match="password authentication failed"):
        stores.connect(running.postgres.url("guessed"))
    with pytest.raises(stores.StoreError, match="refuses the password"):
        stores.check_redis(f"unix://:guessed@{running.files.runtime / 'valkey.sock'}?db=0")


def test_product_can_neither_read_files_nor_make_roles_through_postgres(running: Stores) -> None:
    with stores.connect(running.database_url) as connection:
        for statement in ("SELECT pg_read_file('/etc/passwd')", "CREATE ROLE another"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)


def test_no_store_listens_on_the_network_or_shows_its_password(running: Stores) -> None:
    secrets = [file.read_text() for file in (running.files.var / "secrets").iterdir()]
    for status in running.supervisor.statuses().values():
        command_line = Path(f"/proc/{status.pid}/cmdline").read_text()
        assert not [secret for secret in secrets if secret in command_line]
        inodes = {str(fd.readlink()) for fd in Path(f"/proc/{status.pid}/fd").iterdir()}
        tables = (Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()).splitlines()
        listening = [line.split()[9] for line in tables if line.split()[3] == "0A"]
        assert not [inode for inode in listening if f"socket:[{inode}]" in inodes]


def test_redis_that_would_evict_is_refused_with_the_remedy(running: Stores) -> None:
    with redis.Redis.from_url(running.redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(stores.StoreError, match="CONFIG SET maxmemory-policy noeviction"):
                stores.check_redis(running.redis_url)
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_what_holds_secrets_is_private(running: Stores) -> None:
    private = [running.files.var / "supervisor.conf", running.files.var / "valkey.conf"]
    private += list((running.files.var / "secrets").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    for folder in (running.files.var, running.files.runtime, running.postgres.data):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_lock_of_a_running_postgres_is_left_alone(running: Stores) -> None:
    lock = running.postgres.data / "postmaster.pid"
    before = lock.read_text()
    stores.prepare_postgres(running.files)
    assert lock.read_text() == before


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FleetFiles]:
    files = open_fleet_files(tmp_path / "var")
    yield files
    remove_runtime(files)


def test_lock_whose_number_was_taken_over_does_not_block_postgres(files: FleetFiles) -> None:
    site = stores.prepare_postgres(files)
    lock = site.data / "postmaster.pid"
    lock.write_text(f"{os.getpid()}\n{site.data}\n")  # as after a restart of a container
    stores.prepare_postgres(files)
    assert not lock.exists()


def test_half_made_database_is_made_anew(files: FleetFiles) -> None:
    (files.var / "postgres.new").mkdir()
    (files.var / "postgres.new" / "PG_VERSION").write_text("18\n")
    site = stores.prepare_postgres(files)
    assert (site.data / "global" / "pg_control").exists()


def test_database_that_cannot_be_reached_is_not_ready_rather_than_broken(tmp_path: Path) -> None:
    with pytest.raises(stores.StoreNotReadyError):
        stores.connect(f"postgresql:///any?host={tmp_path}&user=any")
    with pytest.raises(stores.StoreNotReadyError):
        stores.check_redis(f"unix://{tmp_path / 'nobody.sock'}")


def test_one_of_many_migrates_and_the_others_wait_for_it(running: Stores) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DJANGO")},
        "DATABASE_URL": running.database_url,
        "REDIS_URL": running.redis_url,
        "EXAOPS_SECRET_KEY": "of this test",
        "EXAOPS_FLEET_SECRET": "ab" * 32,
        "EXAOPS_VAR_DIR": str(running.files.var),
    }
    command = [sys.executable, "manage.py", "migrate_once", "--timeout", "60"]
    started = [
        subprocess.Popen(
            command, cwd=CODE, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(3)
    ]  # fmt: skip
    said = [process.communicate(timeout=90)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert said.count("migrated") >= 1
    assert set(said) <= {"migrated", "up to date"}
    with stores.connect(running.database_url) as connection:
        applied = connection.execute("SELECT app, name, count(*) FROM django_migrations GROUP BY 1, 2")
        counts = [row[2] for row in applied.fetchall()]
    assert counts
    assert set(counts) == {1}


def test_process_is_known_by_its_start_and_not_by_its_number() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identify(process.pid)
        assert identity is not None
        process.kill()
        wait_until(lambda: identify(process.pid) is None, "the process to end")
    assert identify(os.getpid()) != identity
