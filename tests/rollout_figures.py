"""What came of many simulated rollouts together, printed below the tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add up what each seed recorded, in whichever process it ran."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    runs = [
        value
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, value in report.user_properties
        if name == "rollout"
    ]
    if runs:
        terminalreporter.section("simulated rollouts")
        for line in summary_of(runs):
            terminalreporter.write_line(line)


def summary_of(runs: list[dict[str, Any]]) -> list[str]:
    """A few lines of figures."""
    faults, outcomes = _added(runs, "faults"), _added(runs, "outcomes")
    statuses = Counter(str(run["status"]) for run in runs)
    lacking = sum(bool(run["lacking"]) for run in runs)
    bad = sum(bool(run["bad"]) for run in runs)
    hours = sum(run["hours"] for run in runs)
    broken = _added([{"broken": dict.fromkeys(run["broken"], 1)} for run in runs], "broken")
    most, own = (max(run[f"worst_{name}_ratio"] for run in runs) for name in ("missing", "own"))
    beyond = sum(bool(run["over_promised"]) for run in runs)
    return [
        f"{len(runs)} rollouts, {hours:,.0f} hours of theirs, {sum(run['waves'] for run in runs):,} waves",
        f"{bad} with a bad release, {lacking} that lack something for good",
        f"ended: {_listed(statuses)}",
        f"faults: {faults.total():,}: {_listed(faults)}",
        f"actions: {_listed(outcomes)}",
        f"most missing at a time: {most:.1%} by whatever cause, {own:.1%} by a rollout's own doing",
        f"more missing by its own doing than promised: {beyond}",
        f"rules broken: {_listed(broken) or 'none'}",
    ]


def _added(runs: list[dict[str, Any]], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run[name])
    return total


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
