"""Deployments out of whatever people paste: a command, Helm values, a custom resource, a workload."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from exaserve_ops.serving.domain.launch_import import Draft, read_start
from exaserve_ops.serving.domain.launch_starts import find_starts
from exaserve_ops.serving.domain.launch_words import LONGEST, PasteError, read_commands
from exaserve_ops.serving.domain.pasted_secrets import mask_all
from exaserve_ops.serving.domain.values_import import read_values
from workers.protocol.confidential import MASK

_YAML_LINE = re.compile(r"^(?:---|\{|-\s+[\w\"']+:|[\w.\"'-]+:(?:\s|$))")
_SHOWN = "masked"
"""In place of a secret: what is shown again is read again, so YAML must stay YAML, and JSON JSON."""
_IN_JSON = re.compile(rf'("\s*:\s*){re.escape(MASK)}')


@dataclass(frozen=True, slots=True)
class Pasted:
    """What a pasted text says."""

    drafts: tuple[Draft, ...]
    """At least one."""
    text: str = field(repr=False)
    """As it was pasted, without the secrets that were found in it."""


def read_paste(text: str) -> Pasted:
    """Read every deployment that a pasted text describes. Raises `PasteError`."""
    if len(text) > LONGEST:
        raise PasteError(f"it has {len(text):,} characters: at most {LONGEST:,} are read")
    if "\0" in text:
        raise PasteError("it has a NUL character, which no text file should have")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise PasteError("there is nothing in it: paste a command or YAML")
    if _YAML_LINE.match(lines[0]):
        readers = read_values(text)
    else:
        readers = tuple(read_start(start) for start in find_starts(read_commands(text)))
    secrets = {secret for reader in readers for secret in reader.secrets}
    shown = _IN_JSON.sub(rf'\g<1>"{_SHOWN}"', mask_all(text, secrets))
    return Pasted(tuple(reader.draft() for reader in readers), shown.replace(MASK, _SHOWN))
