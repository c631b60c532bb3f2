"""What tests of pages and sockets share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.test import Client

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.dashboard import ports
from exaserve_ops.telemetry.domain.pictures import LivePicture, LogEntry
from tests.fakes.world import make_user


@dataclass
class MemoryReader:
    """Stands in for the live store: what was put in comes out."""

    frame: bytes | None = None
    summary: bytes | None = None
    layout: bytes | None = None
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[LogEntry] = field(default_factory=list)
    frame_reads: int = 0

    def show(self, picture: LivePicture) -> None:
        self.frame, self.summary, self.layout = picture.frame, picture.summary, picture.layout

    async def fetch_frame(self) -> bytes | None:
        self.frame_reads += 1
        return self.frame

    async def fetch_summary(self) -> bytes | None:
        return self.summary

    async def fetch_log(self, replica_id: str, after: str, limit: int) -> list[LogEntry]:  # noqa: ARG002 - the port's
        return [entry for entry in self.log if entry.position > after][:limit]

    def read_node(self, node_id: str) -> dict[str, Any] | None:
        return self.nodes.get(node_id)

    def read_nodes(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        return {node_id: self.nodes[node_id] for node_id in node_ids if node_id in self.nodes}

    def read_layout(self) -> bytes | None:
        return self.layout

    def read_summary(self) -> dict[str, Any] | None:
        return None


@pytest.fixture
def reader() -> MemoryReader:
    """The reader that pages and sockets use in this test."""
    reader = MemoryReader()
    ports.live_reader.use(reader)
    ports.model_folder_reader.use(ModelFolder())
    return reader


@pytest.fixture
def operator(db: None, reader: MemoryReader) -> Client:  # noqa: ARG001 - pages read both
    client = Client()
    client.force_login(make_user("olga", "operator"))
    return client


@pytest.fixture
def viewer(db: None, reader: MemoryReader) -> Client:  # noqa: ARG001 - pages read both
    client = Client()
    client.force_login(make_user("vera", "viewer"))
    return client
