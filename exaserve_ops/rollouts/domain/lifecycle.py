"""Lifecycles of rollouts and of their waves."""

from __future__ import annotations

from exaserve_ops.lib.lifecycle import Lifecycle, table

PLANNED = "planned"
RUNNING = "running"
PAUSED = "paused"
HALTED = "halted"
ROLLING_BACK = "rolling_back"
DONE = "done"
ROLLED_BACK = "rolled_back"
CANCELLED = "cancelled"

_BEGUN = (RUNNING, PAUSED, HALTED, ROLLING_BACK)

ROLLOUT = Lifecycle(
    name="rollout",
    initial=PLANNED,
    statuses=(PLANNED, RUNNING, PAUSED, HALTED, ROLLING_BACK, DONE, ROLLED_BACK, CANCELLED),
    final=frozenset({DONE, ROLLED_BACK, CANCELLED}),
    transitions=table(
        [
            ("start", [PLANNED], RUNNING),
            ("approve", [PLANNED], RUNNING),
            ("cancel", [PLANNED], CANCELLED),
            ("pause", [RUNNING], PAUSED),
            # A wave was chosen to wait for a person.
            ("hold", [RUNNING], PAUSED),
            ("halt", [RUNNING, PAUSED], HALTED),
            ("resume", [PAUSED, HALTED], RUNNING),
            ("roll_back", [RUNNING, PAUSED, HALTED], ROLLING_BACK),
            ("finish", [RUNNING], DONE),
            ("finish_back", [ROLLING_BACK], ROLLED_BACK),
            # Its deployment is being deleted.
            ("abandon", [PLANNED, *_BEGUN], CANCELLED),
        ]
    ),
    meanings={
        PLANNED: "Waits for the approval of a second person.",
        RUNNING: "Replicas make way wave by wave.",
        PAUSED: "Nothing more begins until somebody lets it go on.",
        HALTED: "Something spoke against it: nothing more begins until somebody decides.",
        ROLLING_BACK: "Replicas of the new release make way for the old one.",
        DONE: "All replicas run the new release.",
        ROLLED_BACK: "All replicas run the old release again.",
        CANCELLED: "Ended before its time: never begun, or its deployment was deleted.",
    },
)

WAITING = "waiting"
PREWARMING = "prewarming"
MOVING = "moving"
SOAKING = "soaking"
PASSED = "passed"
FAILED = "failed"

WAVE = Lifecycle(
    name="wave",
    initial=WAITING,
    statuses=(WAITING, PREWARMING, MOVING, SOAKING, PASSED, FAILED),
    final=frozenset({PASSED}),
    transitions=table(
        [
            ("open", [WAITING], PREWARMING),
            ("begin", [PREWARMING], MOVING),
            ("soak", [MOVING], SOAKING),
            ("pass", [PREWARMING, SOAKING], PASSED),
            # Nothing of the new release is left of it: others of its domain try it.
            ("reopen", [MOVING, SOAKING], WAITING),
            ("fail", [PREWARMING, MOVING, SOAKING], FAILED),
            # Somebody lets a halted rollout go on: what failed is tried again.
            ("retry", [FAILED], MOVING),
        ]
    ),
    meanings={
        WAITING: "Its turn has not come.",
        PREWARMING: "Weights are brought to its nodes.",
        MOVING: "Its replicas make way one after the other.",
        SOAKING: "All of it runs the new release, and is watched.",
        PASSED: "Nothing spoke against it.",
        FAILED: "A gate stayed closed.",
    },
)
