"""Keeps what the weights of new work are made of between two looks, and works them out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from exaserve_ops.routing.domain.feedback import (
    Average,
    FeedbackPolicy,
    Reading,
    Weight,
    fold,
    weigh_group,
)
from exaserve_ops.serving.domain.observed import ObservedReplica, ReplicaLoad

LOOK_SECONDS = 2.0
"""Gateways read no more often."""

_Key = tuple[str, int]
"""Replica and attempt: what was started again starts slowly again."""


class Feedback:
    """Weights of all replicas, renewed every two seconds. Used by one thread.

    Kept in memory alone: a new leader begins with what the next reports say, alike for all.
    """

    def __init__(self, policy: FeedbackPolicy | None = None) -> None:
        self._policy = policy or FeedbackPolicy()
        self._averages: dict[str, dict[_Key, Average]] = {}
        """By deployment."""
        self._looked_at = float("-inf")
        self.weights: Mapping[str, Weight] = {}
        """By replica, of those that reported lately and may serve."""

    def look(
        self, replicas: Iterable[ObservedReplica], deployments: Mapping[str, str], now: float
    ) -> Mapping[str, Weight]:
        """Take in fresh reports of replicas, whose deployments are given by id; return the weights.

        What is in no deployment's table any more, or said nothing this time, is forgotten.
        """
        if now - self._looked_at < LOOK_SECONDS:
            return self.weights
        self._looked_at = now
        before = self._averages
        groups: defaultdict[str, dict[_Key, Average]] = defaultdict(dict)
        for seen in replicas:
            deployment = deployments.get(seen.replica_id)
            if deployment is not None and seen.load is not None:
                key = (seen.replica_id, seen.attempt)
                old = before.get(deployment, {}).get(key)
                groups[deployment][key] = fold(old, _reading(seen.load), now, self._policy)
        self._averages = dict(groups)
        self.weights = {
            replica_id: weight
            for group in groups.values()
            for (replica_id, _), weight in weigh_group(group, now, self._policy).items()
        }
        return self.weights


def _reading(load: ReplicaLoad) -> Reading:
    return Reading(load.kv_used_ratio, load.requests_running, load.requests_waiting, load.ttft_p50_seconds)
