"""Every HTTP route of the product, with an address that reaches it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.resolvers import LocalePrefixPattern, RegexPattern, RoutePattern

_PARAMETER = re.compile(r"<(?:(?P<converter>\w+):)?\w+>")
_SAMPLES = {
    "uuid": "00000000-0000-4000-8000-000000000000",
    "int": "1",
    "str": "some",
    "slug": "some",
    "path": "some",
}
_REGEX_SAMPLES = {
    r"^api/": "api/nothing-here",
    r"(?P<url>.*)$": "nothing-here",
    r"^(?P<page>[^/].*[^/])/$": "nodes/",
}
"""A route by regular expression needs a sample here; without one the walk fails, on purpose."""


@dataclass(frozen=True)
class Route:
    """One leaf of the URL tree."""

    path: str
    name: str
    view: Callable[..., object]

    def __str__(self) -> str:
        return f"{self.path} ({self.name})"


def all_routes() -> list[Route]:
    return list(_walk(get_resolver(), "/"))


def _walk(resolver: URLResolver, prefix: str) -> Iterator[Route]:
    for entry in resolver.url_patterns:
        path = prefix + sample(entry.pattern)
        if isinstance(entry, URLPattern):
            yield Route(path, entry.name or "", entry.callback)
        else:
            yield from _walk(entry, path)


def sample(pattern: RoutePattern | RegexPattern | LocalePrefixPattern) -> str:
    if isinstance(pattern, RoutePattern):
        text = str(pattern)
        return _PARAMETER.sub(lambda match: _SAMPLES[match["converter"] or "str"], text)
    if isinstance(pattern, RegexPattern):
        return _regex_sample(str(pattern))
    raise TypeError(f"the walk does not know {type(pattern).__name__}; teach it")


def _regex_sample(text: str) -> str:
    if text in _REGEX_SAMPLES:
        return _REGEX_SAMPLES[text]
    apps = re.fullmatch(r"\^\(\?P<app_label>([\w|]+)\)/\$", text)
    if apps:
        return apps[1].split("|")[0] + "/"
    raise ValueError(f"no sample for the regular expression {text!r}; add one")
