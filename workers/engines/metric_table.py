"""One table for each engine: which names on its metrics page say what, and how sources are put together.

A page may tell of several schedulers (ranks of data parallelism): what they count is added up. And it may
tell the same thing several times (ranks of tensor and pipeline parallelism, which run the same requests
over the same pool of tokens): there the highest counts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from workers.engines.base import Histogram
from workers.engines.exposition import Exposition, Labels, PageReader, Series, highest_sum

PROCESS_START = "process_start_time_seconds"
_PERCENT_ABOVE = 1.5
"""A ratio may be rounded to a little over 1; what is more was told in percent."""
_PERCENT = 100.0
_BEYOND_WHOLE = float(1 << 53)
"""From there on a float is no exact whole number."""
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


class Kind(enum.Enum):
    """What a metric is, which says how its sources are put together."""

    COUNT = "added up over sources"
    RATIO = "the mean of the sources, 0 to 1"
    SAME = "told by each source alike; the highest counts"
    HISTOGRAM = "added up over sources, bucket by bucket"
    LABELS = "told in labels; the value says whether it holds"


@dataclass(frozen=True, slots=True)
class Name:
    """A name on the page, and which versions of the engine use it."""

    text: str
    versions: str
    scale: float = 1.0
    """What its values are multiplied by to be in our unit."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that an engine tells, under the names that it has had."""

    kind: Kind
    names: tuple[Name, ...]
    """The newest first. The first one with a value counts: two names of one thing are never added."""


@dataclass(frozen=True, slots=True)
class MetricTable:
    """All that is read of one engine's pages."""

    engine: str
    """As people call it."""
    metrics: Mapping[str, Metric]
    """By what they are called here: mostly fields of a sample."""
    replicated: tuple[str, ...]
    """Labels of ranks that all tell the same."""
    strangers: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names that only other pages have, and whose those are."""

    def make_reader(self) -> PageReader:
        """Return a reader of pages that looks for these names only."""
        names = (PROCESS_START, *self._sample_names())
        return PageReader(names=names, replicated=self.replicated)

    def _sample_names(self) -> Iterator[str]:
        for metric in self.metrics.values():
            parts = _HISTOGRAM_PARTS if metric.kind is Kind.HISTOGRAM else ("",)
            yield from (name.text + part for name in metric.names for part in parts)


class Figures:
    """What one page says, in the terms of a table. `None`: it does not say."""

    def __init__(self, table: MetricTable, page: Exposition) -> None:
        self._table = table
        self._page = page
        self.notes: list[str] = list(page.notes)

    def total(self, what: str) -> float | None:
        """Figure of a metric, put together as its kind says."""
        metric = self._table.metrics[what]
        for name in metric.names:
            rows = self._page.series.get(name.text, ())
            value = _highest(rows) if metric.kind is Kind.SAME else highest_sum(rows)
            if value is not None:
                return value * name.scale
        return None

    def whole(self, what: str) -> int | None:
        """Return the same, rounded; `None` for what can be no number of things."""
        value = self.total(what)
        return round(value) if value is not None and 0 <= value < _BEYOND_WHOLE else None

    def ratio(self, what: str) -> float | None:
        """Mean of the sources, 0 to 1. Percent are recognised and noted."""
        for name in self._names(what):
            highest: dict[Labels, float] = {}
            for _, value, source, _ in self._page.series.get(name.text, ()):
                if value is not None:
                    highest[source] = max(highest.get(source, -math.inf), value * name.scale)
            if not highest:
                continue
            mean = math.fsum(highest.values()) / len(highest)
            if max(highest.values()) > _PERCENT_ABOVE:
                self.notes.append(f"{name.text} is told in percent")
                mean /= _PERCENT
            return min(max(mean, 0.0), 1.0)
        return None

    def histogram(self, what: str) -> Histogram | None:
        """Histogram of all sources together, in our unit."""
        for name in self._names(what):
            found = self._page.find_histogram(name.text)
            if found is None:
                if f"{name.text}_bucket" in self._page.series:
                    self.notes.append(f"{name.text} is no usable histogram")
                continue
            if name.scale == 1.0:
                return found
            bounds = tuple(bound * name.scale for bound in found.bounds)
            return Histogram(bounds, found.counts, found.total * name.scale)
        return None

    def by_label(self, what: str, label: str) -> dict[str, float]:
        """Return counts by the value of a label; empty where the page does not tell."""
        for name in self._names(what):
            parts: dict[str, list[Series]] = {}
            for row in self._page.series.get(name.text, ()):
                if label in row.labels and row.value is not None:
                    parts.setdefault(row.labels[label], []).append(row)
            if parts:
                sums = {key: highest_sum(rows) for key, rows in parts.items()}
                return {key: value * name.scale for key, value in sums.items() if value is not None}
        return {}

    def models(self, what: str) -> dict[str, float]:
        """Counts by model; empty where the page is of a single one."""
        split = self.by_label(what, "model_name")
        return split if len(split) > 1 else {}

    def present(self, whats: Iterable[str]) -> dict[str, float]:
        """Those of these figures that the page tells."""
        told = ((what, self.total(what)) for what in whats)
        return {what: value for what, value in told if value is not None}

    def labels(self, what: str) -> list[Mapping[str, str]]:
        """Labels of each series that holds."""
        found = (row for name in self._names(what) for row in self._page.series.get(name.text, ()))
        return [row.labels for row in found if row.value]

    def _names(self, what: str) -> tuple[Name, ...]:
        return self._table.metrics[what].names


def _highest(rows: Iterable[Series]) -> float | None:
    return max((row.value for row in rows if row.value is not None), default=None)


def name_page(page: str, found: Exposition, table: MetricTable) -> str:
    """What a page is on which nothing of the engine was found; empty if something was."""
    if found.series.keys() - {PROCESS_START}:
        return ""
    text = page.lstrip()
    if text.startswith("<"):
        return "a web page came, no metrics: is a proxy in between?"
    for beginning, whose in table.strangers.items():
        if text.startswith(beginning) or f"\n{beginning}" in text:
            return f"not a page of {table.engine} but of {whose}: scrape the engine's own port"
    return f"no metrics of {table.engine} on the page"
