"""Weights of new work, from reports as they come in."""

from __future__ import annotations

from typing import cast

from exaserve_ops.controllers.feedback import LOOK_SECONDS, Feedback
from exaserve_ops.serving.domain.observed import ObservedReplica, ReplicaLoad
from workers.protocol.observed import ReplicaTelemetry

DEPLOYMENTS = {"a": "chat", "b": "chat", "c": "code"}


def seen(name: str, *, attempt: int = 1, used: float | None = 0.1, waiting: int = 0) -> ObservedReplica:
    load = ReplicaTelemetry(
        window_seconds=5.0, kv_used_ratio=used, requests_running=4, requests_waiting=waiting
    )
    return ObservedReplica(name, 1, "ready", attempt=attempt, load=cast("ReplicaLoad", load))


def warmed(feedback: Feedback, *names: str) -> float:
    """Report well until nobody is new any more; returns the time."""
    now = 0.0
    for _ in range(15):
        feedback.look([seen(name) for name in names], DEPLOYMENTS, now)
        now += LOOK_SECONDS
    return now


def test_full_replica_gets_less_than_its_peer_and_the_reason_is_kept() -> None:
    feedback = Feedback()
    now = warmed(feedback, "a", "b")
    assert {name: weight.value for name, weight in feedback.weights.items()} == {"a": 1.0, "b": 1.0}
    for _ in range(6):
        feedback.look([seen("a", used=0.99), seen("b")], DEPLOYMENTS, now)
        now += LOOK_SECONDS
    assert feedback.weights["a"].value < 0.2
    assert feedback.weights["a"].why == "KV memory is nearly full"
    assert feedback.weights["b"].value == 1.0


def test_restarted_replica_starts_slowly_again() -> None:
    feedback = Feedback()
    now = warmed(feedback, "a", "b")
    weights = feedback.look([seen("a", attempt=2), seen("b")], DEPLOYMENTS, now)
    assert weights["a"].value < 0.2
    assert weights["a"].why == "started a moment ago"
    assert weights["b"].value == 1.0


def test_silent_replicas_and_those_that_do_not_serve_have_no_weight() -> None:
    feedback = Feedback()
    now = warmed(feedback, "a", "b")
    weights = feedback.look([seen("a"), seen("standby"), ObservedReplica("b", 1, "ready")], DEPLOYMENTS, now)
    assert set(weights) == {"a"}


def test_looks_are_spaced() -> None:
    feedback = Feedback()
    first = feedback.look([seen("a")], DEPLOYMENTS, 0.0)
    assert feedback.look([seen("a"), seen("b")], DEPLOYMENTS, LOOK_SECONDS / 2) is first
    assert set(feedback.look([seen("a"), seen("b")], DEPLOYMENTS, LOOK_SECONDS)) == {"a", "b"}
