"""Where the all-in-one fleet keeps what it must find again: secrets, ports, sockets, its owner."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
SOCKET_PATH_MAX_BYTES = 107
"""Linux: `sun_path` has 108 bytes, with the closing zero."""

_LONGEST_SOCKET_NAME = "postgres/.s.PGSQL.5432"
_PORT_RANGE = range(20_000, 30_000)
"""Below the ephemeral range: no outgoing connection takes a port while its owner restarts."""
_PORT_TRIES = 200


class FleetFilesError(Exception):
    """The fleet's folder cannot be used; the message says why and what to do."""


class AlreadyRunningError(FleetFilesError):
    """Another `up` holds this folder."""


@dataclass(frozen=True, slots=True)
class FleetFiles:
    """Folders of one fleet on this machine.

    `var` holds all data and may lie at any depth. `runtime` holds only sockets: its path is short,
    because the path of a Unix socket is limited to 107 bytes, and it may vanish at a reboot.
    """

    var: Path
    runtime: Path

    @property
    def fleet_id(self) -> str:
        """Label in the environment of every process of this fleet."""
        return _short_digest(self.var)

    @property
    def logs(self) -> Path:
        """Folder of the log files, one for each program."""
        return self.var / "logs"

    @property
    def summary(self) -> Path:
        """What a script needs to use the running fleet, as JSON; exists while it is up."""
        return self.var / "up.json"

    def node_home(self, name: str) -> Path:
        """Home folder of the agent of one node."""
        return self.var / "nodes" / name

    def node_ids(self) -> frozenset[str]:
        """Identities of the nodes whose agents have a home here."""
        homes = (self.var / "nodes").glob("*/identity.json")
        return frozenset(
            str(content["node_id"])
            for home in homes
            if "node_id" in (content := self.read_json(str(home.relative_to(self.var))))
        )

    def secret(self, name: str, *, random_bytes: int = 24) -> str:
        """Return a secret of this fleet, made at random (hexadecimal) at its first use."""
        path = self.secret_path(name)
        if not path.exists():
            write_private(path, secrets.token_hex(random_bytes))
        return path.read_text().strip()

    def secret_path(self, name: str) -> Path:
        """File (0600) that a secret is kept in."""
        return self.var / "secrets" / name

    def read_json(self, name: str) -> dict[str, Any]:
        """Return what a state file says; empty if it does not exist or was cut short."""
        try:
            content = json.loads((self.var / name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return content if isinstance(content, dict) else {}

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Replace a state file as a whole."""
        write_private(self.var / name, json.dumps(content, indent=2) + "\n")


def open_fleet_files(var: Path) -> FleetFiles:
    """Make the folders of a fleet, private to its user. Raises `FleetFilesError`."""
    var = var.absolute()
    try:
        for name in ("", "secrets", "logs", "nodes", "models", "compiled"):
            (var / name).mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        var.chmod(PRIVATE_FOLDER)
    except OSError as error:
        raise FleetFilesError(f"cannot use {var}: {error.strerror}") from error
    return FleetFiles(var, _runtime_folder(var))


def remove_runtime(files: FleetFiles) -> None:
    """Remove the sockets of a fleet that has stopped; the next start makes them anew."""
    shutil.rmtree(files.runtime, ignore_errors=True)


def write_private(path: Path, text: str) -> None:
    """Replace a file as a whole; at no time may another user read it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def lock_fleet(files: FleetFiles) -> IO[str]:
    """Claim the fleet for as long as the returned file stays open.

    The kernel lets go of the claim however this process ends. Raises `AlreadyRunningError`.
    """
    file = (files.var / "up.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise AlreadyRunningError(
            f"this fleet is already up, run by process {owner} (folder {files.var}). Stop that one"
            " with Ctrl-C, or give this one a folder of its own with EXAOPS_VAR_DIR."
        ) from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file


def choose_port(files: FleetFiles, name: str, *, wanted: str = "") -> int:
    """Return a free loopback port: the one asked for, else the last one used, else any.

    Raises `FleetFilesError` if `wanted` is no port or is taken.
    """
    if wanted:
        return _checked_port(name, wanted)
    kept = files.read_json("ports.json")
    last = kept.get(name)
    port = last if isinstance(last, int) and is_port_free(last) else _any_free_port()
    files.write_json("ports.json", kept | {name: port})
    return port


def is_port_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: what an earlier run left in TIME_WAIT does not make a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _checked_port(name: str, text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65_536:  # noqa: PLR2004 - ports have 16 bits
        raise FleetFilesError(f"the port for {name} is '{text}'; give a number from 1 to 65535")
    if not is_port_free(int(text)):
        raise FleetFilesError(f"port {text}, asked for as the port for {name}, is taken")
    return int(text)


def _any_free_port() -> int:
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORT_RANGE)
        if is_port_free(port):
            return port
    raise FleetFilesError(f"no free port found in {_PORT_RANGE.start}-{_PORT_RANGE.stop - 1}")


def _runtime_folder(var: Path) -> Path:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")  # noqa: S108 - made private below
    if not (base.is_dir() and os.access(base, os.W_OK) and _fits(base / "exaops-0123456789ab")):
        base = Path("/tmp")  # noqa: S108 - made private below
    folder = base / f"exaops-{_short_digest(var)}"
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise FleetFilesError(f"{folder} belongs to somebody else; remove it, or set XDG_RUNTIME_DIR")
    folder.chmod(PRIVATE_FOLDER)
    return folder


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder / _LONGEST_SOCKET_NAME)) <= SOCKET_PATH_MAX_BYTES


def _short_digest(var: Path) -> str:
    text = f"{os.geteuid()}:{var}".encode()
    return hashlib.sha256(text).hexdigest()[:12]
