"""Reading a Prometheus text page that may be damaged, incomplete, or no such page at all.

An engine's page has the same series at every scrape and only their values change. So what stands before
a value is taken apart once and looked up from then on. What is not written the plain way is left to
prometheus_client's parser, line by line; a line that it refuses is dropped alone and counted. What is
missing stays missing: nothing here ever turns absence into 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from workers.engines.base import Histogram

Labels = frozenset[tuple[str, str]]

MOST_KNOWN_HEADS = 50_000
"""Beginnings of lines that a reader remembers: those of a few dozen replicas. Beyond, it starts anew."""
_INFINITY_BOUND = "+Inf"
BEYOND = 1e24
"""More than anything is counted to: sums of such values, and messages with them, would overflow."""
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'(?!__)[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\[\\"n])*"'
_HEAD = rf"[ \t]*(?P<name>{_NAME})(?:[ \t]*\{{(?P<labels>(?:{_LABEL}(?:,[ \t]*{_LABEL})*,?)?)\}})?"
_labels = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_escape = re.compile(r"\\(.)")
_sample = re.compile(
    rf"(?P<head>{_HEAD})[ \t]+(?P<value>[^ \t#]+)(?:[ \t]+[+-]?[0-9][0-9.eE+-]*)?[ \t]*"
    r"(?:#[ \t]*\{.*\}[ \t].*)?"  # an exemplar of OpenMetrics
)
_declaration = re.compile(rf"[ \t]*#[ \t]*TYPE[ \t]+({_NAME})[ \t]*")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}
_DECLARED_ANYHOW = ("", "histogram", "untyped", "unknown")
_ERRORS = (ValueError, IndexError, OverflowError)


class Series(NamedTuple):
    """One time series of a page. A tuple and no dataclass: hundreds are made of each page."""

    labels: Mapping[str, str]
    value: float | None
    """`None` where the page says NaN, infinity, or what no engine has counted to."""
    source: Labels
    """What tells its source from others: its labels but for `le` and ranks that all tell the same."""
    bound: float | None
    """Upper bound of a histogram's bucket, where it is one."""


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
        """Histogram of a family, added up over its sources.

        `None` if the family is absent, is declared as something else, or its buckets contradict
        one another.
        """
        if self.types.get(family, "") not in _DECLARED_ANYHOW:
            return None
        counts: dict[float, dict[Labels, float]] = {}
        for _, value, source, bound in self.series.get(f"{family}_bucket", ()):
            if bound is None or value is None:
                return None
            sources = counts.setdefault(bound, {})
            sources[source] = max(sources.get(source, 0.0), value)
        bounds = tuple(sorted(counts))
        ordered = [sum(counts[bound].values()) for bound in bounds]
        if not bounds or bounds[-1] != math.inf or ordered != sorted(ordered):
            return None
        return Histogram(bounds, tuple(ordered), highest_sum(self.series.get(f"{family}_sum", ())) or 0.0)


def highest_sum(rows: Iterable[Series]) -> float | None:
    """Sum over sources; of several series of one source, which tell the same, the highest counts."""
    highest: dict[Labels, float] = {}
    for _, value, source, _ in rows:
        if value is not None:
            highest[source] = max(highest.get(source, -math.inf), value)
    return math.fsum(highest.values()) if highest else None


class _Head:
    """What stands before a value: name and labels. One object for each series, however it is written."""

    __slots__ = ("bound", "labels", "name", "source")

    def __init__(self, name: str, labels: Mapping[str, str], replicated: frozenset[str]) -> None:
        self.name = name
        self.labels = labels
        self.source = frozenset(pair for pair in labels.items() if pair[0] not in replicated)
        self.bound = _parse_bound(labels["le"]) if "le" in labels else None


_UNWANTED: None = None
_Known = _Head | str | None
"""A series; a family whose type is declared, by its name; or what nobody asked for."""


