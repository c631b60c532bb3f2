"""Figures for Plotly, as plain dicts. Pure: series in, dict out; the browser adds the theme's colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Figure = dict[str, Any]


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


def small_multiples(panels: Sequence[Panel]) -> Figure:
    """Panels side by side over one time span, each with its own axis and the same line colours."""
    data: list[Figure] = []
    layout: Figure = {"showlegend": False, "annotations": []}
    colours = _colour_indexes(panels)
    width = 1 / max(1, len(panels))
    for index, panel in enumerate(panels):
        suffix = "" if index == 0 else str(index + 1)
        left, right = index * width + 0.03, (index + 1) * width - 0.01
        layout[f"xaxis{suffix}"] = {"domain": [left, right], "anchor": f"y{suffix}", "type": "date"}
        layout[f"yaxis{suffix}"] = _value_axis(panel, f"x{suffix}")
        layout["annotations"].append(_title(panel.title, left))
        data += [_line(series, suffix, colours[series.name]) for series in panel.series]
    return {"data": data, "layout": layout}


def sparkline_points(
    values: Sequence[float | None], *, width: float, height: float
) -> tuple[str, ...]:
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
        "line": {"width": 1.5},
        "meta": {"colour": colour},
    }


def _value_axis(panel: Panel, anchor: str) -> Figure:
    axis: Figure = {"anchor": anchor, "rangemode": "tozero", "nticks": 4}
    if panel.unit == "ratio":
        axis["tickformat"] = ".0%"
    elif panel.unit == "seconds":
        axis["ticksuffix"] = " s"
    if panel.top is not None:
        axis["range"] = [0, panel.top]
    return axis


def _title(text: str, left: float) -> Figure:
    return {
        "text": text, "x": left, "y": 1.0, "xref": "paper", "yref": "paper",
        "xanchor": "left", "yanchor": "bottom", "showarrow": False,
    }  # fmt: skip


def _colour_indexes(panels: Sequence[Panel]) -> Mapping[str, int]:
    names = dict.fromkeys(series.name for panel in panels for series in panel.series)
    return {name: index for index, name in enumerate(names)}
