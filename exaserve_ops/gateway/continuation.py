"""A stream that outlives its replica: what is kept of it, and how its parts become one.

Its events are read and written again, without the token ids where only we had asked for them. When a replica
breaks off, the next one is asked for the rest, whose events get the first one's name and shape. Nothing
is sent twice, because only whole events count; nothing is missing, because text and the ids of its tokens
come in the same event.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from exaserve_ops.gateway.answers import NO_USAGE, Usage, read_usage
from exaserve_ops.gateway.continuation_plan import (
    CHAT_PATH,
    TEXT_PATH,
    ContinuationPlan,
    plan_continuation,
    why_ruled_out,
)
from exaserve_ops.gateway.counters import Counters
from exaserve_ops.gateway.event_stream import DONE, EventSplitter, data_of, write_event
from exaserve_ops.gateway.framing import chunk
from exaserve_ops.gateway.refusals import interrupted_event
from exaserve_ops.gateway.requests import Request, RoutedFields
from exaserve_ops.gateway.settings import GatewaySettings
from exaserve_ops.gateway.stop_cut import StopCut

TOO_LONG = "too long"
NO_TOKEN_IDS = "no token ids"  # noqa: S105 - a reason, no secret
UNREADABLE = "unreadable event"
TOO_OFTEN = "too often"

_ID_BYTES = 12
"""The most that one token id takes in an event, with what parts it from the next."""
_SMALL_EVENT_BYTES = 64 * 1024
_FIRST_SERVER_ERROR = 500
_CALLERS_FAULTS = frozenset({"invalid_request_error", "BadRequestError"})

Json = dict[str, Any]


class TokenBudget:
    """How many tokens all streams of one process may keep."""

    def __init__(self, limit_tokens: int, limit_each: int) -> None:
        """Allow `limit_tokens` in all, `limit_each` to one stream."""
        self.kept = 0
        self.limit_each = limit_each
        self._limit = limit_tokens

    def take(self, count: int) -> bool:
        """Count tokens in. Returns false, and counts nothing, if there is no room."""
        if self.kept + count > self._limit:
            return False
        self.kept += count
        return True


class Continuation:
    """One stream that may be continued, as an answer that is relayed and as requests that are sent."""

    is_stream = True

    def __init__(self, desk: ContinuationDesk, plan: ContinuationPlan, *, body_bytes: int) -> None:
        self._desk = desk
        self._plan = plan
        self._budget = desk.budget
        self._event_bytes = _SMALL_EVENT_BYTES + _ID_BYTES * max(desk.budget.limit_each, body_bytes)
        self._splitter = EventSplitter(self._event_bytes)
        self._cut = StopCut(plan.stops)
        self._prompt = array.array("I")
        self._tokens = array.array("I")
        self._prompt_tokens: int | None = None
        self._completion_tokens = 0
        self._tokens_before = 0  # this part
        self._part_is_chat = plan.is_chat
        self._head: Json = {}  # what all events of the stream have in common
        self._has_role = not plan.is_chat  # completions have no event for it
        self._text_ended = False  # at a stop string
        self._has_finish = False
        self._has_usage = False
        self._is_done = False
        self._error = b""
        self._usage = NO_USAGE
        self._ruled_out = ""
        self.path = CHAT_PATH if plan.is_chat else TEXT_PATH
        self.body = plan.first_body
        self.left: list[str] = []
        """Replicas that broke off, in order."""
        self.is_over = False
        """Whether it ended before its engine did."""
        self._is_moving = False  # nothing of the present part has come yet
        self._left_at_seconds = 0.0

    # ------------------------------------------------------------------ an answer
    def relay(self, passed: bytes, payload: bytes) -> bytes:  # noqa: ARG002 - an `Answer`
        """Take the next piece of the body; return what the client gets. Raises `FramingError`."""
        events = [self._rewrite(event) for event in self._splitter.feed(payload)]
        written = b"".join(events)
        return chunk(written) if written else b""

    def is_finished(self) -> bool:
        """Whether the last event was sent."""
        return self._is_done

    def ended_in_error(self) -> bool:
        """Whether that was an error of the engine's own."""
        return self._is_done and bool(self._error)

    def last_words(self) -> bytes:
        """The event that ends it before its time: the engine's own error, or ours."""
        if self._is_done:
            return b""
        return self._error or interrupted_event(self._ruled_out)

    def usage(self) -> Usage:
        """Token counts of all parts together."""
        if self._usage.prompt_tokens is not None or self._prompt_tokens is None:
            return self._usage
        return Usage(self._prompt_tokens, self._completion_tokens)

    @property
    def has_failed(self) -> bool:
        """Whether the engine itself said that it failed."""
        return bool(self._error)

    # ------------------------------------------------------------------ a request
    def why_not(self) -> str:
        """Why it cannot be continued, if it cannot."""
        if self._ruled_out:
            return self._ruled_out
        if len(self.left) >= self._desk.limit:
            return TOO_OFTEN
        return NO_TOKEN_IDS if self._completion_tokens and not self._prompt else ""

    def begin_next(self, replica_id: str) -> None:
        """Make the request for what this replica has not given."""
        self.left.append(replica_id)
        self._is_moving = True
        self._left_at_seconds = self._desk.clock()
        self._desk.counters.continuations["begun"] += 1
        self._error = b""
        self._splitter = EventSplitter(self._event_bytes)
        self._tokens_before = self._completion_tokens
        if self._completion_tokens:
            self._part_is_chat = False
            self.path = TEXT_PATH
            self.body = self._plan.rest_body(self._prompt, self._tokens)

    def is_overdue(self, now: float) -> bool:
        """Whether the next replica has been silent for too long."""
        return self._is_moving and now - self._left_at_seconds > self._desk.patience_seconds

    def give_up(self, reason: str) -> None:
        """It is not continued, or no further; the client is told why."""
        self._desk.counters.not_continued[reason] += 1
        self._rule_out(reason)

    def ending(self) -> bytes:
        """What is missing where only the end is: all tokens came, and were counted. Else nothing."""
        is_whole = self._text_ended or self._completion_tokens == self._plan.max_tokens
        if not (self._has_finish or is_whole):
            return b""
        if self._plan.includes_usage and not self._has_usage and self._prompt_tokens is None:
            return b""
        return chunk(self._end_with("stop" if self._text_ended else "length"))

    def close(self) -> None:
        """Keep nothing any more."""
        self._budget.kept -= len(self._prompt) + len(self._tokens)
        self._prompt, self._tokens = array.array("I"), array.array("I")

    # ------------------------------------------------------------------ events
    def _rewrite(self, event: bytes) -> bytes:
        if self._is_done:
            return b""
        data = data_of(event)
        if data is None:
            return event + b"\n\n"  # a comment, which keeps the connection alive
        if data == DONE:
            self._is_done = not self._error  # some say it after an error, too
            return write_event(DONE) if self._is_done else b""
        try:
            body = msgspec.json.decode(data)
            if body.get("error") is not None:
                return self._take_error(data, body["error"])
            return self._rewrite_choices(body, body["choices"])
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
            self._rule_out(UNREADABLE)
            return write_event(data)

    def _take_error(self, data: bytes, error: object) -> bytes:
        """Hold an engine's failure back, which another one may make good; pass on what is the caller's."""
        self._error = write_event(data)
        if _is_engines_fault(error):
            return b""
        self._is_done = True
        return self._error

    def _rewrite_choices(self, body: Json, choices: list[Json]) -> bytes:
        if not self._head:
            self._head = {n: v for n, v in body.items() if n not in {"choices", "usage", "prompt_token_ids"}}
        body = {**body, **self._head}
        self._take_prompt(body)
        self._take_usage(body)
        if not choices:
            return write_event(msgspec.json.encode(body))
        self._note_arrival()
        (choice,) = choices
        self._take_prompt(choice)
        delta = choice.pop("delta") if self._part_is_chat else {"content": choice.pop("text")}
        text = delta.get("content") or ""
        self._take_tokens(choice, text)
        shown, ends_here = self._cut_text(text, choice)
        self._note_others(delta)
        if self._has_role and not (shown or _says_more(body, choice)):
            return b""
        body["choices"] = [self._in_shape(choice, delta, shown)]
        self._has_role = True
        return write_event(msgspec.json.encode(body)) + (self._end_with("stop") if ends_here else b"")

    def _cut_text(self, text: str, choice: Json) -> tuple[str, bool]:
        """Return what is to be shown, and whether the text ends here without the engine's saying so."""
        shown = ""
        met = False
        if not self._text_ended:
            shown, met = self._cut.feed(text)
            self._text_ended = met
        if choice.get("finish_reason") is None:
            if not (met and self.left):
                return shown, False
            # Of a stop string that began before the break, an engine may know the rest only.
            choice["finish_reason"] = "stop"
            self._has_finish = True
            return shown, True
        self._has_finish = True
        return shown + self._cut.flush(), False

    def _in_shape(self, choice: Json, delta: Json, shown: str) -> Json:
        """Give a choice the shape that the stream began with."""
        if not self._plan.is_chat:
            return {"index": 0, "text": shown, **choice}
        if self._has_role:
            delta.pop("role", None)
        if shown or not self._has_role or (self._plan.shows_ids and "content" in delta):
            delta["content"] = shown
        else:
            delta.pop("content", None)
        return {"index": 0, "delta": delta, **choice}

    def _end_with(self, finish: str) -> bytes:
        """Write the events that end the stream, as far as they are missing."""
        events: list[bytes] = []
        if not self._has_finish:
            held = "" if self._text_ended else self._cut.flush()
            choice = {"logprobs": None, "finish_reason": finish}
            events.append(self._encode(choices=[self._in_shape(choice, {"content": held}, held)]))
        if self._plan.includes_usage and not self._has_usage:
            events.append(self._encode(choices=[], usage=self._usage_so_far()))
        self._is_done = self.is_over = True
        return b"".join(map(write_event, [*events, DONE]))

    def _encode(self, **fields: object) -> bytes:
        return msgspec.json.encode({**self._head, **fields})

    # ------------------------------------------------------------------ what is kept
    def _take_prompt(self, place: Json) -> None:
        """Take the prompt's ids; the client has them once, where they came first."""
        ids = place.pop("prompt_token_ids", None)
        if not ids or self._prompt_tokens is not None:
            return
        self._prompt_tokens = len(ids)
        self._keep(self._prompt, ids)
        if self._plan.shows_ids:
            place["prompt_token_ids"] = ids

    def _take_tokens(self, choice: Json, text: str) -> None:
        ids = choice.get("token_ids")
        if not self._plan.shows_ids:
            choice.pop("token_ids", None)
        if ids:
            self._completion_tokens += len(ids)
            self._keep(self._tokens, ids)
        elif text:
            self._rule_out(NO_TOKEN_IDS)

    def _keep(self, kept: array.array[int], ids: list[int]) -> None:
        if self._ruled_out:
            return
        fresh = array.array("I", ids)
        size = len(self._prompt) + len(self._tokens) + len(fresh)
        if size > self._budget.limit_each or not self._budget.take(len(fresh)):
            self._rule_out(TOO_LONG)
            return
        kept.extend(fresh)

    def _note_arrival(self) -> None:
        if self._is_moving:
            self._is_moving = False
            self._desk.note_resumed(self._left_at_seconds)

    def _note_others(self, delta: Json) -> None:
        """Text of another kind, such as calls of tools or reasoning, could not be put together again."""
        if any(value for name, value in delta.items() if name not in {"role", "content"}):
            self._rule_out("delta")

    def _rule_out(self, reason: str) -> None:
        self._ruled_out = self._ruled_out or reason
        self.close()

    # ------------------------------------------------------------------ token counts
    def _take_usage(self, body: Json) -> None:
        """Make the counts of a part those of the whole."""
        usage = body.get("usage")
        if usage is None:
            return
        if self._tokens_before:
            usage["completion_tokens"] += self._tokens_before
            usage["prompt_tokens"] -= self._tokens_before
            details = usage.get("prompt_tokens_details")
            if details and details.get("cached_tokens"):
                details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        self._has_usage = not body["choices"]
        self._usage = read_usage(usage)

    def _usage_so_far(self) -> Json:
        prompt, completion = self._prompt_tokens or 0, self._completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _says_more(body: Json, choice: Json) -> bool:
    """Whether an event is worth writing without any text."""
    ids = (body.get("prompt_token_ids"), choice.get("prompt_token_ids"), choice.get("token_ids"))
    return any(ids) or choice.get("finish_reason") is not None or body.get("usage") is not None


