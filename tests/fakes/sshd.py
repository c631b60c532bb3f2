"""A real OpenSSH server on a loopback port, with keys and accounts of its own."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
SSH_KEYGEN = shutil.which("ssh-keygen") or "ssh-keygen"
OPENSSL = shutil.which("openssl") or "openssl"
IS_ROOT = os.geteuid() == 0
PASSWORD = "a password of the tests"
USER = getpass.getuser()
_START_SECONDS = 10.0

needs_sshd = "OpenSSH's sshd is not installed: apt-get install openssh-server"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SshServer:
    """One `sshd`. Everything it needs is below its folder; as root, in a mount namespace of its own."""

    def __init__(
        self, folder: Path, *, key_types: Sequence[str] = ("ed25519",), options: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.host = "127.0.0.1"
        self.options = list(options)
        self.prefix: tuple[str, ...] = ()
        self.user_key = folder / "user_key"
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._keygen("ed25519", self.user_key)
        authorized = folder / "authorized_keys"
        authorized.write_text(self.user_key.with_suffix(".pub").read_text())
        self.key_types: list[str] = []
        for kind in key_types:
            self.make_host_key(kind)

    # -- keys --------------------------------------------------------------------------------------
    def make_host_key(self, kind: str) -> None:
        """Make the host key of a type, in place of an earlier one; takes effect at the next start."""
        path = self.folder / f"host_{kind}"
        path.unlink(missing_ok=True)
        self._keygen(kind, path)
        if kind not in self.key_types:
            self.key_types.append(kind)

    def drop_host_key(self, kind: str) -> None:
        self.key_types.remove(kind)

    def fingerprint(self, kind: str = "ed25519") -> str:
        """As `ssh-keygen -l` prints it: what a person compares with."""
        said = subprocess.run(
            [SSH_KEYGEN, "-l", "-f", str(self.folder / f"host_{kind}.pub")],
            capture_output=True,
            text=True,
            check=True,
        )
        return said.stdout.split()[1]

    @property
    def private_key(self) -> str:
        return self.user_key.read_text()

    @staticmethod
    def _keygen(kind: str, path: Path, passphrase: str = "") -> None:
        subprocess.run([SSH_KEYGEN, "-q", "-t", kind, "-N", passphrase, "-f", str(path)], check=True)

    # -- the process -------------------------------------------------------------------------------
    def start(self) -> None:
        assert SSHD is not None
        config = self.folder / "sshd_config"
        config.write_text(self._config())
        if IS_ROOT:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        log = (self.folder / "sshd.log").open("ab")
        self.process = subprocess.Popen(
            [*self.prefix, *self._command(f"{SSHD} -D -e -f {shlex.quote(str(config))}")],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        log.close()
        self._wait_until_listening()

    def stop(self) -> None:
        """End the server and every connection to it."""
        if self.process is None:
            return
        children = _descendants(self.process.pid)
        for pid in (self.process.pid, *children):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        self.process = None

    def cut_connections(self) -> None:
        """Kill what serves connections; the server goes on listening."""
        assert self.process is not None
        for pid in _descendants(self.process.pid, named="sshd"):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _command(self, server: str) -> list[str]:
        if not IS_ROOT:
            return ["sh", "-c", f"exec {server}"]
        # An account with a password, an empty home and a plain shell, seen by this server only: what the
        # account of whoever runs the tests has in its start-up files is none of the tests' business.
        hashed = subprocess.run(
            [OPENSSL, "passwd", "-6", "-stdin"], input=PASSWORD, capture_output=True, text=True, check=True
        ).stdout.strip()
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        others = [
            line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")
        ]
        files = {
            "shadow": f"root:{hashed}:19000:0:99999:7:::\nsshd:*:19000::::::\n",
            "passwd": "\n".join([f"root:x:0:0::{home}:/bin/sh", *others]) + "\n",
        }
        binds = ""
        for name, text in files.items():
            path = self.folder / name
            path.write_text(text)
            path.chmod(0o600 if name == "shadow" else 0o644)
            binds += f"mount --bind {shlex.quote(str(path))} /etc/{name} && "
        return ["unshare", "--mount", "sh", "-c", f"{binds}exec {server}"]

    def _config(self) -> str:
        lines = [
            f"Port {self.port}",
            f"ListenAddress {self.host}",
            *(f"HostKey {self.folder}/host_{kind}" for kind in self.key_types),
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            f"PidFile {self.folder}/sshd.pid",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "UseDNS no",
            "PrintMotd no",
            "Subsystem sftp internal-sftp",
            *self.options,
        ]
        return "\n".join(lines) + "\n"

    def _wait_until_listening(self) -> None:
        assert self.process is not None
        if self.prefix:  # another network namespace: its log says when
            self._wait_for_log()
            return
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=1).close()
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise AssertionError((self.folder / "sshd.log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def _wait_for_log(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        log = self.folder / "sshd.log"
        while f"listening on {self.host} port {self.port}" not in log.read_text():
            if time.monotonic() > deadline:
                raise AssertionError(log.read_text())
            time.sleep(0.02)


def _descendants(pid: int, *, named: str = "") -> list[int]:
    """Pids below a process, of `sshd` only where asked: what a login started is left alone."""
    found: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    for child in map(int, children):
        found += _descendants(child, named=named)
        try:
            name = Path(f"/proc/{child}/comm").read_text().strip()
        except OSError:
            continue
        if not named or name.startswith(named):
            found.append(child)
    return found
