"""One reader a process: what controllers publish is fetched once and handed to every socket."""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from channels.db import database_sync_to_async
from channels.layers import get_channel_layer

from exaserve_ops.audit.models import Event
from exaserve_ops.audit.selectors import LOOKBACK_EVENTS, events_after
from exaserve_ops.dashboard.live.mailbox import Mailbox
from exaserve_ops.dashboard.live.tasks import end
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.telemetry.domain.frames import frame_numbers

logger = logging.getLogger(__name__)

GROUPS = ("live", "events")
POLL_SECONDS = 2.0
"""A lost hint costs this much at most."""
EVENTS_SECONDS = 1.0
"""Events are read and sent this often at most."""
RETRY_SECONDS = 1.0
MAX_REASON_CHARACTERS = 500


class LiveFeed:
    """Fans frames, summaries and events out to the mailboxes of this process and event loop."""

    def __init__(self) -> None:
        self._mailboxes: set[Mailbox] = set()
        self._watched_nodes: dict[Mailbox, str] = {}
        """The node whose KV memory a page shows, for those that show one."""
        self._kv: dict[str, tuple[float | None, int]] = {}
        """When and as which the newest of each watched node was reported."""
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._frame: bytes | None = None
        self._layout_version: int | None = None
        self._summary: bytes | None = None
        self._last_event_id = 0
        self._seen_events: deque[int] = deque(maxlen=4 * LOOKBACK_EVENTS)
        self._frame_hinted = asyncio.Event()
        self._events_hinted = asyncio.Event()

    @property
    def last_event_id(self) -> int:
        """Highest id of an event that was handed out; where a new reader starts."""
        return self._last_event_id

    async def join(self, mailbox: Mailbox) -> None:
        """Hand the newest of everything to a mailbox, and everything newer from now on."""
        async with self._starting:
            if not self._tasks:
                self._last_event_id = await database_sync_to_async(_newest_event_id)()
                await self._refresh_snapshots()
                jobs = (self._listen, self._follow_snapshots, self._follow_events)
                self._tasks = [asyncio.create_task(_forever(job), name="live feed") for job in jobs]
            self._mailboxes.add(mailbox)
        self.resend(mailbox)

    async def leave(self, mailbox: Mailbox) -> None:
        """Stop handing anything over; the last one to leave stops the reader."""
        async with self._starting:
            self._mailboxes.discard(mailbox)
            self._watched_nodes.pop(mailbox, None)
            if not self._mailboxes:
                tasks, self._tasks = self._tasks, []
                await end(*tasks)

    def resend(self, mailbox: Mailbox) -> None:
        """Hand the newest snapshots over again."""
        if self._layout_version is not None:
            mailbox.put("layout", _layout_message(self._layout_version))
        if self._summary is not None:
            mailbox.put("summary", _summary_message(self._summary))
        if self._frame is not None:
            mailbox.put("frame", self._frame)

    async def watch_node(self, mailbox: Mailbox, node_id: str) -> None:
        """Hand the KV memory of a node to a mailbox, now and whenever it was reported anew."""
        self._watched_nodes[mailbox] = node_id
        self._kv.pop(node_id, None)
        await self._refresh_kv()

    async def _listen(self) -> None:
        """Turn hints into flags: a burst of hints becomes one read."""
        layer = get_channel_layer()
        channel = await layer.new_channel("live")
        for group in GROUPS:
            await layer.group_add(group, channel)
        try:
            while True:
                hint = await layer.receive(channel)
                flag = self._events_hinted if hint["type"] == "live.events" else self._frame_hinted
                flag.set()
        finally:
            for group in GROUPS:
                await layer.group_discard(group, channel)

    async def _follow_snapshots(self) -> None:
        while True:
            await _set_or_timeout(self._frame_hinted)
            await self._refresh_snapshots()

    async def _follow_events(self) -> None:
        while True:
            await _set_or_timeout(self._events_hinted)
            events = await database_sync_to_async(events_after)(self._last_event_id)
            self._hand_out_events(events)
            await asyncio.sleep(EVENTS_SECONDS)

    async def _refresh_snapshots(self) -> None:
        reader = live_reader()
        frame = await reader.fetch_frame()
        if frame is not None and frame != self._frame:
            self._hand_out_frame(frame)
        summary = await reader.fetch_summary()
        if summary is not None and summary != self._summary:
            self._summary = summary
            self._put_everywhere("summary", _summary_message(summary))
        await self._refresh_kv()

    async def _refresh_kv(self) -> None:
        """One read for all nodes that anybody here looks at; what was not reported anew is not sent."""
        watched = set(self._watched_nodes.values())
        self._kv = {node_id: seen for node_id, seen in self._kv.items() if node_id in watched}
        if not watched:
            return
        for node_id, told in (await live_reader().fetch_kv(watched)).items():
            seen = (told["received_at"], told["sequence"])
            if self._kv.get(node_id) == seen:
                continue
            self._kv[node_id] = seen
            message = _kv_message(node_id, told)
            for mailbox, watched_id in self._watched_nodes.items():
                if watched_id == node_id:
                    mailbox.put("kv", message)

    def _hand_out_frame(self, frame: bytes) -> None:
        try:
            layout_version, _ = frame_numbers(frame)
        except ValueError as error:
            logger.warning("a frame that cannot be read was dropped: %s", error)
            return
        if layout_version != self._layout_version:
            self._layout_version = layout_version
            self._put_everywhere("layout", _layout_message(layout_version))
        self._frame = frame
        self._put_everywhere("frame", frame)

    def _hand_out_events(self, events: list[Event]) -> None:
        fresh = [event for event in events if event.pk not in self._seen_events]
        if not fresh:
            return
        self._seen_events.extend(event.pk for event in fresh)
        self._last_event_id = max(self._last_event_id, fresh[-1].pk)
        messages = [event_message(event) for event in fresh]
        for mailbox in self._mailboxes:
            mailbox.put_events(messages)

    def _put_everywhere(self, kind: str, message: str | bytes) -> None:
        for mailbox in self._mailboxes:
            mailbox.put(kind, message)


