"""Putting agents on machines over SSH: the life of an installation, its actions and their steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from exaserve_ops.lib.lifecycle import Lifecycle, table

NEW = "new"
CONFIRMING = "confirming"
QUEUED = "queued"
WORKING = "working"
INSTALLED = "installed"
FAILED = "failed"
REMOVED = "removed"
ABANDONED = "abandoned"

INSTALLATION = Lifecycle(
    name="installation",
    initial=NEW,
    statuses=(NEW, CONFIRMING, QUEUED, WORKING, INSTALLED, FAILED, REMOVED, ABANDONED),
    final=frozenset({REMOVED, ABANDONED}),
    transitions=table(
        [
            ("offered", [NEW], CONFIRMING),
            ("recognised", [NEW], QUEUED),
            ("confirmed", [CONFIRMING], QUEUED),
            ("started", [QUEUED], WORKING),
            ("taken_over", [WORKING], QUEUED),
            ("finished", [WORKING], INSTALLED),
            ("removed", [WORKING], REMOVED),
            ("broke", [NEW, QUEUED, WORKING], FAILED),
            ("asked", [FAILED, INSTALLED], NEW),
            ("abandoned", [NEW, CONFIRMING, QUEUED, FAILED], ABANDONED),
        ]
    ),
    meanings={
        NEW: "Its host key is about to be fetched and compared.",
        CONFIRMING: "Its host key is not known yet: a person has to compare the fingerprint.",
        QUEUED: "Waits for a free connection.",
        WORKING: "A controller is connected and works through the steps.",
        INSTALLED: "The last action is done; an agent is installed there.",
        FAILED: "A step failed; the reason says why. Trying again goes on from what is done.",
        REMOVED: "The agent was uninstalled and its node retired.",
        ABANDONED: "Given up by a person; nothing more is done there.",
    },
)

INSTALL = "install"
UPGRADE = "upgrade"
REMOVE = "remove"
RESTART_AGENT = "restart_agent"

STEPS: dict[str, tuple[str, ...]] = {
    INSTALL: (
        "connect", "python", "disk", "existing", "accelerators", "clock", "ports", "network",
        "bundle", "environment", "join", "service", "hello",
    ),
    UPGRADE: ("connect", "python", "disk", "bundle", "environment", "service", "hello"),
    REMOVE: ("connect", "drain", "uninstall", "retire"),
    RESTART_AGENT: ("connect", "restart", "hello"),
}  # fmt: skip
"""Steps of each action. Each may run again at any time: it looks first at what is already done."""

STEP_WORDS = {
    "connect": "Connect and sign in",
    "python": "Python 3.11-3.13",
    "disk": "Disk space",
    "existing": "Agents already there",
    "accelerators": "Accelerators",
    "clock": "Clock",
    "ports": "Free ports",
    "network": "Reach of Redis and control plane",
    "bundle": "Copy the agent",
    "environment": "Python packages",
    "join": "Join the fleet",
    "service": "Start the agent",
    "hello": "Wait for its first report",
    "drain": "Drain the node",
    "uninstall": "Stop and uninstall",
    "retire": "Retire the node",
    "restart": "Restart the agent",
}

OLDEST_PYTHON = (3, 11)
FIRST_PYTHON_TOO_NEW = (3, 14)
LARGEST_CLOCK_SKEW_SECONDS = 5.0
"""More than this is said on the page. Nothing is ever decided by a node's clock."""
FEWEST_FREE_PORTS = 16

_PYTHON_LINE = re.compile(r"^(?P<path>/\S+) (?P<version>\d+\.\d+)\.\d+ (?P<venv>yes|no)$")


