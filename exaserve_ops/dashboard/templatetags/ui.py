"""Tags and filters that put values on a page: words, units, badges, sparklines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django import template
from django.templatetags.static import static
from django.utils.html import format_html
from django.utils.safestring import SafeString

from exaserve_ops.dashboard import figures, wording
from exaserve_ops.lib import clock

register = template.Library()

register.filter("number", wording.number)
register.filter("percent", wording.percent)
register.filter("duration", wording.duration)
register.filter("byte_size", wording.byte_size)
register.filter("count_words", wording.count_words)

SPARK_WIDTH, SPARK_HEIGHT = 120, 28


@register.inclusion_tag("components/badge.html")
def badge(kind: str, status: str) -> dict[str, Any]:
    """Render a status as word, colour and shape."""
    return {"badge": wording.badge_of(kind, status)}


@register.inclusion_tag("components/badge.html")
def health_badge(deployment: Any) -> dict[str, Any]:
    """Render what a deployment serves, against what is wanted of it."""
    look = wording.health_of(
        status=deployment.status,
        ready=deployment.ready_count,
        wanted=deployment.replicas,
        failed=deployment.failed_count,
    )
    return {"badge": look}


@register.simple_tag
def icon(name: str, size: int = 16) -> SafeString:
    """Render an icon of the sprite; it says nothing to screen readers."""
    return format_html(
        '<svg class="icon" width="{}" height="{}" aria-hidden="true" focusable="false">'
        '<use href="{}#{}"></use></svg>',
        size, size, static("img/sprite.svg"), name,
    )  # fmt: skip


@register.simple_tag
def moment(at: datetime | None) -> SafeString:
    """Render a time as an age; the exact one is in the title, and scripts put it in the viewer's zone."""
    if at is None:
        return format_html('<span class="missing">{}</span>', "never")
    exact = at.strftime("%Y-%m-%d %H:%M:%S UTC")
    words = wording.ago(max(timedelta(0), clock.now() - at))
    return format_html(
        '<time datetime="{}" title="{}" data-moment>{}</time>', at.isoformat(), exact, words
    )


@register.inclusion_tag("components/sparkline.html")
def sparkline(values: Sequence[float | None] | None, name: str = "") -> dict[str, Any]:
    """Render a trend without axes; the figure beside it carries the number."""
    pieces = figures.sparkline_points(values or (), width=SPARK_WIDTH, height=SPARK_HEIGHT)
    return {"pieces": pieces, "name": name, "width": SPARK_WIDTH, "height": SPARK_HEIGHT}


@register.filter
def words(status: str) -> str:
    """Write a status or event with spaces."""
    return status.replace("_", " ")


@register.filter
def short_id(value: object) -> str:
    """First eight characters of an id."""
    return str(value)[:8]


@register.filter
def short_digest(value: str) -> str:
    """Digest with its first twelve digits."""
    kind, _, digits = value.partition(":")
    return f"{kind}:{digits[:12]}…" if digits else value


@register.filter
def item(mapping: dict[str, Any] | None, key: object) -> Any:
    """Look up a key that is held in a variable; `None` where it is missing."""
    return mapping.get(str(key)) if mapping else None
