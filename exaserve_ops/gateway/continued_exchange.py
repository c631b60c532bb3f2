"""A stream's request whose replica may die: then another one gives the rest."""

from __future__ import annotations

import math
from http import HTTPStatus

from exaserve_ops.gateway import refusals
from exaserve_ops.gateway.client_port import Client
from exaserve_ops.gateway.continuation import Continuation
from exaserve_ops.gateway.exchange import FIRST_SERVER_ERROR_STATUS, Exchange
from exaserve_ops.gateway.fleet import ReplicaSlot
from exaserve_ops.gateway.framing import CloseFrame, Frame
from exaserve_ops.gateway.phases import Phase
from exaserve_ops.gateway.refusals import Refusal
from exaserve_ops.gateway.requests import Request, RoutedFields
from exaserve_ops.gateway.router import CONTINUED, Obstacle, Route
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.gateway.upstream import AnswerHead
from exaserve_ops.routing.domain import markdown

_PASSING = frozenset({refusals.NOTHING_SERVES, refusals.UNREACHABLE, refusals.OVERLOADED})
"""What may be over in a moment."""


class ContinuedExchange(Exchange):
    """Up to the first break like any other; then it goes on from routing with what is missing."""

    __slots__ = ("_kept", "_left")
    takes_whole = False  # what answers may be the wrong thing to go on with

    def __init__(
        self,
        shared: Shared,
        client: Client,
        request: Request,
        fields: RoutedFields,
        kept: Continuation,
        *,
        answer_line: bytes,
    ) -> None:
        super().__init__(shared, client, request, fields, answer_line=answer_line)
        self._kept = kept
        self._left: tuple[ReplicaSlot, ...] = ()

    @property
    def _is_continuing(self) -> bool:
        """Whether the client has had a part."""
        return bool(self._kept.left)

    # ------------------------------------------------------------------ what is asked and answered
    def _target_and_body(self) -> tuple[bytes, bytes]:
        return self._kept.path, self._kept.body

    def _why_of(self, route: Route) -> str:
        return CONTINUED if self._is_continuing else route.why

    def _is_passed_over(self, head: AnswerHead) -> bool:
        is_ill = head.status >= FIRST_SERVER_ERROR_STATUS
        return (is_ill and self._is_continuing) or super()._is_passed_over(head)

    def _begin_answer(self, head: AnswerHead, slot: ReplicaSlot) -> Frame:
        is_kept = head.status == HTTPStatus.OK and head.is_stream
        frame = head.frame(whole_events=False)
        if self._is_continuing:
            self._note_computed()
            if not is_kept:
                self._fail(refusals.UPSTREAM_BROKEN, f"refused with {head.status}")
            return frame
        if not is_kept:
            return super()._begin_answer(head, slot)
        self._answer = self._kept
        self._frame = CloseFrame()  # what is written again has chunks of its own
        self._prepare_head(head, self._frame, slot)
        return frame

    # ------------------------------------------------------------------ when a replica breaks off
    def _interrupt(self, reason: str) -> None:
        kept, slot = self._kept, self._slot
        if self._answer is not kept or slot is None or kept.is_finished():
            super()._interrupt(reason)
        elif ending := kept.ending():
            self._write(ending)
            self._finish()
        elif why_not := kept.why_not():
            kept.give_up(why_not)
            self._break_off(reason)
        else:
            self._continue(slot, reason)

    def _continue(self, slot: ReplicaSlot, reason: str) -> None:
        self._account.report("stream_continued", slot, reason)
        now = self._shared.clock()
        if markdown.is_open(slot.mark, now):  # all its streams break at once, which is one failure
            note = markdown.note_ill if self._kept.has_failed else markdown.note_unreachable
            slot.mark = note(slot.mark, now)
        self._kept.begin_next(slot.name)
        self._account.continued_from = (*self._account.continued_from, slot.name)
        self._left = (*self._left, slot)
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        self._attempts_left = self._shared.settings.attempts
        self._paused_at_seconds = self._wait_until_seconds = 0.0
        self._try_another(slot)

    def _fail(self, refusal: Refusal, reason: str = "") -> None:
        if not self._is_continuing:
            super()._fail(refusal, reason)
        elif refusal in _PASSING and not self._shared.is_draining:
            self._wait(self._obstacle)
        else:
            self._give_up_continuing(refusal.code, reason)

    def _wait(self, obstacle: Obstacle) -> None:
        """A part is worth more patience than nothing: who could not be reached is tried again, too."""
        if self._is_continuing:
            self._ask.tried = self._left
            self._attempts_left = self._shared.settings.attempts
            self._wait_until_seconds = math.inf  # the deadline of a continuation ends it
        super()._wait(obstacle)

    def _give_up_continuing(self, code: str, reason: str = "") -> None:
        self._kept.give_up(code)
        self._break_off(reason or code)

    def sweep(self, now: float) -> None:
        """End what has waited for too long, for the next replica too."""
        if not self._kept.is_overdue(now):
            super().sweep(now)
        elif self._phase is Phase.WAITING:
            self._give_up_continuing(self._obstacle.value.code)
        else:
            self._give_up_continuing(refusals.UPSTREAM_LATE.code)

    def _end(self, outcome: str) -> None:
        self._kept.close()
        super()._end(outcome)
