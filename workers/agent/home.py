"""The agent's home folder: who it is, where its files lie, and the lock that keeps it single."""

from __future__ import annotations

import fcntl
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec

_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700


class HomeError(Exception):
    """The home folder cannot be used; the text says what to do."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this node is. The id is made here, once; name and address may change at any time."""

    node_id: str
    name: str = ""
    address: str = ""
    node_key: str = ""
    """64 hex digits, from the control plane at joining; empty before that."""
    key_epoch: int = 0
    redis_url: str = ""

    def __repr__(self) -> str:
        return f"Identity(node_id={self.node_id!r}, name={self.name!r})"

    @property
    def joined(self) -> bool:
        """True once the control plane has handed out the node key."""
        return bool(self.node_key and self.redis_url)

    @property
    def key(self) -> bytes:
        """The node key's 32 bytes."""
        return bytes.fromhex(self.node_key)


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below one home folder."""

    root: Path

    @property
    def identity_file(self) -> Path:
        """Mode 0600: holds the node key."""
        return self.root / "identity.json"

    @property
    def journal_file(self) -> Path:
        """SQLite; see `workers.agent.journal`."""
        return self.root / "journal.sqlite3"

    @property
    def logs(self) -> Path:
        """`<replica>/<attempt>.log`, kept after the attempt's death."""
        return self.root / "logs"

    @property
    def weights(self) -> Path:
        """Weights in the form in which this node's replicas share them; may be deleted when none runs."""
        return self.root / "weights"

    @property
    def weight_store(self) -> Path:
        """This node's copies of weights, unless settings name another disk."""
        return self.root / "weight-store"

    @property
    def secrets(self) -> Path:
        """Secrets for places that weights come from; people put them there, mode 0600."""
        return self.root / "secrets"

    @property
    def kv_blocks(self) -> Path:
        """KV blocks that replicas keep on disk; files of dead replicas are removed."""
        return self.root / "kv-tiers"

    @property
    def engine_cache(self) -> Path:
        """What engines compiled, by engine; may be deleted when none runs."""
        return self.root / "engine-cache"

    @property
    def run(self) -> Path:
        """Runtime folders of attempts, the intake socket, the lock."""
        return self.root / "run"

    @property
    def intake_socket(self) -> Path:
        """Where the Celery child hands commands to the agent."""
        return self.run / "intake.sock"

    @property
    def lock_file(self) -> Path:
        """Held with flock by the running agent; its text is the owner's pid."""
        return self.run / "agent.lock"

    def create(self) -> None:
        """Make the folders, closed to others."""
        for folder in (self.root, self.logs, self.run):
            folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)

    def load_identity(self) -> Identity:
        """Read the identity. Raises `HomeError` if there is none or it is damaged."""
        try:
            return msgspec.json.decode(self.identity_file.read_bytes(), type=Identity)
        except FileNotFoundError:
            raise HomeError(f"no identity in {self.root}: join first") from None
        except msgspec.DecodeError:
            raise HomeError(f"{self.identity_file} is damaged: join again") from None

    def ensure_identity(self) -> Identity:
        """Read the identity, or make and keep a new one with a fresh id."""
        if self.identity_file.exists():
            return self.load_identity()
        identity = Identity(node_id=str(uuid.uuid4()))
        self.save_identity(identity)
        return identity

    def save_identity(self, identity: Identity) -> None:
        """Replace the identity file at once, mode 0600, on disk before this returns."""
        self.create()
        draft = self.identity_file.with_suffix(".new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE_FILE)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _PRIVATE_FILE)
            file.write(msgspec.json.format(msgspec.json.encode(identity)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.identity_file)


class HomeLock:
    """Keeps a second agent off the same home. Released by the kernel however the agent ends."""

    def __init__(self, home: Home) -> None:
        self._path = home.lock_file
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises `HomeError` naming the pid of the agent that holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            owner = self._path.read_text().strip() or "unknown"
            raise HomeError(f"another agent (pid {owner}) runs on {self._path.parent.parent}") from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
