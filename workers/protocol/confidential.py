"""Secrets in text: masked before a line leaves its node, and refused where they would be kept and shown.

Known secrets are masked by value. Others, such as a token that somebody gave an engine, are known by the
name before them or by their shape; what is masked without need costs a word of a log, the other
mistake costs a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"

_NAME = (
    r"(?:api[_-]?keys?|passwords?|passwd|secrets?(?:[_-]?key)?|private[_-]?key"
    r"|(?:hf|hub|huggingface|auth|access|bearer|api|join|refresh|session)[_-]?(?:hub[_-]?)?token)"
)
"""Of tokens only those that open something: an engine's `eos_token` and `max_tokens` are none."""
_VALUE = r"""(?:\[[^\]]{0,400}\]|"[^"]{0,400}"|'[^']{0,400}'|["'\[]*[^\s"',;&\])}]+)"""
_ASSIGNED = re.compile(rf"""({_NAME}["']?\s{{0,8}}[=:]\s{{0,8}})(?!None\b|null\b){_VALUE}""", re.IGNORECASE)
_FLAG = re.compile(rf"(--[\w-]{{0,40}}?{_NAME})(\s{{1,8}}){_VALUE}", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer\s{1,8})[\w.~+/=-]{8,}", re.IGNORECASE)
_IN_URL = re.compile(r"(://[^\s/:@]{0,200}:)[^\s/@]{1,400}@")
_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{20,}|(?:sk|xe|xg|xj|xo|xr)-[\w-]{16,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,2000}\.[\w-]{8,2000}\.[\w-]*)"
)
# All repetitions that may fail at their end are bounded: a line of an engine can be as long as a block.
_NAMES_SECRET = re.compile(rf"(?<![a-z]){_NAME}(?![a-z])", re.IGNORECASE)


def mask(text: str, known: Iterable[str] = ()) -> str:
    """Replace every secret: those known by value, and what looks like one."""
    for secret in known:
        if secret:
            text = text.replace(secret, MASK)
    text = _ASSIGNED.sub(rf"\g<1>{MASK}", text)
    text = _FLAG.sub(rf"\g<1>\g<2>{MASK}", text)
    text = _BEARER.sub(rf"\g<1>{MASK}", text)
    text = _IN_URL.sub(rf"\g<1>{MASK}@", text)
    return _SHAPE.sub(MASK, text)


def find_secret(text: str) -> str:
    """Name the secret that a setting's name or text holds, without its value; empty for none."""
    found = _NAMES_SECRET.search(text)
    if found is not None:
        return found.group()
    return "" if _SHAPE.search(text) is None else "something shaped like a key"
