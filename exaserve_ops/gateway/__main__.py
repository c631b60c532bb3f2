"""Entry point: `python -m exaserve_ops.gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time

import uvloop

from exaserve_ops.gateway.client import ClientConnection
from exaserve_ops.gateway.plane import DataPlane, cancel, open_redis
from exaserve_ops.gateway.settings import GatewaySettings, SettingsError, read_settings
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.lib import clock

_BACKLOG = 2048
_FIRST_POLL_SECONDS = 3.0

_log = logging.getLogger("exaserve_ops.gateway")


def main() -> int:
    """Serve until told to stop. Returns the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        settings = read_settings(os.environ)
    except SettingsError as error:
        _log.error("event=settings_invalid %s", error)
        return 2
    return uvloop.run(serve(settings))


async def serve(settings: GatewaySettings) -> int:
    """Listen, serve, and drain when told to stop. Returns the exit status."""
    loop = asyncio.get_running_loop()
    client = open_redis(settings.redis_url)
    shared = Shared(settings, client, clock=time.monotonic, wall_clock=clock.unix_seconds)
    plane = DataPlane(shared, client)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    upkeep = loop.create_task(plane.run())
    upkeep.add_done_callback(lambda _: stop.set())  # without upkeep nothing here stays true
    with contextlib.suppress(TimeoutError):  # the first request should find the table read
        async with asyncio.timeout(_FIRST_POLL_SECONDS):
            await plane.first_poll.wait()
    server = await loop.create_server(
        lambda: ClientConnection(shared), settings.host, settings.port, backlog=_BACKLOG
    )
    _log.info("event=listening host=%s port=%d", settings.host, settings.port)
    await stop.wait()
    failed = upkeep.done() and not upkeep.cancelled()
    if failed:
        _log.error("event=upkeep_failed", exc_info=upkeep.exception())
    server.close()
    await plane.drain()
    await cancel(upkeep)
    await client.aclose()
    _log.info("event=stopped")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