_FEEDS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LiveFeed] = weakref.WeakKeyDictionary()


def feed_of_this_loop() -> LiveFeed:
    """Return the feed of the running event loop: one a process in service, one a test in tests."""
    loop = asyncio.get_running_loop()
    if loop not in _FEEDS:
        _FEEDS[loop] = LiveFeed()
    return _FEEDS[loop]


def event_message(event: Event) -> dict[str, Any]:
    """One event as browsers get it; they drop ids that they have."""
    return {
        "id": event.pk,
        "at": event.at.isoformat(),
        "actor": event.actor,
        "kind": event.subject_kind,
        "subject": event.subject_id,
        "name": event.subject_name,
        "event": event.event,
        "from": event.from_status,
        "to": event.to_status,
        "reason": event.reason[:MAX_REASON_CHARACTERS],
    }


def _layout_message(version: int) -> str:
    # A layout can be over a megabyte, so the message only points to it.
    return json.dumps({"kind": "layout", "version": version})


def _summary_message(summary: bytes) -> str:
    return f'{{"kind":"summary","summary":{summary.decode()}}}'


def _kv_message(node_id: str, told: dict[str, Any]) -> str:
    body = {"kind": "kv", "node": node_id, "received_at": told["received_at"], "pools": told["pools"]}
    return json.dumps(body, separators=(",", ":"))


def _newest_event_id() -> int:
    return Event.objects.order_by("-pk").values_list("pk", flat=True).first() or 0


async def _forever(job: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await job()
        except Exception:  # the loop's top: whatever broke, viewers get frames again
            logger.exception("live feed failed; starting over")
        await asyncio.sleep(RETRY_SECONDS)


async def _set_or_timeout(flag: asyncio.Event) -> None:
    """Wait for a hint, or until it is time to look without one."""
    try:
        # Not `wait_for`: before Python 3.12 it can swallow a cancellation, and the feed never ends.
        async with asyncio.timeout(POLL_SECONDS):
            await flag.wait()
    except TimeoutError:
        return
    flag.clear()
