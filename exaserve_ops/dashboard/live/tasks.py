"""Ending of asyncio tasks that may not end at the first request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

AGAIN_SECONDS = 0.2


async def until_first(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run jobs until one ends, end the others, and pass on what the ended one raised."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*tasks)
    for task in done:
        task.result()


async def end(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks until they have ended.

    The Redis client swallows a cancellation that arrives while it connects; a task that is cancelled
    once would then wait for its next message for ever, and so would we.
    """
    interrupted: asyncio.CancelledError | None = None
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=AGAIN_SECONDS)
        except asyncio.CancelledError as error:
            interrupted = error  # ours comes after theirs, or they would be left behind
        pending = {task for task in pending if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as forgotten
    if interrupted is not None:
        raise interrupted
