"""Secrets in what is pasted: known by their names, by their shape and by where they stand."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workers.protocol.confidential import find_secret, mask

HELD = "it holds a secret, and what a deployment has is shown"
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ENDS_SECRET = re.compile(
    r"(?:^|[_.-])(?:tokens?|keys?|pass|passwd|passwords?|passphrase|pwd|pat|secrets?|credentials?|auth)$"
)
_LEAST_KNOWN = 4
"""Characters of a value that is looked for elsewhere: shorter ones are parts of too much."""


def names_secret(name: str) -> bool:
    """Whether a variable, key or unknown flag of this name holds a secret. Rather once too often.

    Logs are masked by `confidential` more sparingly: here a value costs nothing, since it is not kept.
    """
    return bool(find_secret(name) or _ENDS_SECRET.search(_HUMP.sub("_", name).lower()))


def holds_secret(text: str) -> bool:
    """Whether a value has a secret in it: by a name before it, its shape, or a password in an address."""
    return bool(find_secret(text)) or mask(text) != text


def mask_all(text: str, secrets: Iterable[str]) -> str:
    """Mask these secrets wherever they stand, and what looks like others."""
    known = {secret for secret in secrets if len(secret) >= _LEAST_KNOWN}
    return mask(text, sorted(known, key=len, reverse=True))
