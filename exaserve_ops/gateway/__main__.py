"""Entry point: `python -m exaserve_ops.gateway [--processes N]`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

import msgspec
import uvloop

from exaserve_ops.gateway.client import ClientConnection
from exaserve_ops.gateway.plane import DataPlane, cancel, open_redis
from exaserve_ops.gateway.processes import run_all
from exaserve_ops.gateway.settings import GatewaySettings, SettingsError, read_settings
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.gateway.tls import Certificate, CertificateError
from exaserve_ops.lib import clock

_BACKLOG = 2048
_PARENT_SECONDS = 1.0
_YOUNG_OBJECTS = 20_000
"""Requests leave hardly any cycles: looking for them every 700 objects would be a tax on each."""

_log = logging.getLogger("exaserve_ops.gateway")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="exaserve_ops.gateway", description=__doc__)
    parser.add_argument("--processes", type=int, help="gateway processes on the port, one for each core")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        settings = read_settings(os.environ)
        if options.processes is not None:
            settings = msgspec.structs.replace(settings, processes=options.processes)
        if settings.processes > 1 and settings.process < 0:
            return uvloop.run(run_all(settings))
        certificate = _certificate(settings)
    except (SettingsError, CertificateError) as error:
        _log.error("event=settings_invalid %s", error)
        return 2
    return uvloop.run(serve(settings, certificate))


def _certificate(settings: GatewaySettings) -> Certificate | None:
    if not settings.tls_certificate:
        return None
    return Certificate(settings.tls_certificate, settings.tls_key)


async def serve(settings: GatewaySettings, certificate: Certificate | None = None) -> int:
    """Listen, serve, and drain when told to stop. Returns the exit status."""
    loop = asyncio.get_running_loop()
    _use_the_machine()
    client = open_redis(settings.redis_url)
    shared = Shared(settings, clock=time.monotonic, wall_clock=clock.unix_seconds)
    plane = DataPlane(shared, client)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: certificate and certificate.reload())
    upkeep = loop.create_task(plane.run())
    upkeep.add_done_callback(lambda _: stop.set())  # without upkeep nothing here stays true
    orphaned = loop.create_task(_watch_parent(settings.parent, stop))
    with contextlib.suppress(TimeoutError):  # who does not listen yet refuses nobody
        async with asyncio.timeout(settings.first_table_seconds):
            await plane.first_table.wait()
    gc.freeze()  # what is there now stays; nobody needs to look through it again
    server = await loop.create_server(
        lambda: ClientConnection(shared),
        settings.host,
        settings.port,
        backlog=_BACKLOG,
        reuse_port=settings.process >= 0,
        ssl=certificate.context if certificate else None,
    )
    _log.info("event=listening host=%s port=%d", settings.host, settings.port)
    await stop.wait()
    failed = upkeep.done() and not upkeep.cancelled()
    if failed:
        _log.error("event=upkeep_failed", exc_info=upkeep.exception())
    server.close()
    orphaned.cancel()
    await plane.drain()
    await cancel(upkeep)
    await client.aclose()
    _log.info("event=stopped")
    return int(failed)


def _use_the_machine() -> None:
    """Allow as many files as we may have, and have garbage looked for less often."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    """Stop if whoever started us is gone: nobody would ever tell us to."""
    while parent and os.getppid() == parent:  # noqa: ASYNC110 - the kernel tells of it in no other way
        await asyncio.sleep(_PARENT_SECONDS)
    if parent:
        stop.set()


if __name__ == "__main__":
    sys.exit(main())
