"""While the fleet is up: tell what ended and came back, and keep the summary true."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from exaserve_ops.adapters.supervision import ProgramState, ProgramStatus, SupervisionError
from exaserve_ops.management.allinone.bring_up import api
from exaserve_ops.management.allinone.fleet import SUPERVISORD_STATE, Fleet
from exaserve_ops.management.allinone.readiness import DEMO

LONGEST_WAIT_SECONDS = 30.0
"""A program that does not come up is tried at least this often."""
_WATCH_SECONDS = 0.5
_WATCHES_PER_LOOK = 2


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of the programs at one moment, on the monotonic clock."""

    at_seconds: float
    pids: Mapping[str, int]
    waiting_since: Mapping[str, float]
    """When a program was first seen to wait for its next try."""


@dataclass(frozen=True, slots=True)
class News:
    """What changed between two looks."""

    lines: tuple[str, ...]
    overdue: tuple[str, ...]
    """Programs whose wait has grown too long; start them now."""


def take_look(
    before: Look | None, statuses: Mapping[str, ProgramStatus], *, now_seconds: float
) -> tuple[Look, News]:
    """Compare what runs now with what ran before."""
    earlier = before or Look(now_seconds, {}, {})
    waiting = {
        name: earlier.waiting_since.get(name, now_seconds)
        for name, status in statuses.items()
        if status.state is ProgramState.BACKOFF
    }
    overdue = tuple(name for name, since in waiting.items() if now_seconds - since >= LONGEST_WAIT_SECONDS)
    # A program between two lives keeps its old number here, so that its return is told.
    pids = {name: status.pid or earlier.pids.get(name, 0) for name, status in statuses.items()}
    lines = [
        f"{name} ended and runs again as process {pid}"
        for name, pid in pids.items()
        if earlier.pids.get(name, pid) not in {pid, 0}
    ]
    lines += [
        f"{name} does not come up: {statuses[name].description}"
        for name in waiting
        if name not in earlier.waiting_since
    ]
    still_waiting = {name: since for name, since in waiting.items() if name not in overdue}
    return Look(now_seconds, pids, still_waiting), News(tuple(lines), overdue)


def watch(fleet: Fleet) -> bool:
    """Watch until somebody asks to stop; false if the process manager itself is gone."""
    look: Look | None = None
    while not fleet.interrupts.requested:
        try:
            statuses = fleet.supervisor.statuses()
        except SupervisionError:
            return False
        last, (look, news) = look, take_look(look, statuses, now_seconds=time.monotonic())
        for line in news.lines:
            fleet.console.say(f"  ! {line}")
        for name in news.overdue:
            fleet.supervisor.stop(name)
            fleet.supervisor.start(name)
        if last is None or last.pids != look.pids:
            write_summary(fleet, look.pids)
        _pause(fleet)
    return True


def write_summary(fleet: Fleet, pids: Mapping[str, int]) -> None:
    """Write what a script needs to use the fleet, in a private file."""
    fleet.files.write_json(
        fleet.files.summary.name,
        {
            "web_url": fleet.addresses.web_url,
            "gateway_url": fleet.addresses.gateway_url,
            "api_token": api(fleet).token,
            "admin_user": "admin",
            "admin_password": fleet.files.secret("admin_password"),
            "model": DEMO if fleet.shape.with_demo else "",
            "fleet": fleet.files.fleet_id,
            "pids": {
                **pids,
                "up": os.getpid(),
                "supervisord": fleet.files.read_json(SUPERVISORD_STATE).get("pid", 0),
            },
        },
    )


def _pause(fleet: Fleet) -> None:
    for _ in range(_WATCHES_PER_LOOK):
        if not fleet.interrupts.requested:
            time.sleep(_WATCH_SECONDS)