class PageReader:
    """Reads pages of one kind of engine. May be shared by threads."""

    def __init__(
        self,
        *,
        names: Collection[str] | None = None,
        prefixes: Collection[str] = (),
        replicated: Collection[str] = (),
    ) -> None:
        """Look only for samples with these names, or names that begin so; with neither for all.

        Series that differ in `replicated` labels alone tell the same thing.
        """
        self._replicated = frozenset(("le", *replicated))
        self._names = None if names is None else frozenset(names)
        self._prefixes = tuple(prefixes)
        self._known: dict[str, _Known] = {}
        self._heads: dict[tuple[str, Labels], _Head] = {}

    def read(self, page: str) -> Exposition:
        """Read a page. A last line without a line end may be cut anywhere, so it is left out."""
        if max(len(self._known), len(self._heads)) > MOST_KNOWN_HEADS:
            self._known, self._heads = {}, {}
        lines = page.split("\n")
        rest = lines.pop().strip()
        reading = _Reading()
        known = self._known
        for line in lines:
            cut = line.rfind(" ")
            try:
                head = known[line[:cut]]
            except KeyError:
                self._read_unknown(line, reading)
                continue
            if head is _UNWANTED:
                continue
            text = line[cut + 1 :]
            if isinstance(head, str):
                reading.types[head] = text.strip()
            elif not reading.take(head, text):
                self._read_unknown(line, reading)
        return reading.finish(truncated=bool(rest) and not rest.startswith("#"))

    def _read_unknown(self, line: str, reading: _Reading) -> None:
        """Take a line apart that was never seen, and remember what stands before its value."""
        text = line.strip()
        if not text or text.startswith("#"):
            self._note(line, reading)
            return
        found = _sample.fullmatch(text)
        wanted = found is None or self._is_wanted(found["name"])
        head = None if found is None or not wanted else self._head_of(found)
        if wanted and head is None:
            self._leave_to_library(text, reading)
            return
        written = line[: line.rfind(" ")]
        if found is not None and written.strip() == found["head"]:  # nothing but the value stands behind it
            self._known[written] = head
        if found is not None and head is not None and not reading.take(head, found["value"]):
            self._leave_to_library(text, reading)

    def _note(self, line: str, reading: _Reading) -> None:
        """A comment: of interest only where it declares a type."""
        written, _, kind = line.rpartition(" ")
        found = _declaration.fullmatch(written)
        if written.strip():
            self._known[written] = _UNWANTED if found is None else found[1]
        if found is not None:
            reading.types[found[1]] = kind.strip()

    def _is_wanted(self, name: str) -> bool:
        if self._names is not None and name in self._names:
            return True
        if self._prefixes:
            return name.startswith(self._prefixes)
        return self._names is None

    def _head_of(self, found: re.Match[str]) -> _Head | None:
        """The series that a line is of; `None` if its labels contradict one another."""
        written = found["labels"] or ""
        pairs = _labels.findall(written)
        if "\\" in written:
            pairs = [(name, _escape.sub(_unescape, value)) for name, value in pairs]
        labels = dict(pairs)
        if len(labels) != len(pairs):
            return None
        return self._intern(found["name"], labels)

    def _intern(self, name: str, labels: Mapping[str, str]) -> _Head:
        key = (name, frozenset(labels.items()))
        return self._heads.setdefault(key, _Head(name, labels, self._replicated))

    def _leave_to_library(self, text: str, reading: _Reading) -> None:
        name = text.partition("{")[0].partition(" ")[0].strip()
        if name and not self._is_wanted(name):
            return
        try:
            samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        except _ERRORS:
            reading.dropped_lines += 1
            return
        for sample in samples:
            if self._is_wanted(sample.name):
                reading.take(self._intern(sample.name, sample.labels), str(sample.value))


class _Reading:
    """What one page has said so far."""

    __slots__ = ("dropped_lines", "duplicates", "types", "values")

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.values: dict[_Head, float | None] = {}
        self.dropped_lines = 0
        self.duplicates = 0

    def take(self, head: _Head, text: str) -> bool:
        """Take in a value, the last one of equal series. False if it is no number."""
        try:
            value = float(text)
        except ValueError:
            return False
        if "_" in text:  # a number to Python, and to nobody else
            return False
        self.duplicates += head in self.values
        self.values[head] = value if abs(value) < BEYOND else None  # NaN is not less either
        return True

    def finish(self, *, truncated: bool) -> Exposition:
        grouped: dict[str, list[Series]] = {}
        for head, value in self.values.items():
            grouped.setdefault(head.name, []).append(Series(head.labels, value, head.source, head.bound))
        series = {
            name: tuple(rows)
            for name, rows in grouped.items()
            if not (name.endswith("_created") and _is_creation_time(name, self.types))
        }
        return Exposition(series, self.types, self.dropped_lines, self.duplicates, truncated)


def parse_exposition(page: str, *, prefixes: Collection[str] = ()) -> Exposition:
    """Read a single page; with `prefixes`, only lines that begin with one of them are looked at.

    A last line without a line end may be cut anywhere, so it is left out.
    """
    return PageReader(prefixes=prefixes).read(page)


def _unescape(found: re.Match[str]) -> str:
    return _ESCAPED[found[1]]


def _is_creation_time(name: str, types: Mapping[str, str]) -> bool:
    """Whether a sample is the creation time of a counter or histogram: no measurement."""
    stem = name.removesuffix("_created")
    return stem in types or f"{stem}_total" in types


def _parse_bound(text: str) -> float | None:
    if text == _INFINITY_BOUND:
        return math.inf
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) else bound
