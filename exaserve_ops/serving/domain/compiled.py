"""What engines compiled for a model, to be used elsewhere: where it fits, and what it may be. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.manifest import EncodedManifest

MOST_BYTES = 2 << 30
MOST_FILES = 20_000
_ENGINE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_MOST_HARDWARE = 120


@dataclass(frozen=True, slots=True)
class CompiledFacts:
    """A folder of such files, as read."""

    source: str
    """`file:///folder`, where nodes may read it, too."""
    revision: str
    """`sha256:` of the list of files."""
    total_bytes: int
    file_count: int
    manifest: EncodedManifest


def fits(hardware: str, accelerators: Collection[tuple[str, str]]) -> bool:
    """Whether a node with these accelerators (kind, name) can use what was compiled for this hardware.

    Empty hardware is any. A node without accelerators is of the kind `cpu`.
    """
    wanted = hardware.casefold()
    here = {word.casefold() for pair in accelerators for word in pair} or {"cpu"}
    return not wanted or wanted in here


def check_target(engine: str, hardware: str) -> None:
    """Refuse names that no node could use. Raises `InvalidInputError`."""
    if not _ENGINE.fullmatch(engine):
        raise InvalidInputError(
            "engine", "an engine's name has small letters, digits, dashes and underscores; 32 at most"
        )
    if len(hardware) > _MOST_HARDWARE or not hardware.isprintable():
        raise InvalidInputError(
            "hardware", f"is an accelerator's name or kind, as its node shows it; {_MOST_HARDWARE} letters"
        )
