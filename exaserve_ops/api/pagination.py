"""Pages of REST lists."""

from __future__ import annotations

from rest_framework.pagination import CursorPagination, PageNumberPagination

MAX_PAGE_ROWS = 500


class Page(PageNumberPagination):
    """`?page=2&page_size=100`; at most 500 rows."""

    page_size_query_param = "page_size"
    max_page_size = MAX_PAGE_ROWS


class EventCursor(CursorPagination):
    """Newest first, by opaque cursors: the record grows without end, so nothing counts it."""

    ordering = "-id"
    page_size_query_param = "page_size"
    max_page_size = MAX_PAGE_ROWS
