"""Figures for Plotly, as plain dicts. Pure: series in, dict out; the browser adds the theme's colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

Figure = dict[str, Any]
_TIME_AXIS = {"type": "date", "tickformat": "%H:%M", "nticks": 5}

_BESIDE = (0.14, 0.98)
_ABOVE = (0.18, 0.9)
"""Parts of a panel's place that its axes span: left and right, bottom and top. Labels get the rest."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: values over time. `None` is a gap in the line, never a zero."""

    name: str
    at: Sequence[datetime]
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Panel:
    """One small multiple: title, unit of the axis (`ratio`, `seconds`, …) and a fixed top if any."""

    title: str
    unit: str
    series: tuple[Series, ...]
    top: float | None = None


def small_multiples(panels: Sequence[Panel], *, columns: int = 4) -> Figure:
    """Panels in a grid over one time span, each with its own axis and the same line colours."""
    data: list[Figure] = []
    layout: Figure = {"showlegend": False, "annotations": []}
    colours = _colour_indexes(panels)
    rows = -(-len(panels) // columns)
    for index, panel in enumerate(panels):
        suffix = "" if index == 0 else str(index + 1)
        across = _span(index % columns, columns, _BESIDE)
        down = _span(rows - 1 - index // columns, rows, _ABOVE)
        layout[f"xaxis{suffix}"] = {"domain": across, "anchor": f"y{suffix}", **_TIME_AXIS}
        layout[f"yaxis{suffix}"] = {"domain": down, "anchor": f"x{suffix}", **_value_axis(panel)}
        layout["annotations"].append(_title(panel.title, across[0], down[1]))
        data += [_line(series, suffix, colours[series.name]) for series in panel.series]
    return {"data": data, "layout": layout}


def by_minute(
    name: str, known: Mapping[datetime, float | None], *, since: datetime, until: datetime
) -> Series:
    """Series with one point a minute; a minute that nobody recorded is a gap, not a straight line."""
    first = since.replace(second=0, microsecond=0)
    count = int((until - first).total_seconds() // 60) + 1
    at = [first + timedelta(minutes=index) for index in range(count)]
    return Series(name, at, [known.get(moment) for moment in at])


def sparkline_points(values: Sequence[float | None], *, width: float, height: float) -> tuple[str, ...]:
    """Coordinates of the line's pieces for SVG `polyline`; a gap parts the line in two.

    Scaled to the largest value, from zero, so that a small wobble does not look like a cliff.
    """
    known = [value for value in values if value is not None]
    top = max(known, default=0.0) or 1.0
    step = width / max(1, len(values) - 1)
    pieces: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            pieces.append([])
            continue
        y = height - 1 - value / top * (height - 2)
        pieces[-1].append(f"{index * step:.1f},{y:.1f}")
    return tuple(" ".join(piece) for piece in pieces if piece)


def _line(series: Series, suffix: str, colour: int) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": series.name,
        "x": [moment.isoformat() for moment in series.at],
        "y": list(series.values),
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "connectgaps": False,
        "hovertemplate": "%{y} at %{x|%H:%M}<extra>%{fullData.name}</extra>",
        "line": {"width": 1.5},
        "meta": {"colour": colour},
    }


def _span(index: int, count: int, room: tuple[float, float]) -> list[float]:
    """Part of the width or height that one of `count` panels takes, with room for labels around it."""
    start, end = room
    return [(index + start) / count, (index + end) / count] if count > 1 else [0.0, 1.0]


def _value_axis(panel: Panel) -> Figure:
    axis: Figure = {"rangemode": "tozero", "nticks": 4}
    if panel.unit == "ratio":
        axis["tickformat"] = ".0%"
    elif panel.unit == "seconds":
        axis["ticksuffix"] = " s"
    if panel.top is not None:
        axis["range"] = [0, panel.top]
    return axis


def _title(text: str, left: float, top: float) -> Figure:
    return {
        "text": text, "x": left, "y": top, "xref": "paper", "yref": "paper",
        "xanchor": "left", "yanchor": "bottom", "showarrow": False,
    }  # fmt: skip


def _colour_indexes(panels: Sequence[Panel]) -> Mapping[str, int]:
    names = dict.fromkeys(series.name for panel in panels for series in panel.series)
    return {name: index for index, name in enumerate(names)}
