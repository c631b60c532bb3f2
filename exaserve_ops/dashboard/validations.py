"""A validation as its page shows it: checks by engine, and curves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exaserve_ops.dashboard.figures import Figure
from exaserve_ops.validation.domain.catalogue import BY_NAME, CONCURRENCY, CONTEXT, TUNING
from exaserve_ops.validation.domain.tuning import Limits
from exaserve_ops.validation.models import ValidationCheck


@dataclass(frozen=True, slots=True)
class ShownCheck:
    """One row of the report."""

    check: ValidationCheck
    title: str
    asks: str
    took_seconds: float | None


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """Checks of one engine, or of the model."""

    engine: str
    rows: tuple[ShownCheck, ...]

    @property
    def done(self) -> int:
        """How many have an outcome."""
        return sum(row.check.ended_at is not None for row in self.rows)


def groups_of(checks: Iterable[ValidationCheck]) -> tuple[ShownGroup, ...]:
    """Checks by what they ask, in the order in which they run: the model's first."""
    groups: dict[str, list[ShownCheck]] = {}
    for check in checks:
        kind = BY_NAME[check.name]
        took = None
        if check.began_at is not None and check.ended_at is not None:
            took = (check.ended_at - check.began_at).total_seconds()
        groups.setdefault(check.engine, []).append(ShownCheck(check, kind.title, kind.asks, took))
    return tuple(ShownGroup(engine, tuple(rows)) for engine, rows in groups.items())


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """One tried setting."""

    told: Mapping[str, Any]
    broken: tuple[str, ...]
    """Limits that it does not keep."""
    is_nearest: bool
    """None keeps within the limits, and this one exceeds them least."""


@dataclass(frozen=True, slots=True)
class ShownSearch:
    """The search for the best settings of one engine."""

    engine: str
    options: tuple[str, ...]
    rows: tuple[ShownSetting, ...]
    left_out: tuple[Mapping[str, Any], ...]
    """Settings that the memory plan forbade."""
    ttft_limit_seconds: float
    itl_limit_seconds: float
    at_once: int


def searches_of(checks: Iterable[ValidationCheck]) -> tuple[ShownSearch, ...]:
    """Searches that launched something."""
    found = []
    for check in checks:
        told = check.details
        if check.name == TUNING and told.get("settings"):
            limits = Limits(told["ttft_limit_seconds"], told["itl_limit_seconds"])
            found.append(
                ShownSearch(
                    check.engine,
                    tuple(told["options"]),
                    tuple(_setting_of(row, limits) for row in told["settings"]),
                    tuple(told["skipped"]),
                    limits.ttft_seconds,
                    limits.itl_seconds,
                    told["at_once"],
                )
            )
    return tuple(found)


def _setting_of(row: Mapping[str, Any], limits: Limits) -> ShownSetting:
    broken = () if row["why"] else limits.broken(row["ttft_p95_seconds"], row["itl_seconds"])
    return ShownSetting(row, broken, bool(row.get("is_nearest")))


def curves_figure(checks: Iterable[ValidationCheck], *, columns: int = 2) -> Figure:
    """Ramps of requests at once and of context; and what each tried setting brought, where any was."""
    rows = list(checks)
    engines = list(dict.fromkeys(row.engine for row in rows if row.engine))
    ramps = {row.engine: row.details.get("levels", ()) for row in rows if row.name == CONCURRENCY}
    contexts = {row.engine: row.details.get("curve", ()) for row in rows if row.name == CONTEXT}
    panels: list[tuple[str, Mapping[str, Any], str, str, str]] = [
        ("Tokens a second, by requests at once", ramps, "at_once", "tokens_per_second", ""),
        ("TTFT p95, by requests at once", ramps, "at_once", "ttft_p95_seconds", " s"),
        ("Time between tokens, by requests at once", ramps, "at_once", "itl_seconds", " s"),
        ("TTFT, by tokens of context", contexts, "tokens", "ttft_seconds", " s"),
    ]
    tried = {row.engine: _answered(row) for row in rows if row.name == TUNING}
    for title, across in (
        ("Settings: tokens a second, by requests", "sequences"),
        ("Settings: tokens a second, by tokens a step", "tokens"),
    ):
        if any(point[across] for points in tried.values() for point in points):
            panels.append((title, tried, across, "tokens_per_second", ""))
    grid = (-(-len(panels) // columns), columns)
    figure: Figure = {"data": [], "layout": {"showlegend": False, "annotations": []}}
    for number, (title, told, across, up, suffix) in enumerate(panels):
        _add_panel(figure, number, title, suffix, grid)
        for colour, engine in enumerate(engines):
            points = told.get(engine) or ()
            if points:
                mode = "markers" if told is tried else "lines+markers"
                figure["data"].append(_line(engine, points, (across, up), number, colour) | {"mode": mode})
        values = {point.get(across) for points in told.values() for point in points} - {0, None}
        if len(values) == 1:  # one point has no scale, and Plotly would make one up
            axis = figure["layout"]["xaxis" + ("" if number == 0 else str(number + 1))]
            axis |= {"tickmode": "array", "tickvals": list(values)}
    return figure if figure["data"] else {"data": [], "layout": {}}


def _answered(check: ValidationCheck) -> list[Mapping[str, Any]]:
    """Settings that were measured."""
    return [row for row in check.details.get("settings", ()) if not row["why"]]


def _add_panel(figure: Figure, number: int, title: str, suffix: str, grid: tuple[int, int]) -> None:
    """Add the axes and the title of a panel in a grid of rows and columns."""
    rows, columns = grid
    row, column = divmod(number, columns)
    name = "" if number == 0 else str(number + 1)
    # Between the rows there is room for ticks, and for the title of the next one.
    pitch = 1 / (rows - 1 + 0.62)
    bottom, height = (rows - 1 - row) * pitch, pitch * 0.62
    left, width = (column * 0.55, 0.45) if columns > 1 else (0.0, 1.0)
    figure["layout"][f"xaxis{name}"] = {"domain": [left, left + width], "anchor": f"y{name}", "nticks": 6}
    figure["layout"][f"yaxis{name}"] = {
        "domain": [bottom, bottom + height],
        "anchor": f"x{name}",
        "rangemode": "tozero",
        "nticks": 4,
        "ticksuffix": suffix,
    }
    figure["layout"]["annotations"].append(
        {
            "text": title, "x": left, "y": bottom + height + 0.01, "xref": "paper", "yref": "paper",
            "xanchor": "left", "yanchor": "bottom", "showarrow": False,
        }
    )  # fmt: skip


def _line(
    engine: str, points: Sequence[Mapping[str, Any]], keys: tuple[str, str], number: int, colour: int
) -> Figure:
    name = "" if number == 0 else str(number + 1)
    across, up = keys
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": engine,
        # 0 is what an engine was not told, and has no place on an axis.
        "x": [point.get(across) or None for point in points],
        "y": [point.get(up) for point in points],
        "xaxis": f"x{name}",
        "yaxis": f"y{name}",
        "hovertemplate": "%{y:.4~g} at %{x}<extra>%{fullData.name}</extra>",
        "line": {"width": 1.5},
        "meta": {"colour": colour},
    }
