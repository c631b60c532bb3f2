"""Tables that are filtered, sorted and paged on the server, with everything in the query string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django.core.paginator import Page, Paginator
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest

PAGE_ROWS = 50
_NAMES_TOLD, _NAME_CHARACTERS = 3, 40
M = TypeVar("M", bound=Model)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Filter:
    """One drop-down: name in the query string, word on the page, pairs of (value, word)."""

    name: str
    word: str
    options: Sequence[tuple[str, str]]
    chosen: str

    @property
    def is_valid(self) -> bool:
        """Whether the chosen value is one of the options."""
        return any(value == self.chosen for value, _ in self.options)


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """One page of a table."""

    page: Page[T]
    filters: tuple[Filter, ...]
    search: str
    searchable: str
    """What the search field finds, as its placeholder; empty where there is none."""
    query: str
    """Query string without the page, for links to other pages."""
    unread: str
    """What of the query is no filter here, in a sentence; empty where everything is."""

    @property
    def is_filtered(self) -> bool:
        """Whether anything was left out on purpose."""
        return bool(self.search) or any(f.chosen for f in self.filters)


def list_page(
    request: HttpRequest,
    rows: QuerySet[M],
    *,
    choices: Mapping[str, tuple[str, str, Sequence[tuple[str, str]]]] | None = None,
    search_in: Sequence[str] = (),
    searchable: str = "",
    tie: str = "pk",
    also: Sequence[str] = (),
) -> Listing[M]:
    """Filter and page rows as the query string asks.

    `choices` maps a parameter to (word, model field, options). A value that is not an option finds
    nothing rather than everything. `tie` makes the order total, so that no row appears twice. `also` names
    what else the page reads of the query; the visitor is told of what nobody does.
    """
    filters: list[Filter] = []
    for name, (word, field, options) in (choices or {}).items():
        chosen = Filter(name, word, options, request.GET.get(name, ""))
        filters.append(chosen)
        if chosen.chosen:
            rows = rows.filter(**{field: chosen.chosen}) if chosen.is_valid else rows.none()
    search = request.GET.get("q", "").strip() if search_in else ""
    if search:
        found = Q()
        for field in search_in:
            found |= Q(**{f"{field}__icontains": search})
        rows = rows.filter(found)
    ordering: Any = rows.query.order_by or rows.model._meta.ordering  # noqa: SLF001 - Django's documented API
    paginator = Paginator(rows.order_by(*ordering, tie), PAGE_ROWS)
    return Listing(
        page=paginator.get_page(request.GET.get("page")),
        filters=tuple(filters),
        search=search,
        searchable=searchable,
        query=_query_without_page(request),
        unread=_say_unread(request, [*(choices or {}), *(["q"] if search_in else []), *also]),
    )


def page_of_rows(request: HttpRequest, rows: Sequence[T]) -> Listing[T]:
    """Page rows that are no query, as the query string asks."""
    page = Paginator(rows, PAGE_ROWS).get_page(request.GET.get("page"))
    query, unread = _query_without_page(request), _say_unread(request, ())
    return Listing(page, filters=(), search="", searchable="", query=query, unread=unread)


def _say_unread(request: HttpRequest, known: Sequence[str]) -> str:
    """Say what of the query is no filter here: a misspelt one shows everything, as if all that matched."""
    unread = sorted(request.GET.keys() - {*known, "page"})
    if not unread:
        return ""
    names = ", ".join(f"“{name[:_NAME_CHARACTERS]}”" for name in unread[:_NAMES_TOLD])
    there = f"There are: {', '.join(sorted(known))}." if known else "There are none here."
    is_none = "is no filter" if len(unread) == 1 else "are no filters"
    return f"{names} {is_none} of this list, and nothing was left out for it. {there}"


def _query_without_page(request: HttpRequest) -> str:
    query = request.GET.copy()
    query.pop("page", None)
    return query.urlencode()
