"""What the environment says, read once, typed and frozen. The unit is in every name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict

FLEET_SECRET_BYTES = 32


class EnvironmentSettingError(ValueError):
    """An environment variable is missing or malformed; the message says what to set."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Settings that differ from one installation to the next."""

    var_dir: Path
    database_url: str
    redis_url: str
    secret_key: str
    fleet_secret: bytes
    public_url: str
    agent_redis_url: str
    """The Redis address that joining nodes are given; `redis_url` where unset."""
    database_pool_max_connections: int
    compiled_folders: tuple[Path, ...] = ()
    """What engines compiled may be registered from below these, and from nowhere else."""
    wheelhouse: Path | None = None
    """Folder with wheels for nodes that have no package index; sent along over SSH."""
    ssh_max_connections: int = 4
    """Machines that agents are put on at the same time."""
    redis_node_users: bool = True
    """Whether each node gets a user of its own in Redis; otherwise all share one password."""
    allow_local_addresses: bool = False
    """Whether nodes may be reached by loopback or link-local addresses: all is on one machine."""
    ssh_free_disk_bytes: int = 0
    """Free space asked of such a machine; 0: what the agent is known to need."""
    session_seconds: int = 0
    """After its last turn a session is forgotten: as gateways are told. 0: their default."""
    moves_per_node: int = 2
    """Moves of sessions at once, from or to a node."""
    moves_per_fleet: int = 32
    move_bytes_per_second: int = 256 << 20
    """Of one move."""
    fleet_move_bytes_per_second: int = 4 << 30
    """Of all moves together, on average."""

    @property
    def private_folders(self) -> tuple[Path, ...]:
        """Folders of the product of which nothing may be registered, nor reach a node."""
        return (self.var_dir / "secrets",)

    @property
    def hosts(self) -> list[str]:
        """Host names that requests may carry, derived from the public address."""
        return [urlsplit(self.public_url).hostname or "localhost"]

    @property
    def origin(self) -> str:
        """Scheme, host and port that browsers send as `Origin`."""
        parts = urlsplit(self.public_url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def base_path(self) -> str:
        """Path that the product is served under: empty, or `/ops`, without a final slash."""
        return urlsplit(self.public_url).path.rstrip("/")

    @property
    def uses_tls(self) -> bool:
        """Whether people reach the product over HTTPS."""
        return urlsplit(self.public_url).scheme == "https"

    def database(self) -> dict[str, Any]:
        """Django's database entry, with a bounded pool and no connection kept per thread."""
        try:
            parts = conninfo_to_dict(self.database_url)
        except Exception as error:
            raise EnvironmentSettingError(f"DATABASE_URL is no Postgres address: {error}") from error
        known = {"dbname": "NAME", "user": "USER", "password": "PASSWORD"}
        entry: dict[str, Any] = {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": str(parts.pop("host", "") or ""),
            "PORT": str(parts.pop("port", "") or ""),
            "CONN_MAX_AGE": 0,
        }
        entry |= {name: str(parts.pop(key, "") or "") for key, name in known.items()}
        entry["OPTIONS"] = dict(parts) | {
            "pool": {"min_size": 1, "max_size": self.database_pool_max_connections, "timeout": 10}
        }
        return entry


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read and check the environment. Raises `EnvironmentSettingError`."""
    var_dir = Path(environ.get("EXAOPS_VAR_DIR", "var")).absolute()
    return Environment(
        var_dir=var_dir,
        database_url=environ.get("DATABASE_URL", ""),
        redis_url=environ.get("REDIS_URL", ""),
        secret_key=environ.get("EXAOPS_SECRET_KEY", ""),
        fleet_secret=_fleet_secret(environ.get("EXAOPS_FLEET_SECRET", "")),
        public_url=_public_url(environ.get("EXAOPS_PUBLIC_URL", "http://127.0.0.1:8000")),
        agent_redis_url=environ.get("EXAOPS_AGENT_REDIS_URL") or environ.get("REDIS_URL", ""),
        database_pool_max_connections=_count(environ, "EXAOPS_DATABASE_POOL_MAX_CONNECTIONS", 10),
        compiled_folders=_folders(environ, "EXAOPS_COMPILED_FOLDERS"),
        wheelhouse=_folder(environ, "EXAOPS_WHEELHOUSE"),
        ssh_max_connections=_count(environ, "EXAOPS_SSH_MAX_CONNECTIONS", 4),
        redis_node_users=_switch(environ, "EXAOPS_REDIS_NODE_USERS", default=True),
        allow_local_addresses=_switch(environ, "EXAOPS_ALLOW_LOCAL_ADDRESSES", default=False),
        ssh_free_disk_bytes=_count(environ, "EXAOPS_SSH_FREE_DISK_MIB", 0, least=0) << 20,
        session_seconds=_count(environ, "EXAOPS_GATEWAY_SESSION_SECONDS", 0, least=0),
        moves_per_node=_count(environ, "EXAOPS_MOVES_PER_NODE", 2, least=0),
        moves_per_fleet=_count(environ, "EXAOPS_MOVES_PER_FLEET", 32, least=0),
        move_bytes_per_second=_count(environ, "EXAOPS_MOVE_MIB_PER_SECOND", 256) << 20,
        fleet_move_bytes_per_second=_count(environ, "EXAOPS_FLEET_MOVE_MIB_PER_SECOND", 4096) << 20,
    )


def require(environment: Environment) -> Environment:
    """Return the environment if it can run the product. Raises `EnvironmentSettingError`."""
    needed = {
        "DATABASE_URL": environment.database_url,
        "REDIS_URL": environment.redis_url,
        "EXAOPS_SECRET_KEY": environment.secret_key,
        "EXAOPS_FLEET_SECRET": environment.fleet_secret,
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise EnvironmentSettingError(
            f"set {', '.join(missing)} (`make up` does so for a fleet on this machine)"
        )
    return environment


def _fleet_secret(text: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b"?"
    if secret and len(secret) != FLEET_SECRET_BYTES:
        raise EnvironmentSettingError(
            "EXAOPS_FLEET_SECRET must be 64 hexadecimal digits, such as `openssl rand -hex 32` prints"
        )
    return secret


def _public_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise EnvironmentSettingError(
            f"EXAOPS_PUBLIC_URL is '{text}'; give the address people use, such as https://ops.example"
        )
    return text.rstrip("/")


def _count(environ: Mapping[str, str], name: str, default: int, *, least: int = 1) -> int:
    text = environ.get(name, str(default))
    if not text.isdigit() or int(text) < least:
        raise EnvironmentSettingError(f"{name} is '{text}'; give a whole number of at least {least}")
    return int(text)


def _switch(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environ.get(name, "").lower()
    if text not in {"", "on", "off"}:
        raise EnvironmentSettingError(f"{name} is '{text}'; give on or off")
    return text == "on" if text else default


def _folder(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name, "")
    if text and not Path(text).is_dir():
        raise EnvironmentSettingError(f"{name} is '{text}'; give a folder that exists, or nothing")
    return Path(text).absolute() if text else None


def _folders(environ: Mapping[str, str], name: str) -> tuple[Path, ...]:
    """Absolute paths, parted as in PATH; they need not exist yet."""
    folders = tuple(Path(text) for text in environ.get(name, "").split(os.pathsep) if text)
    if not all(folder.is_absolute() for folder in folders):
        raise EnvironmentSettingError(f"{name}: give absolute paths of folders, with '{os.pathsep}' between")
    return folders
