"""JSON that a tool printed, perhaps after warnings: found, loaded and looked into without raising."""

from __future__ import annotations

import json
from collections.abc import Mapping

_DEEPEST = 40


def load(page: str) -> object:
    """The first JSON object or list of the page; `None` where there is none."""
    starts = [place for place in (page.find("{"), page.find("[")) if place >= 0]
    if not starts:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(page[min(starts) :])
    except (ValueError, RecursionError):
        return None
    return found


def items(tree: object) -> list[Mapping[str, object]]:
    """The objects of a list; nothing for anything else."""
    return [entry for entry in tree if isinstance(entry, dict)] if isinstance(tree, list) else []


def as_text(value: object) -> str | None:
    """A scalar as text, `{"value": 5, "unit": "MB"}` as `5 MB`; `None` for other shapes."""
    if isinstance(value, dict):
        inner, unit = value.get("value"), value.get("unit", "")
        inner = None if isinstance(inner, dict) else as_text(inner)
        return None if inner is None else f"{inner} {unit if isinstance(unit, str) else ''}".strip()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return str(value)
    except ValueError:  # Python refuses to print whole numbers of thousands of digits
        return None


def look_up(tree: Mapping[str, object], path: str) -> str | None:
    """The scalar at a path of keys such as `vram/size`."""
    found: object = tree
    for key in path.split("/")[:_DEEPEST]:
        if not isinstance(found, dict):
            return None
        found = found.get(key)
    return as_text(found)
