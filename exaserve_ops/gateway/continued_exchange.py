"""A stream's request whose replica may die: then another one gives the rest."""

from __future__ import annotations

from http import HTTPStatus

from exaserve_ops.gateway import refusals
from exaserve_ops.gateway.client_port import Client
from exaserve_ops.gateway.continuation import Continuation
from exaserve_ops.gateway.exchange import FIRST_SERVER_ERROR_STATUS, Exchange
from exaserve_ops.gateway.fleet import ReplicaSlot
from exaserve_ops.gateway.framing import CloseFrame, Frame
from exaserve_ops.gateway.refusals import Refusal
from exaserve_ops.gateway.requests import Request, RoutedFields
from exaserve_ops.gateway.router import CONTINUED, Route
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.gateway.upstream import AnswerHead
from exaserve_ops.routing.domain import markdown


class ContinuedExchange(Exchange):
    """Up to the first break like any other; then it goes on from routing with what is missing."""

    __slots__ = ("_kept",)
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
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        self._attempts_left = self._shared.settings.attempts
        self._paused_at_seconds = self._wait_until_seconds = 0.0
        self._try_another(slot)

    def _fail(self, refusal: Refusal, reason: str = "") -> None:
        if not self._is_continuing:
            super()._fail(refusal, reason)
            return
        self._kept.give_up(refusal.code)
        self._break_off(reason or refusal.code)

    def sweep(self, now: float) -> None:
        """End what has waited for too long, for the next replica too."""
        if self._kept.is_overdue(now):
            self._fail(refusals.UPSTREAM_LATE)
        else:
            super().sweep(now)

    def _end(self, outcome: str) -> None:
        self._kept.close()
        super()._end(outcome)
