"""Limits of API keys, as one gateway asks for them: a lease for each open request of a limited key."""

from __future__ import annotations

import itertools
import secrets
from collections import defaultdict
from collections.abc import Callable

from exaserve_ops.adapters.quota_table import (
    RENEW_SECONDS,
    OnVerdict,
    QuotaTable,
    QuotaVerdict,
    is_limited,
)
from exaserve_ops.gateway.answers import Usage
from exaserve_ops.gateway.requests import Request
from exaserve_ops.routing.domain.prefixes import BYTES_PER_TOKEN
from exaserve_ops.routing.domain.records import KeyRecord


class QuotaLease:
    """What one request holds: a place, and the tokens of its prompt, charged ahead by their bytes."""

    __slots__ = ("_desk", "_has_ended", "_is_held", "_then", "_written_events", "charged_tokens", "id", "key")

    def __init__(self, desk: QuotaDesk, key: KeyRecord, lease_id: str, prompt_tokens: float) -> None:
        self._desk = desk
        self.key = key
        self.id = lease_id
        self.charged_tokens = prompt_tokens
        self._is_held = False
        self._has_ended = False
        self._written_events = 0
        self._then: OnVerdict | None = None

    def ask(self, then: OnVerdict) -> None:
        """Ask for it; `then` is not called once the request has ended."""
        self._then = then
        self._desk.table.admit(self.key, self.id, self.charged_tokens, self._take)

    def note_stream(self, events: int) -> None:
        """Count what a stream writes, in case nobody will have said how much that was."""
        self._written_events += events

    def end(self, usage: Usage) -> None:
        """The request is over: charge what it really used, as far as the engine said.

        It says nothing if its client leaves before the end, or asked for no usage of a stream: then each
        event counts as a token, or limits would be for those alone who stay to be charged.
        """
        self._has_ended = True
        if not self._is_held:
            return
        further = float(self._written_events)
        if usage.prompt_tokens is not None:
            further = usage.prompt_tokens + (usage.completion_tokens or 0) - self.charged_tokens
        self._desk.give_back(self, further)

    def _take(self, verdict: QuotaVerdict | None) -> None:
        self._is_held = verdict is not None and not verdict.exceeded
        if self._has_ended:  # the client left while we asked
            if self._is_held:
                self._desk.give_back(self, -self.charged_tokens)
            return
        if self._is_held:
            self._desk.held[self.id] = self
        if self._then is not None:
            self._then(verdict)


class QuotaDesk:
    """All leases of one gateway process."""

    def __init__(self, table: QuotaTable, *, clock: Callable[[], float]) -> None:
        self.table = table
        self.held: dict[str, QuotaLease] = {}
        self._clock = clock
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._renewed_at = clock()

    def lease_for(self, request: Request) -> QuotaLease | None:
        """A lease to ask for; `None` for a request whose key has no limits.

        Named by us: a request id is the caller's to choose, and could be chosen twice.
        """
        key = request.key
        if key is None or not is_limited(key):
            return None
        tokens = len(request.body) / BYTES_PER_TOKEN
        return QuotaLease(self, key, f"{self._prefix}-{next(self._numbers):x}", tokens)

    def give_back(self, lease: QuotaLease, further_tokens: float) -> None:
        """Let a place go and settle its tokens."""
        self.held.pop(lease.id, None)
        self.table.settle(lease.key, lease.id, further_tokens)

    def renew(self) -> None:
        """Keep what is held, often enough."""
        now = self._clock()
        if now - self._renewed_at < RENEW_SECONDS:
            return
        self._renewed_at = now
        by_key: defaultdict[str, list[str]] = defaultdict(list)
        for lease in self.held.values():
            by_key[lease.key.key_id].append(lease.id)
        for key_id, ids in by_key.items():
            self.table.renew(key_id, ids)
