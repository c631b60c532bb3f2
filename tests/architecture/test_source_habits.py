"""Habits of the source that no linter knows: who writes statuses, and who reads the clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTROL_PLANE = ROOT / "exaserve_ops"
STATUS_FIELDS = frozenset({"status", "liveness"})
ROW_WRITERS = frozenset({"update", "create", "bulk_create", "get_or_create", "update_or_create"})
ROW_CLASSES = frozenset({"Node", "Deployment", "Replica"})


COPIES_IN_MEMORY = frozenset(
    {
        ("exaserve_ops/controllers/detection.py", "_apply"),
        ("exaserve_ops/controllers/process.py", "_load_state"),
    }
)
"""Functions that note in memory what a row says; they write none."""


@dataclass(frozen=True)
class Place:
    """Somewhere in the source."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function or 'the module'}"


class StatusWrites(ast.NodeVisitor):
    """Finds what writes a status of a row: assignments, and arguments of Django's writers."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.functions: list[str] = []
        self.found: list[Place] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node.name)
        self.generic_visit(node)
        self.functions.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [t for target in node.targets for t in ast.walk(target)]
        if any(isinstance(t, ast.Attribute) and t.attr in STATUS_FIELDS for t in names):
            self._note(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        named = {keyword.arg for keyword in node.keywords} & STATUS_FIELDS
        function = node.func
        writes_rows = isinstance(function, ast.Attribute) and function.attr in ROW_WRITERS
        makes_row = isinstance(function, ast.Name) and function.id in ROW_CLASSES
        sets = isinstance(function, ast.Name) and function.id == "setattr" and _names_status(node)
        if (named and (writes_rows or makes_row)) or sets:
            self._note(node)
        self.generic_visit(node)

    def _note(self, node: ast.stmt | ast.expr) -> None:
        self.found.append(Place(self.file, self.functions[-1] if self.functions else "", node.lineno))


def _names_status(call: ast.Call) -> bool:
    return any(isinstance(a, ast.Constant) and a.value in STATUS_FIELDS for a in call.args)


def status_writes(source: str, file: str = "x.py") -> list[Place]:
    finder = StatusWrites(file)
    finder.visit(ast.parse(source))
    return finder.found


def sources(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.py")):
        if "migrations" not in path.parts and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def of_rows(file: str) -> bool:
    """Whether a file deals with rows: domain code and processes have statuses of their own."""
    edges = (
        "exaserve_ops/gateway/",
        "exaserve_ops/adapters/",
        "exaserve_ops/management/",
        "exaserve_ops/lib/",
    )
    return "/domain/" not in file and not file.startswith(edges)


def test_statuses_are_written_in_advance_functions_of_services_alone() -> None:
    found = [p for file, text in sources(CONTROL_PLANE) if of_rows(file) for p in status_writes(text, file)]
    assert len(found) >= 3, "the scan finds not even the three functions that may"
    found = [p for p in found if (p.file, p.function) not in COPIES_IN_MEMORY]
    strays = [str(p) for p in found if not (p.function.startswith("advance_") and "/services" in p.file)]
    assert strays == []


@pytest.mark.parametrize(
    "source",
    [
        "def scale(r):\n    r.status = 'ready'",
        "def scale(r):\n    r.reason, r.status = 'x', 'ready'",
        "Replica.objects.filter(pk=1).update(status='ready')",
        "Node(liveness='dead')",
        "setattr(replica, 'status', 'ready')",
        "Deployment.objects.create(name='x', status='deleted')",
    ],
)
def test_planted_status_write_is_found(source: str) -> None:
    assert len(status_writes(source)) == 1


@pytest.mark.parametrize(
    "source", ["x = replica.status", "Replica.objects.filter(status='ready')", "f(status=1)"]
)
def test_reading_a_status_is_no_write(source: str) -> None:
    assert status_writes(source) == []


WALL_CLOCKS = frozenset({"now", "utcnow", "today", "time", "time_ns", "localtime", "gmtime"})
CLOCK_OWNERS = frozenset({"datetime", "date", "time", "timezone"})
CLOCK_FILES = frozenset({"exaserve_ops/lib/clock.py"})


def clock_reads(source: str, file: str = "x.py") -> list[Place]:
    """Calls such as `datetime.now()` and `time.time()`; not `clock.now()`, not `time.monotonic()`."""
    return [
        Place(file, "", node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WALL_CLOCKS
        and _last_name(node.func.value) in CLOCK_OWNERS
    ]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def test_the_control_plane_reads_the_wall_clock_in_one_place() -> None:
    reads = [
        str(p) for f, text in sources(CONTROL_PLANE) if f not in CLOCK_FILES for p in clock_reads(text, f)
    ]
    assert reads == []
    [(file, text)] = [(f, t) for f, t in sources(CONTROL_PLANE) if f in CLOCK_FILES]
    assert len(clock_reads(text, file)) == 2


@pytest.mark.parametrize(
    "source",
    ["datetime.now(tz=UTC)", "datetime.datetime.utcnow()", "time.time()", "timezone.now()", "date.today()"],
)
def test_planted_clock_read_is_found(source: str) -> None:
    assert len(clock_reads(source)) == 1


WALL_CLOCKS_OF_WORKERS = {
    "workers/agent/agent.py": "what a heartbeat says of the node's clock",
    "workers/engines/openai_server/replies.py": "`created` in an answer, as the OpenAI API has it",
    "workers/simulation/process.py": "the clock that simulated nodes have copies of",
}
"""One place for each program, and what for. None of them decides anything by it."""


def test_each_program_of_a_node_reads_the_wall_clock_in_one_place() -> None:
    reads = [p.file for file, text in sources(ROOT / "workers") for p in clock_reads(text, file)]
    assert sorted(reads) == sorted(WALL_CLOCKS_OF_WORKERS)
