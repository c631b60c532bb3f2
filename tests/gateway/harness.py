"""A gateway in the test's own loop, in front of engines that the test writes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from exaserve_ops.adapters.route_table import RouteTableWriter
from exaserve_ops.gateway.client import ClientConnection
from exaserve_ops.gateway.plane import DataPlane, cancel, open_redis
from exaserve_ops.gateway.settings import GatewaySettings
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.gateway.tls import Certificate
from exaserve_ops.lib import clock
from exaserve_ops.routing.domain.records import KeyRecord, RouteRecord
from tests.fakes.upstream import Answer, StubEngine

KEY = "sk-test-key"
SECRET = bytes(range(32))


async def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Wait until something is true; fail after a while."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - conditions here are no events
            await asyncio.sleep(0.01)


@dataclass
class Reply:
    """An answer as a client saw it."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        return str(self.json()["error"]["code"])


@dataclass
class Wire:
    """A client's bare connection, for requests that no library would send."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self) -> Reply:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        status = int(lines[0].split(" ")[1])
        try:
            return Reply(status, headers, await asyncio.wait_for(self._body(headers), 10))
        except asyncio.IncompleteReadError as error:
            return Reply(status, headers, error.partial, complete=False)
        except ConnectionResetError:
            return Reply(status, headers, b"", complete=False)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        pieces: list[bytes] = []
        while True:
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            try:
                piece = await self.reader.readexactly(size + 2)
            except asyncio.IncompleteReadError as error:
                raise asyncio.IncompleteReadError(b"".join(pieces), None) from error
            if size == 0:
                return b"".join(pieces)
            pieces.append(piece[:-2])

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        try:
            return await asyncio.wait_for(self.reader.read(-1), 10)
        except ConnectionResetError:
            return b""

    def set_reading(self, *, reading: bool) -> None:
        """Stop taking what the gateway sends, or go on."""
        transport: Any = self.writer.transport  # typed as write-only; every socket reads too
        if reading:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def close(self) -> None:
        self.writer.close()


def request_bytes(
    body: bytes | dict[str, Any],
    *,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    method: str = "POST",
    key: str | None = KEY,
) -> bytes:
    """A well-formed request."""
    if isinstance(body, dict):
        body = msgspec.json.encode(body)
    lines = {"host": "gateway", "content-type": "application/json"}
    if key is not None:
        lines["authorization"] = f"Bearer {key}"
    if body or method == "POST":
        lines["content-length"] = str(len(body))
    lines.update(headers or {})
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode("latin-1") + body


@dataclass
class Gateway:
    """One gateway that listens on a free port."""

    port: int
    shared: Shared
    plane: DataPlane
    wires: list[Wire] = field(default_factory=list)

    async def connect(self, **tls: Any) -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port, **tls))
        self.wires.append(wire)
        return wire

    async def send(self, data: bytes) -> Wire:
        wire = await self.connect()
        await wire.send(data)
        return wire

    async def ask(self, body: bytes | dict[str, Any] | None = None, **kwargs: Any) -> Reply:
        """One request on a connection of its own."""
        wire = await self.send(request_bytes({"model": "m"} if body is None else body, **kwargs))
        try:
            return await wire.reply()
        finally:
            wire.close()


@dataclass
class World:
    """A gateway or several, engines, and the route table between them."""

    redis: redis.Redis
    url: str
    records: dict[str, RouteRecord] = field(default_factory=dict)
    gateways: list[Gateway] = field(default_factory=list)
    engines: list[StubEngine] = field(default_factory=list)
    stops: list[Callable[[], Any]] = field(default_factory=list)

    @property
    def writer(self) -> RouteTableWriter:
        return RouteTableWriter(self.redis)

    def allow(self, *keys: str) -> None:
        """Make exactly these API keys valid."""
        table = {hashlib.sha256(key.encode()).hexdigest(): KeyRecord(f"id-{key}", key) for key in keys}
        self.writer.write_keys(table)

    async def gateway(
        self, *, url: str = "", certificate: Certificate | None = None, **settings: Any
    ) -> Gateway:
        """Start a gateway, and wait until it has read the table once."""
        loop = asyncio.get_running_loop()
        known = {"poll_seconds": 0.2, "wait_seconds": 1.0, **settings}
        made = GatewaySettings(port=0, redis_url=url or self.url, fleet_secret=SECRET, **known)
        client = open_redis(made.redis_url)
        shared = Shared(made, clock=time.monotonic, wall_clock=clock.unix_seconds)
        plane = DataPlane(shared, client)
        server = await loop.create_server(
            lambda: ClientConnection(shared), "127.0.0.1", 0, ssl=certificate.context if certificate else None
        )
        upkeep = loop.create_task(plane.run())

        async def stop() -> None:
            server.close()
            await cancel(upkeep)
            assert upkeep.cancelled()
            for connection in list(shared.connections):
                connection.abort()  # type: ignore[attr-defined] # the one class that is in there
            await shared.close()
            await client.aclose()

        self.stops.append(stop)
        gateway = Gateway(server.sockets[0].getsockname()[1], shared, plane)
        self.gateways.append(gateway)
        if not url:
            await eventually(lambda: shared.fleet.is_loaded and shared.keys.loaded)
        return gateway

    async def engine(self, answer: Answer, **record: Any) -> StubEngine:
        """Start an engine and put it into the table."""
        engine = await StubEngine(answer).start()
        self.engines.append(engine)
        self.put(f"r{len(self.records)}", engine.port, **record)
        return engine

    def put(self, replica_id: str, port: int, **record: Any) -> None:
        """Put a replica into the table, or change it."""
        values: dict[str, Any] = {
            "replica_id": replica_id,
            "node_id": "n0",
            "node_name": "node-0",
            "key_epoch": 1,
            "model": "m",
            "deployment": "d",
            "host": "127.0.0.1",
            "port": port,
            "attempt": 1,
            "generation": 1,
        }
        self.records[replica_id] = RouteRecord(**{**values, **record})
        self.writer.write_replicas(self.records)

    def remove(self, replica_id: str) -> None:
        """Take a replica out of the table."""
        del self.records[replica_id]
        self.writer.write_replicas(self.records)

    async def close(self) -> None:
        for gateway in self.gateways:
            for wire in gateway.wires:
                wire.writer.transport.abort()
        for stop in self.stops:
            await stop()
        for engine in self.engines:
            await engine.stop()
        await asyncio.sleep(0.02)  # the loop's last call-backs, so that no socket is left over
