"""Lifecycles of validations and of their checks."""

from __future__ import annotations

from exaserve_ops.lib.lifecycle import Lifecycle, table

QUEUED = "queued"
RUNNING = "running"
GO = "go"
NO_GO = "no_go"
CANCELLED = "cancelled"

VALIDATION = Lifecycle(
    name="validation",
    initial=QUEUED,
    statuses=(QUEUED, RUNNING, GO, NO_GO, CANCELLED),
    final=frozenset({GO, NO_GO, CANCELLED}),
    transitions=table(
        [
            ("start", [QUEUED], RUNNING),
            ("pass", [RUNNING], GO),
            ("fail", [RUNNING], NO_GO),
            ("cancel", [QUEUED, RUNNING], CANCELLED),
        ]
    ),
    meanings={
        QUEUED: "Waits for another validation of the same model to end.",
        RUNNING: "Its checks run one after the other.",
        GO: "Every check that counts has passed.",
        NO_GO: "A check that counts has failed, or could not run.",
        CANCELLED: "Somebody ended it before its last check.",
    },
)

WAITING = "waiting"
CHECKING = "checking"
PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"

CHECK = Lifecycle(
    name="check",
    initial=WAITING,
    statuses=(WAITING, CHECKING, PASSED, FAILED, SKIPPED),
    final=frozenset({PASSED, FAILED, SKIPPED}),
    transitions=table(
        [
            # Again, where the controller that ran it died: a check leaves nothing behind.
            ("begin", [WAITING, CHECKING], CHECKING),
            ("pass", [WAITING, CHECKING], PASSED),
            ("fail", [WAITING, CHECKING], FAILED),
            ("skip", [WAITING, CHECKING], SKIPPED),
        ]
    ),
    meanings={
        WAITING: "Its turn has not come.",
        CHECKING: "It runs now.",
        PASSED: "What was seen is as it should be.",
        FAILED: "What was seen is not as it should be, or the engine did not answer.",
        SKIPPED: "It could not run, or does not apply; the reason says which.",
    },
)
