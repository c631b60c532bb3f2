"""What is known of a request for its record, and the record that is made of it."""

from __future__ import annotations

from exaserve_ops.adapters.turn_log import Turn
from exaserve_ops.gateway.answers import Usage
from exaserve_ops.gateway.fleet import STICKY, ReplicaSlot
from exaserve_ops.gateway.requests import Request
from exaserve_ops.gateway.router import Ask
from exaserve_ops.gateway.shared import Shared


class Account:
    """One request's times, attempts and end."""

    __slots__ = (
        *("_ask", "_request", "_shared", "_started_at_unix_seconds"),
        *(
            "attempts",
            "continued_from",
            "started_seconds",
            "status",
            "streamed_events",
            "ttft_seconds",
            "why",
        ),
    )

    def __init__(self, shared: Shared, request: Request, ask: Ask) -> None:
        """The request begins now."""
        self._shared = shared
        self._request = request
        self._ask = ask
        self._started_at_unix_seconds = shared.wall_clock()
        self.started_seconds = shared.clock()
        self.ttft_seconds: float | None = None
        self.streamed_events = 0
        self.attempts = 0
        self.status = 0
        self.why = ""
        self.continued_from: tuple[str, ...] = ()
        """Replicas that broke off in the middle of the answer."""

    def close(self, outcome: str, slot: ReplicaSlot | None, usage: Usage) -> None:
        """Count it, and write it down as a turn."""
        shared, request, ask = self._shared, self._request, self._ask
        shared.counters.outcomes[outcome] += 1
        if ask.entry is not None:
            if ask.entry.turns > 1 or self.why == STICKY:
                shared.counters.returning_turns += 1
                is_owner = slot is not None and slot.owner == ask.entry.owner
                shared.counters.sticky_turns += self.why == STICKY and is_owner
            if usage.prompt_tokens is not None:
                context_tokens = usage.prompt_tokens + (usage.completion_tokens or 0)
                shared.sessions.note_context(ask.model, request.session_id, context_tokens)
        shared.turns.add(
            Turn(
                request.request_id.decode(),
                request.session_id,
                ask.model,
                slot.name if slot else "",
                slot.record.node_id if slot else "",
                request.key.key_id if request.key else "",
                request.path.decode(),
                self._started_at_unix_seconds,
                shared.clock() - self.started_seconds,
                self.ttft_seconds,
                outcome,
                self.status,
                self.why,
                self.attempts,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                self.continued_from,
                self.streamed_events,
            )
        )

    def report(self, event: str, slot: ReplicaSlot | None, reason: str, **fields: object) -> None:
        """Say what went wrong on its way."""
        self._shared.problems.report(
            event,
            self._shared.clock(),
            replica=slot.name if slot else "none",
            request=self._request.request_id.decode(),
            reason=reason,
            **fields,
        )
