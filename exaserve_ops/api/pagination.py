"""Pages of REST lists."""

from __future__ import annotations

from rest_framework.pagination import PageNumberPagination


class Page(PageNumberPagination):
    """`?page=2&page_size=100`; at most 500 rows."""

    page_size_query_param = "page_size"
    max_page_size = 500
