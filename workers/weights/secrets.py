"""Secrets of a node for places that weights come from: files that only the agent reads.

A secret is named in what the control plane says and kept on the node, in `secrets/<name>` of the agent's
home. It never stands in a command, a report, a log or a command line.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_MOST_BYTES = 16 * 1024


class SecretError(Exception):
    """A secret that cannot be used; the text names it and never tells it."""


class Secrets:
    """The folder of a node's secrets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> str:
        """A secret by its name, without blanks around it. Raises `SecretError`."""
        if not _NAME.fullmatch(name):
            raise SecretError(f"{name[:64]!r} is no name of a secret")
        path = self._folder / name
        try:
            facts = path.stat()
            if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise SecretError(f"secret {name} can be read by others: chmod 600 {path}")
            if facts.st_size > _MOST_BYTES:
                raise SecretError(f"secret {name} has {facts.st_size:,} bytes; {_MOST_BYTES:,} are allowed")
            text = path.read_text("utf-8").strip()
        except FileNotFoundError as error:
            raise SecretError(f"secret {name} is not on this node: put it into {path}, mode 600") from error
        except (OSError, ValueError) as error:
            raise SecretError(f"secret {name} cannot be read: {type(error).__name__}") from error
        if not text or "\0" in text:
            raise SecretError(f"secret {name} is empty or no text")
        return text
