"""Reading a Prometheus text page that may be damaged, incomplete, or no such page at all.

Each line is parsed by prometheus_client's parser. A line that it refuses is dropped alone and
counted. What is missing stays missing: nothing here ever turns absence into 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from workers.engines.base import Histogram

Labels = frozenset[tuple[str, str]]

_INFINITY_BOUND = "+Inf"
_TYPE_MARK = "# TYPE "


@dataclass(frozen=True, slots=True)
class Series:
    """One time series of a page. `value` is `None` where the page says NaN or infinity."""

    labels: Mapping[str, str]
    value: float | None


@dataclass(frozen=True, slots=True)
class Exposition:
    """What could be read of a page."""

    series: Mapping[str, tuple[Series, ...]] = field(default_factory=dict)
    """By sample name, as written (`…_total`, `…_bucket`)."""
    types: Mapping[str, str] = field(default_factory=dict)
    """By family name, as declared; never guessed from a suffix."""
    dropped_lines: int = 0
    duplicate_series: int = 0
    truncated: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Data-quality notes for people."""
        notes = []
        if self.dropped_lines:
            notes.append(f"{self.dropped_lines} lines dropped")
        if self.duplicate_series:
            notes.append(f"{self.duplicate_series} duplicate series")
        if self.truncated:
            notes.append("page cut off")
        return tuple(notes)

    def find_value(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        """Sum of the series of this name with these labels; `None` if there is none to sum."""
        wanted = (labels or {}).items()
        values = [
            series.value
            for series in self.series.get(name, ())
            if series.value is not None and wanted <= series.labels.items()
        ]
        return math.fsum(values) if values else None

    def find_histogram(self, family: str) -> Histogram | None:
        """Histogram of a family, added up over its label sets.

        `None` if the family is absent, is declared as something else, or its buckets contradict
        one another.
        """
        if self.types.get(family) != "histogram":
            return None
        counts: dict[float, float] = {}
        for series in self.series.get(f"{family}_bucket", ()):
            bound = _parse_bound(series.labels.get("le", ""))
            if bound is None or series.value is None:
                return None
            counts[bound] = counts.get(bound, 0.0) + series.value
        bounds = tuple(sorted(counts))
        ordered = tuple(counts[bound] for bound in bounds)
        if not bounds or bounds[-1] != math.inf or list(ordered) != sorted(ordered):
            return None
        return Histogram(bounds, ordered, self.find_value(f"{family}_sum") or 0.0)


def parse_exposition(page: str, *, prefixes: Collection[str] = ()) -> Exposition:
    """Read a page; with `prefixes`, only lines that begin with one of them are looked at.

    A last line without a line end may be cut anywhere, so it is left out.
    """
    lines = page.split("\n")
    rest = lines.pop().strip()
    truncated = bool(rest) and not rest.startswith("#")
    wanted = tuple(prefixes)
    types: dict[str, str] = {}
    texts: list[str] = []
    for line in map(str.strip, lines):
        if line.startswith("#"):
            _note_type(line, types)
        elif line and (not wanted or line.startswith(wanted)):
            texts.append(line)
    samples, dropped = _parse_samples(texts)
    series, duplicates = _collect(samples, types)
    return Exposition(series, types, dropped, duplicates, truncated)


def _note_type(line: str, types: dict[str, str]) -> None:
    if line.startswith(_TYPE_MARK):
        name, _, kind = line.removeprefix(_TYPE_MARK).strip().partition(" ")
        types[name] = kind.strip()


def _parse_samples(lines: Sequence[str]) -> tuple[list[Sample], int]:
    """Parse all lines at once, and one by one only if that fails."""
    try:
        return list(_parse("\n".join(lines))), 0
    except (ValueError, IndexError, OverflowError):
        pass  # some line is damaged; find out which
    samples: list[Sample] = []
    dropped = 0
    for line in lines:
        try:
            samples += _parse(line)
        except (ValueError, IndexError, OverflowError):
            dropped += 1
    return samples, dropped


def _parse(text: str) -> Iterator[Sample]:
    # Without # TYPE lines the parser keeps the names of samples as they are written.
    for family in text_string_to_metric_families(text):
        yield from family.samples


def _collect(
    samples: Sequence[Sample], types: Mapping[str, str]
) -> tuple[dict[str, tuple[Series, ...]], int]:
    """Group by name. Of equal series the last one counts."""
    grouped: dict[str, dict[Labels, Series]] = {}
    duplicates = 0
    for sample in samples:
        if _is_creation_time(sample.name, types):
            continue
        key = frozenset(sample.labels.items())
        rows = grouped.setdefault(sample.name, {})
        duplicates += key in rows
        rows[key] = Series(dict(sample.labels), _finite(sample.value))
    return {name: tuple(rows.values()) for name, rows in grouped.items()}, duplicates


def _is_creation_time(name: str, types: Mapping[str, str]) -> bool:
    """Whether a sample is the creation time of a counter or histogram: no measurement."""
    if not name.endswith("_created"):
        return False
    stem = name.removesuffix("_created")
    return stem in types or f"{stem}_total" in types


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an integer with hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _parse_bound(text: str) -> float | None:
    if text == _INFINITY_BOUND:
        return math.inf
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) else bound
