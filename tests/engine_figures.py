"""What each step of the tests of engines side by side took, as a table below them and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "engines"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the JSON goes."""
    parser.addoption(
        "--figures", type=Path, default=None, help="write the figures of all steps there, as JSON"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what each step recorded, with whether it passed."""
    steps = [
        {"step": value["step"], "outcome": kind, **value["figures"]}
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, ())
        if isinstance(report, pytest.TestReport)
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if not steps:
        return
    terminalreporter.section("engines side by side")
    for line in table_of(steps):
        terminalreporter.write_line(line)
    target: Path | None = config.getoption("--figures")
    if target is not None:
        target.write_text(json.dumps(steps, indent=2) + "\n")
        terminalreporter.write_line(f"written to {target}")


def table_of(steps: list[dict[str, Any]]) -> list[str]:
    """One line a step."""
    width = max(len(step["step"]) for step in steps)
    return [
        f"{step['step']:<{width}}  {step['outcome']:<6}  "
        + ", ".join(
            f"{name} {_words(value)}" for name, value in step.items() if name not in {"step", "outcome"}
        )
        for step in steps
    ]


def _words(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