def _is_engines_fault(error: object) -> bool:
    """Whether an error in a stream says that the engine failed, and not that the request is wrong."""
    if not isinstance(error, Mapping):
        return True
    code = error.get("code")
    if isinstance(code, int):
        return code >= _FIRST_SERVER_ERROR
    return error.get("type") not in _CALLERS_FAULTS


class Opening(NamedTuple):
    """What a request that asks for continuation gets."""

    continuation: Continuation | None
    answer_line: bytes
    """Header line that tells the client."""
    why_not: str = ""
    """Why it will not be continued, though that was asked for."""


NOT_ASKED = Opening(None, b"")


class ContinuationDesk:
    """Decides which streams are kept, within one process's bounds."""

    def __init__(self, settings: GatewaySettings, counters: Counters, clock: Callable[[], float]) -> None:
        self.limit = settings.continuations
        self.patience_seconds = settings.continuation_seconds
        self.counters = counters
        self.clock = clock
        self.budget = TokenBudget(settings.continuation_tokens_in_all, settings.continuation_tokens)

    def open(self, request: Request, fields: RoutedFields) -> Opening:
        """Begin to keep a stream, if that was asked for and is possible."""
        if not request.is_continued or not fields.stream:
            return NOT_ASKED
        plan = plan_continuation(request.path, request.body)
        if isinstance(plan, str):
            self.counters.not_continued["field"] += 1
            line = b"x-exaops-continuation: refused (%b)\r\n" % plan.encode()
            return Opening(None, line, why_ruled_out(plan))
        kept = Continuation(self, plan, body_bytes=len(request.body))
        return Opening(kept, b"x-exaops-continuation: ready\r\n")

    def note_resumed(self, left_at_seconds: float) -> None:
        """The first piece came from the next replica."""
        self.counters.continuations["resumed"] += 1
        self.counters.continuation_gap_seconds += self.clock() - left_at_seconds
