"""What both kinds of fleets have in common: load, table, events, and the clock that they share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bench.failing.chat import Talk, keep_asking
from bench.failing.record import Death, TableChange, Verdict, follow_tables, judge, summarize
from bench.failing.tables import TableWatch, redis_url_of
from bench.fleet_run import FleetRun, FleetRunError

POLL_SECONDS = 0.02
_PINNED_TRIES = 5
_EVENT_PAGES = 20


def say(text: str) -> None:
    """Tell whoever waits what goes on."""
    print(f"[{time.strftime('%X')}] {text}", file=sys.stderr, flush=True)


@dataclass
class Stage:
    """A fleet under load, whose route table is watched."""

    run: FleetRun
    watch: TableWatch
    talk: Talk
    rng: random.Random

    async def pin(self, node_id: str) -> str:
        """Open a session that lives on this node, and return its name; empty where none would."""
        for name, _ in zip(self.watch.sessions_on(node_id), range(_PINNED_TRIES), strict=False):
            asked = await self.talk.ask("turn", session_id=name)
            if asked.node_id == node_id:
                return name
        return ""

    async def until(self, condition: Callable[[], object], what: str, *, seconds: float) -> None:
        """Wait for something. Raises `FleetRunError` when it takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise FleetRunError(f"still waiting after {seconds:.0f} s: {what}")
            await asyncio.sleep(POLL_SECONDS)

    def snapshot(self) -> tuple[dict[str, str], int]:
        """The table as it is, and how many changes led to it."""
        return dict(self.watch.table), len(self.watch.changes)

    async def figures(self, before: tuple[dict[str, str], int], deaths: list[Death]) -> dict[str, Any]:
        """Figures of these deaths. `before`: a snapshot from before the first of them."""
        table, seen = before
        changes: list[TableChange] = self.watch.changes[seen:]
        verdicts = await asyncio.to_thread(read_verdicts, self.run)
        losses = follow_tables(table, changes, deaths)
        outcomes, unexplained = judge(deaths, verdicts, losses, self.talk.asked)
        for one in outcomes:
            if one.reroute_seconds is None or len(one.standby_seconds) < one.lost_replicas:
                say(f"not all was seen of {one}")
        return summarize(outcomes, self.talk.asked, unexplained)


@contextlib.asynccontextmanager
async def under_load(run: FleetRun, model: str, *, per_second: float, seed: int) -> AsyncIterator[Stage]:
    """Watch the table and ask questions for as long as the block lasts; then wait for all answers."""
    summary = run.summary()
    rng = random.Random(seed)  # noqa: S311 - no secret
    talk = Talk(summary["gateway_url"], summary["api_token"], model)
    watch = TableWatch(redis_url_of(run), model)
    going = True
    watching = asyncio.create_task(watch.run())
    stage = Stage(run, watch, talk, rng)
    try:
        await stage.until(lambda: watch.table, "the route table", seconds=60)
        load = asyncio.create_task(keep_asking(talk, per_second=per_second, may_go_on=lambda: going, rng=rng))
        try:
            yield stage
        finally:
            going = False
            await load
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def read_verdicts(run: FleetRun) -> list[Verdict]:
    """Every death that was ever written down, on the monotonic clock."""
    offset = _wall_clock_seconds() - time.monotonic()
    return [
        Verdict(row["subject_id"], datetime.fromisoformat(row["at"]).timestamp() - offset)
        for row in all_rows(run, "/api/v1/events?subject_kind=node&event=lost&page_size=500")
    ]


def all_rows(run: FleetRun, path: str) -> list[dict[str, Any]]:
    """All pages of a list of the API."""
    rows: list[dict[str, Any]] = []
    for _ in range(_EVENT_PAGES):
        page = run.get(path)
        rows += page["results"]
        if not page.get("next"):
            return rows
        path = page["next"].removeprefix(run.summary()["web_url"])
    raise FleetRunError(f"{path} does not end")


def change(run: FleetRun, path: str, content: dict[str, Any]) -> None:
    """PATCH an object of the API, at whatever generation it is."""
    summary = run.summary()
    request = urllib.request.Request(  # noqa: S310 - http, to the fleet that we started
        summary["web_url"] + path,
        data=json.dumps(content).encode(),
        headers={
            "Authorization": f"Bearer {summary['api_token']}",
            "Content-Type": "application/json",
            "If-Match": "*",
        },
        method="PATCH",
    )
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
        answer.read()


def tally(reasons: Iterable[str]) -> dict[str, int]:
    """How often each reason was given."""
    counts: dict[str, int] = {}
    for reason in reasons:
        if reason:
            counts[reason] = counts.get(reason, 0) + 1
    return counts


def _wall_clock_seconds() -> float:
    """The clock of the record, which is this machine's."""
    return datetime.now(tz=UTC).timestamp()  # noqa: TID251 - the one place, see above
