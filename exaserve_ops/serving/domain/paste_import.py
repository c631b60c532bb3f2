"""Deployments out of whatever people paste: a command, Helm values, a custom resource, a workload."""

from __future__ import annotations

import re

from exaserve_ops.serving.domain.launch_import import Draft, read_words
from exaserve_ops.serving.domain.launch_words import LONGEST, PasteError, read_command
from exaserve_ops.serving.domain.values_import import read_values

_YAML_LINE = re.compile(r"^(?:---|-\s+[\w\"']+:|[\w.\"'-]+:(?:\s|$))")


def read_paste(text: str) -> tuple[Draft, ...]:
    """Every deployment that a pasted text describes, at least one. Raises `PasteError`."""
    if len(text) > LONGEST:
        raise PasteError(f"it has {len(text):,} characters: at most {LONGEST:,} are read")
    if "\0" in text:
        raise PasteError("it has a NUL character, which no text file should have")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise PasteError("there is nothing in it: paste a command or YAML")
    if _YAML_LINE.match(lines[0]):
        return read_values(text)
    return (read_words(read_command(text)).draft(),)
