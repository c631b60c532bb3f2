"""Tags and filters that put values on a page: words, units, badges, sparklines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from django import template
from django.templatetags.static import static
from django.utils.html import format_html
from django.utils.safestring import SafeString

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard import figures, happenings, wording
from exaserve_ops.lib import clock

register = template.Library()


def _or_missing(value: Any) -> Any:  # noqa: ANN401 - whatever a template holds
    """Templates turn what is not there into an empty text; here it is missing again."""
    return None if value == "" else value


@register.filter
def number(value: Any, digits: int | None = None) -> str:  # noqa: ANN401 - see above
    """Group digits by thin spaces."""
    return wording.number(_or_missing(value), digits)


@register.filter
def percent(value: Any) -> str:  # noqa: ANN401 - see above
    """Write a ratio as a percentage."""
    return wording.percent(_or_missing(value))


@register.filter
def duration(value: Any) -> str:  # noqa: ANN401 - see above
    """Write seconds in human words."""
    return wording.duration(_or_missing(value))


@register.filter
def bounded(load: Mapping[str, Any], name: str) -> str:
    """Write a quantile of a load, `> x` where it is more than its engine can tell."""
    return wording.bounded(load or {}, name)


@register.filter
def clock_words(skew_seconds: float) -> str:
    """Say how far a node's clock is from ours, and whether that is well."""
    return wording.clock_words(skew_seconds)


@register.filter
def option_value(value: object) -> str:
    """Write the value of an engine's option."""
    return wording.option_value(value)


@register.filter
def clock_is_off(skew_seconds: Any) -> bool:  # noqa: ANN401 - see above
    """Whether a node's clock is off by more than people should have to guess."""
    return wording.is_clock_off(_or_missing(skew_seconds))


@register.filter
def byte_size(value: Any) -> str:  # noqa: ANN401 - see above
    """Write bytes in binary units."""
    return wording.byte_size(_or_missing(value))


@register.filter
def sentence(value: Any) -> str:  # noqa: ANN401 - see above
    """Write a phrase of the domain as a sentence."""
    text = str(value or "").strip()
    ended = text.endswith((".", "!", "?", ":"))
    return f"{text[:1].upper()}{text[1:]}{'' if ended or not text else '.'}"


@register.filter
def count_words(value: Any) -> str:  # noqa: ANN401 - see above
    """Write a large count with a letter."""
    return wording.count_words(_or_missing(value))


SPARK_WIDTH, SPARK_HEIGHT = 120, 28


class CountedDeployment(Protocol):
    """A deployment with its replicas counted, as `live_deployments` returns it."""

    status: str
    replicas: int
    ready_count: int
    failed_count: int


@register.inclusion_tag("components/badge.html")
def badge(kind: str, status: str) -> dict[str, Any]:
    """Render a status as word, colour and shape."""
    return {"badge": wording.badge_of(kind, status)}


@register.inclusion_tag("components/badge.html")
def health_badge(deployment: CountedDeployment) -> dict[str, Any]:
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
    return format_html('<time datetime="{}" title="{}" data-moment>{}</time>', at.isoformat(), exact, words)


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
def happening(event: Event) -> str:
    """Say what happened, to be read after the name of the event's subject."""
    return happenings.words_of(event.subject_kind, event.event, event.reason)


@register.filter
def actor(name: str) -> str:
    """Name of who did it, as people say it."""
    return happenings.actor_words(name)


@register.filter
def middle(text: str, kept: int = 16) -> str:
    """Cut out the middle of a long text, where ids that differ tend to be alike."""
    return wording.cut_middle(text, kept)


@register.inclusion_tag("replicas/loads.html")
def load_cells(load: Mapping[str, Any] | None) -> dict[str, Any]:
    """Render the cells of a replica's load."""
    return {"words": wording.load_words(load or {}), "missing": wording.MISSING}


@register.filter
def short_id(value: object) -> str:
    """First eight characters of an id."""
    return str(value)[:8]


@register.filter
def short_digest(value: str) -> str:
    """Digest with its first twelve digits."""
    kind, _, digits = value.partition(":")
    return f"{kind}:{digits[:12]}…" if digits else value
