"""A machine on which an agent lives or is to live: each step over one SSH connection.

Every step looks first at what is there, so that any of them may run again after a break. Commands are
quoted, secrets travel in closed files or on standard input, and what the machine says is only text.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exaserve_ops.adapters import ssh_scripts as scripts
from exaserve_ops.adapters.agent_bundle import REQUIREMENTS, build_bundle, wheels_in
from exaserve_ops.adapters.ssh_connection import Connection, clean, fetch_host_key, open_connection
from exaserve_ops.adapters.ssh_shell import MIB, RemoteShell, SlowCommandError, free_bytes
from exaserve_ops.inventory.domain.installation import (
    FEWEST_FREE_PORTS,
    LARGEST_CLOCK_SKEW_SECONDS,
    Credentials,
    HostKey,
    StepFailedError,
    StepResult,
    Target,
    choose_python,
    read_pythons,
)

PYTHONS = ("python3.13", "python3.12", "python3.11", "python3", "python")
AGENT_PORTS = (41_000, 48_999)
DISK_BYTES = {True: 256 * MIB, False: 12 * 1024 * MIB}
"""Free space asked for: with packages already there, and with an own environment (torch is large)."""
ENVIRONMENT_SECONDS = 1800.0
_FOREIGN_FOLDER = 3
_NO_TOOL = 4

Log = Callable[[str], None]
Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """What every node is told, and what is sent to it."""

    control_url: str
    redis_url: str
    tree: Path
    wheelhouse: Path | None = None
    free_disk_bytes: int = 0
    """Free space asked for; 0: what experience says."""


class SshSites:
    """Opens sites. One for all threads: it keeps nothing but settings."""

    def __init__(self, settings: SiteSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock

    def fetch_host_key(self, target: Target) -> HostKey:
        """Return the key that the host offers. Raises `StepFailedError`."""
        return fetch_host_key(target.host, target.port, target.pins)

    @contextmanager
    def open(self, target: Target, credentials: Credentials, log: Log) -> Iterator[RemoteSite]:
        """Connect and sign in; `log` is called with text as it comes. Raises `StepFailedError`."""
        with open_connection(target, credentials) as connection:
            yield RemoteSite(connection, target, self._settings, self._clock, log)

    def version(self) -> str:
        """Version that would be installed now."""
        return build_bundle(self._settings.tree).version


class RemoteSite:
    """One machine, connected. `facts` holds what earlier steps, also of earlier runs, found out."""

    def __init__(
        self, connection: Connection, target: Target, settings: SiteSettings, clock: Clock, log: Log
    ) -> None:
        self._shell = RemoteShell(connection, log)
        self._target = target
        self._settings = settings
        self._clock = clock
        self._log = log
        self.facts: dict[str, str] = {}

    # -- preflight ---------------------------------------------------------------------------------
    def greet(self) -> StepResult:
        """Say which machine answered."""
        try:
            said = self._shell.script("uname -srm; hostname; id -un\n")
        except SlowCommandError as error:
            advice = "do the start-up files of the user's shell wait for something?"
            raise StepFailedError(f"signed in, but no command comes to its end there: {advice}") from error
        words = ", ".join(said.output.split("\n")[:3]).strip(", ")
        return StepResult(f"signed in as {self._target.user}: {words[:200]}")

    def find_python(self) -> StepResult:
        """Find an interpreter on which the agent runs."""
        given = self._target.python
        said = self._shell.script(scripts.FIND_PYTHON, *((given,) if given else PYTHONS))
        python = choose_python(read_pythons(said.output), named=given)
        version = ".".join(map(str, python.version))
        return StepResult(str(python), facts={"python": python.path, "python_version": version})

    def make_folder(self) -> StepResult:
        """Make the agent's folder, and look at how much room its disk has."""
        folder = self._target.folder
        said = self._shell.script(scripts.MAKE_FOLDER, folder)
        if said.status == _FOREIGN_FOLDER:
            raise StepFailedError(f"the folder {folder} holds files that are not ours: name another one")
        self._shell.must(said, f"the folder {folder} cannot be made")
        path, _, rest = said.output.strip().rpartition("\n")
        path = path.split("\n")[-1]
        free, needed = free_bytes(rest), self._disk_bytes()
        if free is None or not path.startswith("/"):
            raise StepFailedError(f"'df' says nothing that can be read: {said.complaint}")
        if free < needed:
            raise StepFailedError(
                f"the disk of {path} is too full: {_mib(free)} free, {_mib(needed)} needed. Make room, or "
                "name a folder on another disk"
            )
        return StepResult(f"{_mib(free)} free in {path}", facts={"folder": path})

    def find_accelerators(self) -> StepResult:
        """Say what the vendor's tool sees; a machine without any runs on its CPU."""
        said = self._shell.script(scripts.ACCELERATORS, seconds=60.0)
        if said.status == _NO_TOOL:
            return StepResult("none that a vendor's tool shows: replicas would run on the CPU", warning=True)
        if not said.succeeded:
            return StepResult(f"the vendor's tool fails: {said.complaint}", warning=True)
        lines = [line for line in said.output.splitlines() if line.strip()]
        return StepResult(f"{len(lines)}: {'; '.join(lines)[:300]}")

    def compare_clock(self) -> StepResult:
        """Compare the machine's clock with ours: for people only."""
        before = self._clock()
        said = self._shell.script("date +%s\n")
        after = self._clock()
        if not said.output.strip().isdigit():
            return StepResult("its clock cannot be read", warning=True)
        middle = before + (after - before) / 2
        skew = int(said.output) + 0.5 - middle.timestamp()
        if abs(skew) > LARGEST_CLOCK_SKEW_SECONDS:
            words = f"its clock is {skew:+.0f} s off: set it right, or times of its logs will mislead"
            return StepResult(words, warning=True)
        return StepResult(f"within {max(1.0, abs(skew)):.0f} s of ours")

    def probe_ports(self) -> StepResult:
        """See that replicas would find ports."""
        low, high = AGENT_PORTS
        free = int(self._probe("ports").get("free", 0))
        if free < FEWEST_FREE_PORTS:
            raise StepFailedError(
                f"only {free} free ports from {low} to {high}: replicas would find none. What listens there?"
            )
        return StepResult(f"enough are free from {low} to {high}")

    def probe_network(self, *, allow_http: bool) -> StepResult:
        """See that Redis and the control plane can be reached from there."""
        url = self._settings.control_url
        found = self._probe("network")
        redis_at = _place(self._settings.redis_url)
        if found.get("redis"):
            raise StepFailedError(
                f"Redis at {redis_at} cannot be reached from there ({clean(str(found['redis']))[:200]}): set "
                "EXAOPS_AGENT_REDIS_URL to an address that nodes reach, and open its port"
            )
        if found.get("control"):
            why = clean(str(found["control"]))[:200]
            raise StepFailedError(
                f"the control plane at {url} cannot be reached from there ({why}): set EXAOPS_PUBLIC_URL "
                "to an address that nodes reach"
            )
        if not allow_http and _is_open(url):
            raise StepFailedError(
                f"the node's key would cross the network in the clear ({url}): use https, or say in the form "
                "that the network is trusted"
            )
        return StepResult(f"Redis at {redis_at} and {url} answer")

    # -- install -----------------------------------------------------------------------------------
    def read_identity(self) -> tuple[str, bool]:
        """Return the id of the node whose agent lives there, empty for none, and whether it has joined."""
        path = posixpath.join(self._folder, "home", "identity.json")
        said = self._shell.snippet(self._fact("python"), scripts.READ_IDENTITY, path)
        found = self._shell.json(said)
        if found.get("damaged"):
            raise StepFailedError(f"{path} is damaged: remove it there, then try again")
        return str(found.get("node_id", ""))[:64], bool(found.get("joined"))

    def push_bundle(self) -> StepResult:
        """Copy the agent and, where there is a wheelhouse, its packages. What is there is not sent again."""
        bundle = build_bundle(self._settings.tree)
        version = bundle.version
        facts = {"version": version, "requirements": bundle.requirements_digest}
        sent = self._push_wheels() if not self._target.python else 0
        folder = posixpath.join(self._folder, "versions", version)
        if self._shell.exists(posixpath.join(folder, REQUIREMENTS)):
            there = f"version {version} is there already"
            return StepResult(f"{there}{_and_wheels(sent)}", facts=facts)
        archive = posixpath.join(self._folder, f"bundle-{version}.tar.gz")
        self._shell.put(archive, bundle.data)
        said = self._shell.script(scripts.UNPACK, self._folder, version, archive, seconds=120.0)
        self._shell.must(said, "the archive cannot be unpacked")
        return StepResult(
            f"version {version}, {len(bundle.data) // 1024} KiB{_and_wheels(sent)}", facts=facts
        )

    def make_environment(self) -> StepResult:
        """Make an environment with the agent's packages, or see that the given interpreter has them."""
        version = posixpath.join(self._folder, "versions", self._fact("version"))
        interpreter = self._target.python or self._own_environment(version)
        check = (
            f"cd {shlex.quote(version)} && exec {shlex.quote(interpreter)} -c 'import workers.agent.cli'\n"
        )
        said = self._shell.script(check, seconds=120.0)
        self._shell.must(said, f"{interpreter} lacks packages of the agent")
        self._shell.put(posixpath.join(version, "interpreter"), interpreter.encode())
        kind = "given, with its packages" if self._target.python else "its own environment"
        return StepResult(f"{interpreter}: {kind}", facts={"interpreter": interpreter})

    def switch(self, version: str) -> None:
        """Make a version the current one."""
        said = self._shell.script(scripts.SWITCH, self._folder, version)
        self._shell.must(said, f"version {version} cannot be made current")

    def join(self, token: str, *, name: str, address: str, allow_http: bool) -> None:
        """Have the agent trade the token for its key. The token is in a closed file for that long."""
        path = posixpath.join(self._folder, "join-token")
        self._shell.put(path, token.encode())
        arguments = ["--url", self._settings.control_url, "--home", posixpath.join(self._folder, "home")]
        arguments += ["--name", name, "--address", address, "--token-file", path]
        arguments += ["--insecure"] if allow_http else []
        said = self._shell.script(scripts.JOIN, self._folder, *arguments, seconds=60.0)
        self._shell.must(said, "joining failed")

    def start_service(self) -> StepResult:
        """Write what keeps the agent up, and start it anew."""
        kind = self._shell.script(scripts.CHOOSE_SERVICE).output.strip().split("\n")[-1]
        if kind not in {"system", "user", "process"}:
            kind = "process"
        folder, unit = self._folder, self._unit
        self._shell.put(posixpath.join(folder, "run-agent.sh"), scripts.run_script(folder).encode())
        self._shell.put(posixpath.join(folder, "supervise.sh"), scripts.supervise_script(folder).encode())
        text = scripts.systemd_unit(folder, user_unit=kind == "user")
        self._shell.put(posixpath.join(folder, unit), text.encode())
        self.facts["service"] = kind
        self.restart()
        words = {
            "system": f"the systemd unit {unit}",
            "user": f"the systemd unit {unit} of {self._target.user}",
            "process": "a restart loop of its own (no systemd runs there)",
        }
        return StepResult(f"kept up by {words[kind]}", facts={"service": kind})

    def restart(self) -> StepResult:
        """Stop the agent, whatever state it is in, and start it. Its replicas go on."""
        said = self._shell.script(
            scripts.START_SERVICE, self._folder, self._fact("service"), self._unit, seconds=90.0
        )
        self._shell.must(said, "the agent cannot be started")
        return StepResult("the agent was started anew; its replicas go on")

    def read_agent_log(self) -> str:
        """Last lines that the agent wrote, for a person who wonders why it does not report."""
        log = posixpath.join(self._folder, "agent.log")
        unit = shlex.quote(self._unit)
        journal = f"journalctl -n 20 --no-pager -u {unit}"
        return self._shell.script(f"tail -n 20 {shlex.quote(log)} || {journal}\n").output

    def uninstall(self) -> StepResult:
        """Stop agent and replicas, and remove the folder, if it is there and ours."""
        folder = self.facts.get("folder") or self._target.folder
        if not self._shell.exists(posixpath.join(folder, ".exaserve-agent")):
            return StepResult(f"nothing of ours is in {folder}")
        kind = self.facts.get("service") or "process"
        said = self._shell.script(scripts.UNINSTALL, folder, kind, self._unit, seconds=180.0)
        self._shell.must(said, "the agent cannot be uninstalled")
        return StepResult(f"agent and replicas stopped, {folder} removed")

    # -- parts -------------------------------------------------------------------------------------
    @property
    def _folder(self) -> str:
        return self._fact("folder")

    @property
    def _unit(self) -> str:
        return f"exaserve-agent-{self._target.installation_id[:8]}.service"

    def _fact(self, name: str) -> str:
        value = self.facts.get(name, "")
        if not value:
            raise StepFailedError(f"an earlier step has not found out the {name}: install again")
        return value

    def _disk_bytes(self) -> int:
        return self._settings.free_disk_bytes or DISK_BYTES[bool(self._target.python)]

    def _own_environment(self, version: str) -> str:
        name = f"{self._fact('requirements')}-py{self._fact('python_version')}"
        environment = posixpath.join(self._folder, "venvs", name)
        options = []
        if self._settings.wheelhouse is not None:
            options = ["--no-index", "--find-links", posixpath.join(self._folder, "wheelhouse")]
        requirements = posixpath.join(version, REQUIREMENTS)
        said = self._shell.script(
            scripts.MAKE_ENVIRONMENT,
            self._folder, self._fact("python"), environment, requirements, *options,
            seconds=ENVIRONMENT_SECONDS,
        )  # fmt: skip
        self._shell.must(said, "the environment cannot be made")
        return posixpath.join(environment, "bin", "python")

    def _push_wheels(self) -> int:
        wheels = wheels_in(self._settings.wheelhouse)
        if not wheels:
            return 0
        folder = posixpath.join(self._folder, "wheelhouse")
        self._shell.must(
            self._shell.script(f"umask 077; mkdir -p {shlex.quote(folder)}\n"), "no folder for wheels"
        )
        sent = 0
        for wheel in wheels:
            path = posixpath.join(folder, wheel.name)
            if self._shell.size(path) != wheel.stat().st_size:
                self._log(f"sending {wheel.name}, {wheel.stat().st_size // MIB} MiB\n")
                self._shell.put_file(path, wheel)
                sent += 1
        return sent

    def _probe(self, what: str) -> dict[str, Any]:
        parts = urlsplit(self._settings.redis_url)
        wish = {
            "what": what,
            "port_min": AGENT_PORTS[0],
            "port_max": AGENT_PORTS[1],
            "enough": FEWEST_FREE_PORTS,
            "bind": "",
            "redis_path": parts.path if parts.scheme == "unix" else "",
            "redis_host": parts.hostname or "",
            "redis_port": parts.port or 6379,
            "redis_tls": parts.scheme == "rediss",
            "control_url": self._settings.control_url,
        }
        python = self._fact("python")
        said = self._shell.snippet(python, scripts.PROBE_NETWORK, text=json.dumps(wish))
        return self._shell.json(said)


def _place(url: str) -> str:
    """Where a Redis address points to, without its password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"


def _is_open(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname not in {"127.0.0.1", "localhost", "::1"}


def _mib(count: int) -> str:
    return f"{count / (1024 * MIB):.1f} GiB" if count >= 1024 * MIB else f"{count / MIB:.1f} MiB"


def _and_wheels(sent: int) -> str:
    return f", {sent} wheels sent" if sent else ""