class StepFailedError(Exception):
    """A step did not work; the text tells a person what to do. It holds no secret."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found or did, in one line; `facts` are kept with the installation."""

    summary: str
    warning: bool = False
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostKey:
    """The key with which an SSH server proves who it is."""

    key_type: str
    blob: str
    """Base64, as in a `known_hosts` file."""
    fingerprint: str
    """`SHA256:…`, as `ssh-keygen -l` prints it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an agent is installed, and how it is to live there."""

    installation_id: str
    host: str
    port: int
    user: str
    folder: str
    """Absolute, or below the user's home."""
    python: str
    """An interpreter that has the packages already; empty: find one and make an environment."""
    pins: tuple[HostKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to sign in: a password, or a private key with its passphrase, or neither for the ssh-agent."""

    password: str = ""
    private_key: str = ""
    passphrase: str = ""

    def __repr__(self) -> str:
        return "Credentials(…)"


@dataclass(frozen=True, slots=True)
class FoundPython:
    """One interpreter on the machine."""

    path: str
    version: tuple[int, int]
    makes_environments: bool

    @property
    def fits(self) -> bool:
        """Whether the agent runs on this version."""
        return OLDEST_PYTHON <= self.version < FIRST_PYTHON_TOO_NEW

    def __str__(self) -> str:
        return f"{self.path} ({self.version[0]}.{self.version[1]})"


def read_pythons(output: str) -> tuple[FoundPython, ...]:
    """Read lines `path version yes|no`; lines of another shape are some profile's chatter."""
    found = []
    for line in output.splitlines():
        match = _PYTHON_LINE.match(line.strip())
        if match:
            major, minor = match["version"].split(".")
            found.append(FoundPython(match["path"], (int(major), int(minor)), match["venv"] == "yes"))
    return tuple(found)


def choose_python(found: tuple[FoundPython, ...], *, named: str = "") -> FoundPython:
    """Return the newest interpreter that will do. Raises `StepFailedError` that says what is missing.

    One that a person `named` brings its packages, so it need not make environments.
    """
    fitting = sorted((p for p in found if p.fits), key=lambda p: p.version, reverse=True)
    for python in fitting:
        if named or python.makes_environments:
            return python
    if fitting:
        major, minor = fitting[0].version
        raise StepFailedError(
            f"{fitting[0]} has no venv or ensurepip: install python{major}.{minor}-venv there, "
            "or name an interpreter that has the agent's packages"
        )
    if named:
        what = f"{found[0]} is there" if found else "no interpreter answers there"
        raise StepFailedError(
            f"{named} was named, but is no Python 3.11 to 3.13 ({what}): name another one, "
            "or none to have one looked for"
        )
    seen = f"found only {', '.join(map(str, found))}" if found else "found none at all"
    raise StepFailedError(
        f"no Python 3.11 to 3.13 on the machine ({seen}): install one, or name its path in the form"
    )


def judge_pins(offered: HostKey, pins: tuple[HostKey, ...], *, host: str, port: int) -> bool:
    """Whether the offered key is pinned; `False` where nothing is pinned for this host and port.

    Raises `StepFailedError` where another key is: a changed key is never accepted, nor is a key of
    a type that nobody compared while one of another type was.
    """
    if not pins:
        return False
    same_type = [pin for pin in pins if pin.key_type == offered.key_type]
    if any(pin.blob == offered.blob for pin in same_type):
        return True
    known = ", ".join(f"{pin.key_type} {pin.fingerprint}" for pin in pins)
    if same_type:
        raise StepFailedError(
            f"the host key of {host} port {port} changed: it offers {offered.key_type} "
            f"{offered.fingerprint}, pinned is {known}. Somebody may be in between; if the machine was "
            "set up anew on purpose, forget the pinned key first"
        )
    raise StepFailedError(
        f"{host} port {port} offers no host key of a known type: it offers {offered.key_type} "
        f"{offered.fingerprint}, pinned is {known}"
    )


class CredentialVault(Protocol):
    """Keeps passwords and private keys for the controllers, sealed and for a short time."""

    def keep(self, installation_id: str, credentials: Credentials) -> None:
        """Keep the credentials of an installation, in place of earlier ones."""
        ...

    def forget(self, installation_id: str) -> None:
        """Forget them."""
        ...
