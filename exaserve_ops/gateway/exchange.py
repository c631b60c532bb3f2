"""One request on its way: to a replica, perhaps another one, and its answer back to the client.

Until the first byte goes to the client everything may be tried again; after it, nothing. Whatever
happens ends in `_end`, once: there the replica's count goes down and the turn is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from exaserve_ops.adapters.quota_table import QuotaVerdict
from exaserve_ops.adapters.session_table import SessionEntry
from exaserve_ops.gateway import headers, refusals
from exaserve_ops.gateway.answers import Answer, JsonAnswer, NoAnswer, StreamAnswer, interruption_of, judge
from exaserve_ops.gateway.client_port import Client
from exaserve_ops.gateway.fleet import ReplicaSlot
from exaserve_ops.gateway.framing import Frame
from exaserve_ops.gateway.phases import Phase
from exaserve_ops.gateway.record import Account
from exaserve_ops.gateway.refusals import Refusal
from exaserve_ops.gateway.requests import Request, RoutedFields
from exaserve_ops.gateway.router import Ask, Obstacle, Route
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.gateway.upstream import AnswerHead, UpstreamConnection
from exaserve_ops.gateway.waiting import Queue
from exaserve_ops.routing.domain import markdown, silence
from exaserve_ops.routing.domain.dead_engines import is_said_for_a_dead_engine

_CLIENT_GONE_STATUS = 499
"""What proxies write down for a client that left; nobody receives it."""
FIRST_SERVER_ERROR_STATUS = 500
_TOKEN_REFUSED_STATUSES = frozenset({401, 403})
_NO_ANSWER = NoAnswer()
_NOBODY_THERE = frozenset({Obstacle.NOTHING_SERVES, Obstacle.UNREACHABLE})


class Exchange:
    """State of one request from its last byte read to its answer's last byte written."""

    takes_whole = True

    __slots__ = (
        *("_account", "_answer", "_answer_line", "_ask", "_attempts_left", "_client"),
        *("_frame", "_is_long", "_last_byte_seconds", "_lease", "_obstacle", "_paused_at_seconds"),
        *("_pending_tokens", "_phase", "_request", "_shared", "_slot", "_task", "_unsent_head"),
        *("_upstream", "_wait_until_seconds", "_why_not_continued", "model"),
    )

    def __init__(
        self,
        shared: Shared,
        client: Client,
        request: Request,
        fields: RoutedFields,
        *,
        answer_line: bytes = b"",
        why_not_continued: str = "",
    ) -> None:
        """`answer_line`: a header line of ours that the client is to have.

        `why_not_continued`: what a stream that breaks off says, if that was asked for.
        """
        self._shared = shared
        self._client = client
        self._request = request
        self.model = fields.model
        self._ask = Ask(
            fields.model,
            request.session_id,
            is_batch=request.is_batch,
            is_long=request.is_long,
            prompt=fields.text,
        )
        self._pending_tokens = 0.0
        self._is_long = False
        self._account = Account(shared, request, self._ask)
        self._answer_line = answer_line
        self._why_not_continued = why_not_continued
        self._attempts_left = shared.settings.attempts
        self._lease = shared.quotas.lease_for(request)
        self._phase = Phase.ROUTING
        self._obstacle = Obstacle.NOTHING_SERVES
        self._wait_until_seconds = 0.0
        self._paused_at_seconds = 0.0
        self._last_byte_seconds = 0.0
        self._slot: ReplicaSlot | None = None
        self._upstream: UpstreamConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._frame: Frame | None = None
        self._answer: Answer = _NO_ANSWER
        self._unsent_head = b""

    # ------------------------------------------------------------------ towards a replica
    def start(self) -> None:
        """Begin; everything after this happens in call-backs."""
        self._shared.open_requests.add(self)
        if self._lease is None:
            self._route()
        else:
            self._lease.ask(self._on_verdict)

    @property
    def queue(self) -> Queue:
        """Where it stands while it waits."""
        if self._ask.is_batch:
            return Queue.BATCH
        return Queue.LONG if self._obstacle is Obstacle.LONG else Queue.INTERACTIVE

    def _on_verdict(self, verdict: QuotaVerdict | None) -> None:
        """What the key may use was asked for."""
        try:
            if verdict is not None and verdict.exceeded:
                self._fail(refusals.quota_exceeded(verdict.exceeded, verdict.retry_after_seconds))
            else:
                self._route()
        except Exception as error:  # noqa: BLE001 - others wait for their verdicts behind this call-back
            self._note_fault(error)

    def wake(self) -> bool:
        """Try again after waiting. Returns whether it went on."""
        route = self._shared.router.pick(self._ask)
        if isinstance(route, Obstacle):
            self._obstacle = route
            return False
        self._follow(route)
        return True

    def _route(self) -> None:
        self._phase = Phase.ROUTING
        if (route := self._shared.router.recall(self._ask, self._on_word)) is not None:
            self._go(route)
        elif not self._shared.router.look(self._ask, self._on_entry):
            self._follow(self._shared.router.pick(self._ask))

    def _on_entry(self, entry: SessionEntry | None) -> None:
        """The session table answered, or did not in time."""
        if self._phase is not Phase.ROUTING:
            return  # the client has left meanwhile
        try:
            self._shared.router.note_entry(self._ask, entry)
            self._follow(self._shared.router.pick(self._ask))
        except Exception as error:  # noqa: BLE001 - others wait for their entries behind this call-back
            self._note_fault(error)

    def _on_word(self, entry: SessionEntry | None) -> None:
        """The session table has a word on a turn that left for the owner of a moment ago."""
        try:
            self._shared.router.note_entry(self._ask, entry)
            if entry is not None and self._slot is not None and entry.owner != self._slot.owner:
                self._take_back()
        except Exception as error:  # noqa: BLE001 - others wait for their entries behind this call-back
            self._note_fault(error)

    def _take_back(self) -> None:
        """The session has moved: take the turn to its new owner, if the former one has said nothing yet."""
        connection = self._upstream
        if connection is None or connection.has_spoken:
            return  # its answer is as good; the next turn follows the table
        self._shared.counters.turns_taken_back += 1
        self._account.attempts -= 1  # nothing failed
        self._attempts_left += 1
        self._upstream = None
        connection.abort()
        self._release()
        self._route()

    def _follow(self, route: Route | Obstacle) -> None:
        """Wait, have the session table agree, or go."""
        if isinstance(route, Obstacle):
            self._wait(route)
            return
        self._shared.waiting.discard(self)
        self._phase = Phase.ROUTING
        if not self._shared.router.propose(self._ask, route, self._on_entry):
            self._go(route)

    def _wait(self, obstacle: Obstacle) -> None:
        self._obstacle = obstacle
        self._phase = Phase.WAITING
        if not self._wait_until_seconds:
            self._wait_until_seconds = self._shared.clock() + self._patience_seconds(obstacle)
        if not self._shared.waiting.add(self):
            self._fail(refusals.WAITING_ROOM_FULL)

    def _patience_seconds(self, obstacle: Obstacle) -> float:
        shared, settings = self._shared, self._shared.settings
        patience = {
            Queue.INTERACTIVE: settings.wait_seconds,
            Queue.LONG: settings.long_wait_seconds,
            Queue.BATCH: settings.batch_wait_seconds,
        }[self.queue]
        is_first = obstacle in _NOBODY_THERE and shared.fleet.is_coming(self.model)
        if is_first and shared.waiting.is_half_free:
            return max(patience, settings.first_replica_seconds)
        return patience

    def _go(self, route: Route) -> None:
        slot = route.replica
        self._slot = slot
        self._account.why = self._why_of(route)
        self._account.attempts += 1
        self._attempts_left -= 1
        slot.acquire()
        pending_tokens = self._pending_tokens = self._ask.uncached_tokens
        slot.pending_tokens += pending_tokens
        self._is_long = self._shared.router.take_long_place(self._ask, slot, pending_tokens)
        self._shared.router.note_sent(self._ask, slot)
        slot.mark = markdown.note_attempt(slot.mark, self._shared.clock())
        connection = slot.pool.take()
        if connection is None:
            self._connect(slot)
        else:
            self._send(slot, connection)

    def _connect(self, slot: ReplicaSlot) -> None:
        self._phase = Phase.CONNECTING
        self._run(self._connect_and_send(slot))

    async def _connect_and_send(self, slot: ReplicaSlot) -> None:
        try:
            connection = await slot.pool.connect()
        except (OSError, TimeoutError, UnicodeError) as error:  # the last: no possible host name
            self._note_unreachable(slot, repr(error))
            return
        self._send(slot, connection)

    def _send(self, slot: ReplicaSlot, connection: UpstreamConnection) -> None:
        self._phase = Phase.SENT
        self._upstream = connection
        self._last_byte_seconds = self._shared.clock()
        request = self._request
        path, body = self._target_and_body()
        lines = request.lines
        if (connection_header := request.known.get(b"connection")) is not None:
            lines = headers.without_named(lines, connection_header)
        head = headers.engine_head(path, slot.request_prefix, lines, request.request_id, len(body))
        connection.send(self, head, body)

    def _target_and_body(self) -> tuple[bytes, bytes]:
        """What an engine is asked."""
        return self._request.path, self._request.body

    def _why_of(self, route: Route) -> str:
        """What is written down as the reason of a route."""
        return route.why

    def _note_unreachable(self, slot: ReplicaSlot, reason: str) -> None:
        """Nothing of an answer came: leave the replica alone for a while, and try another."""
        slot.mark = markdown.note_unreachable(slot.mark, self._shared.clock())
        address = f"{slot.record.host}:{slot.record.port}"
        self._account.report("replica_unreachable", slot, reason, address=address)
        self._try_another(slot)

    def _try_another(self, slot: ReplicaSlot) -> None:
        self._release()
        self._ask.tried = (*self._ask.tried, slot)
        self._ask.avoid_node = slot.record.node_id
        if self._attempts_left <= 0:
            self._fail(refusals.UNREACHABLE)
            return
        self._shared.counters.retries += 1
        self._route()

    # ------------------------------------------------------------------ the answer
    def on_head(self, head: AnswerHead) -> Frame:
        """The answer began; returns what its body is to be read by."""
        slot = self._slot
        if slot is None or self._upstream is None:
            return head.frame()
        if self._is_passed_over(head):
            self._upstream.abort()
            self._upstream = None
            self._note_unreachable(slot, f"refused with {head.status}")
            return head.frame()
        now = self._shared.clock()
        is_ill = head.status >= FIRST_SERVER_ERROR_STATUS
        slot.mark = markdown.note_ill(slot.mark, now) if is_ill else markdown.CLEAR
        self._phase = Phase.ANSWERED
        self._last_byte_seconds = now
        return self._begin_answer(head, slot)

    def _is_passed_over(self, head: AnswerHead) -> bool:
        """Whether another replica may answer instead.

        Our token, not the caller's, was refused: what is at this address is not the attempt that the
        table names, and it has done nothing.
        """
        return head.status in _TOKEN_REFUSED_STATUSES

    def _begin_answer(self, head: AnswerHead, slot: ReplicaSlot) -> Frame:
        frame = self._frame = head.frame()
        self._answer = StreamAnswer(self._why_not_continued) if head.is_stream else JsonAnswer()
        self._prepare_head(head, frame, slot)
        return frame

    def on_body(self, passed: bytes, payload: bytes) -> None:
        """Bytes for the client, and the part of the body that is in them."""
        now = self._shared.clock()
        self._last_byte_seconds = now
        slot = self._slot if self._unsent_head else None
        if slot is not None and is_said_for_a_dead_engine(self._account.status, payload):
            self._leave_dead_engine(slot)
            return
        if payload and self._account.ttft_seconds is None:
            self._account.ttft_seconds = now - self._account.started_seconds
            self._note_computed()
        if self._answer.is_stream:
            self._note_events(payload.count(b"\n\n"))
        if written := self._answer.relay(passed, payload):
            self._write(written)
        if self._answer.is_over:
            self._finish()

    def _leave_dead_engine(self, slot: ReplicaSlot) -> None:
        """The client has had nothing: another replica may answer, as where the connection dies."""
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        self._unsent_head = b""
        self._answer = _NO_ANSWER
        self._note_unreachable(slot, "its engine has died")

    def on_answer(self, head: AnswerHead, body: bytes) -> None:
        """The whole of a plain answer came at once."""
        slot, account = self._slot, self._account
        if slot is None:
            return
        self._upstream = None
        slot.mark = markdown.CLEAR
        account.ttft_seconds = self._shared.clock() - account.started_seconds
        self._answer = JsonAnswer()
        self._answer.relay(body, body)
        account.status = head.status
        self._client.write(self._head_for(head, b"content-length: %d\r\n" % len(body), slot) + body)
        self._end("ok")
        self._client.finish(keep_alive=not self._client.must_close(self._request))

    def on_read_done(self) -> None:
        """Send a head that came without a body; stop reading if the client is slow.

        That of an error waits for the body, which may say that there is no engine any more.
        """
        if self._unsent_head and self._account.status < FIRST_SERVER_ERROR_STATUS:
            self._write(b"")
        if self._client.is_paused:
            self.pause()

    def on_complete(self) -> None:
        """The answer is whole."""
        self._upstream = None
        if self._answer.is_finished():
            self._finish()
        else:
            self._interrupt("ended without [DONE]")

    def _finish(self) -> None:
        """Nothing is missing."""
        if self._unsent_head:
            self._write(b"")
        ending = self._frame.end() if self._frame else b""
        if ending:
            self._client.write(ending)
        self._end(judge(self._account.status, self._answer))
        self._client.finish(keep_alive=not self._client.must_close(self._request))

    def on_lost(self, reason: str, *, any_received: bool) -> None:
        """The connection to the engine is gone before the answer was whole."""
        connection, self._upstream = self._upstream, None
        slot = self._slot
        if slot is None or connection is None:
            return
        if self._phase is Phase.ANSWERED and not self._unsent_head:
            self._interrupt(reason)
        elif any_received:
            slot.mark = markdown.note_ill(slot.mark, self._shared.clock())
            self._fail(refusals.UPSTREAM_BROKEN, reason)
        elif connection.is_reused:
            self._connect(slot)  # closed while idle, most likely: says nothing about the replica
        else:
            self._note_unreachable(slot, reason)

    def _prepare_head(self, head: AnswerHead, frame: Frame, slot: ReplicaSlot) -> None:
        """Make the client's head, which is sent with the first bytes of the body."""
        self._account.status = head.status
        self._unsent_head = self._head_for(head, frame.header(), slot)

    def _head_for(self, head: AnswerHead, framing: bytes, slot: ReplicaSlot) -> bytes:
        return b"%b%b%b%bx-request-id: %b\r\nx-exaops-route: %b\r\n%b\r\n" % (
            head.opening,
            framing,
            slot.answer_lines,
            self._answer_line,
            self._request.request_id,
            self._account.why.encode(),
            b"connection: close\r\n" if self._client.must_close(self._request) else b"",
        )

    def _write(self, data: bytes) -> None:
        if self._unsent_head:
            data = self._unsent_head + data
            self._unsent_head = b""
        self._client.write(data)

    # ------------------------------------------------------------------ ends before its time
    def client_gone(self) -> None:
        """The client left: so does its request, at once."""
        if self._phase is Phase.ENDED:
            return
        answer = self._answer
        if answer.is_stream and answer.is_finished() and not answer.ended_in_error():
            # It had the last event and did not wait for the end of the body: nothing was missed.
            self._end("ok")
            return
        self._account.status = _CLIENT_GONE_STATUS
        self._end("client_gone")

    def give_up_at_exit(self) -> None:
        """The gateway goes before the answer is whole."""
        if self._phase is Phase.ANSWERED and not self._unsent_head:
            self._break_off("gateway stops")
        elif self._phase is not Phase.ENDED:
            self._fail(refusals.NOTHING_SERVES, "gateway stops")

    def pause(self) -> None:
        """The client is slower than the engine: read no more for now."""
        if self._upstream is not None and self._phase is Phase.ANSWERED:
            self._paused_at_seconds = self._paused_at_seconds or self._shared.clock()
            self._upstream.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self._upstream is not None and self._paused_at_seconds:
            self._paused_at_seconds = 0.0
            self._last_byte_seconds = self._shared.clock()
            self._upstream.resume()

    def sweep(self, now: float) -> None:
        """End what has waited for too long: for a replica, for an answer, for the client."""
        settings = self._shared.settings
        if self._phase is Phase.WAITING and now >= self._wait_until_seconds:
            self._fail(self._obstacle.value)
        elif (
            self._account.ttft_seconds is None
            and now - self._account.started_seconds > settings.first_byte_seconds
        ):
            self._give_up("no first byte in time")
        elif self._paused_at_seconds:
            if now - self._paused_at_seconds > settings.client_stall_seconds:
                self._client.abort()
        elif self._phase is Phase.SENT and (why := silence.why_elsewhere(self._silence(now))):
            self._go_elsewhere(why)
        elif self._phase is Phase.ANSWERED:
            self._sweep_answer(now)

    def _sweep_answer(self, now: float) -> None:
        stalled = now - self._last_byte_seconds > self._shared.settings.upstream_stall_seconds
        if why := silence.why_over(self._silence(now)):
            self._give_up(why)
        elif stalled and self._account.ttft_seconds is not None:
            self._give_up("stalled")

    def _silence(self, now: float) -> silence.Silence:
        slot = self._slot
        if slot is None:
            return silence.Silence(0.0, withdrawn=False, suspect=False)
        return silence.Silence(
            now - self._last_byte_seconds,
            withdrawn=self._shared.fleet.find(slot.name) is not slot,
            suspect=slot.record.node_suspect,
        )

    def _go_elsewhere(self, reason: str) -> None:
        """Take the request off a replica that is silent and most likely gone, if another can have it."""
        slot, connection = self._slot, self._upstream
        if slot is None or connection is None or connection.has_spoken:
            return
        if self._attempts_left <= 0:
            return  # better a late answer of this one than none
        if self._shared.router.has_other(self._ask, slot):
            self._upstream = None
            connection.abort()
            self._note_unreachable(slot, reason)

    def _give_up(self, reason: str) -> None:
        """The replica keeps us waiting."""
        if self._slot is not None and self._account.ttft_seconds is None:
            self._slot.mark = markdown.note_ill(self._slot.mark, self._shared.clock())
        if self._phase is Phase.ANSWERED and not self._unsent_head:
            self._interrupt(reason)
        else:
            self._fail(refusals.UPSTREAM_LATE, reason)

    def _fail(self, refusal: Refusal, reason: str = "") -> None:
        """Nothing was sent yet: the client gets an error of ours."""
        self._account.status = refusal.status
        if reason:
            self._account.report("request_failed", self._slot, reason)
        engine_failed = refusal in {refusals.UPSTREAM_BROKEN, refusals.UPSTREAM_LATE}
        self._end("engine_error" if engine_failed else "unavailable")
        self._client.refuse(self._request, refusal)

    def _interrupt(self, reason: str) -> None:
        """Something was sent already."""
        if self._answer.is_stream and self._answer.is_finished():
            self._finish()  # only the framing's end was missing
        else:
            self._break_off(reason)

    def _break_off(self, reason: str) -> None:
        """Say in a stream that it ends before its time; cut everything else."""
        self._account.report("answer_interrupted", self._slot, reason)
        ending = interruption_of(self._answer, self._frame)
        self._end("interrupted")
        if ending is None:
            self._client.abort()
            return
        self._client.write(ending)
        self._client.finish(keep_alive=False)

    def _end(self, outcome: str) -> None:
        """The one place where a request ends."""
        self._phase = Phase.ENDED
        shared = self._shared
        if self._wait_until_seconds:
            shared.waiting.discard(self)
        shared.open_requests.discard(self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        slot = self._slot
        usage = self._answer.usage()
        if self._lease is not None:
            self._lease.end(usage)
        self._account.close(outcome, slot, usage)
        self._release()

    def _note_events(self, count: int) -> None:
        """So many events of a stream went by."""
        self._account.streamed_events += count
        if self._lease is not None:
            self._lease.note_stream(count)

    def _note_computed(self) -> None:
        """The prompt is computed, or will not be: it keeps nobody waiting any more."""
        if self._slot is not None:
            self._slot.pending_tokens -= self._pending_tokens
        self._pending_tokens = 0.0
        if self._slot is not None and self._is_long:
            self._is_long = False
            self._shared.router.leave_long_place(self._ask, self._slot)
            self._shared.waiting.wake_long(self.model)

    def _release(self) -> None:
        self._note_computed()
        slot, self._slot = self._slot, None
        if slot is None:
            return
        slot.release()
        slot.mark = markdown.note_abandoned(slot.mark)
        self._shared.waiting.wake_one(self.model)

    # ------------------------------------------------------------------ tasks and faults
    def _run(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_fault(error)

    def _note_fault(self, error: BaseException) -> None:
        """A fault of ours must not leave a client waiting for ever."""
        self._shared.note_fault(error)
        if self._phase is not Phase.ENDED:
            self._fail(refusals.UNREACHABLE, repr(error))
