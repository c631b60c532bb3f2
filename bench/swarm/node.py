"""One node of the benchmark: the product's own giving and taking ends, told what to do line by line.

Lines in (JSON): `{"key": hex}`, `{"follow": [[[node, host, port], …], …]}`. Lines out: `{"port": n}`,
then the status ten times a second until all is whole or has failed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.protocol import manifest as manifests
from workers.weights.swarm.member import SwarmMember
from workers.weights.swarm.parents import Parent
from workers.weights.swarm.pieces import Piece, PieceRow
from workers.weights.swarm.serving import PieceServer

_STATUS_SECONDS = 0.1
_KEY_SECONDS = 3600.0


class FolderSink:
    """Pieces straight into files of one folder."""

    def __init__(self, folder: Path, row: PieceRow, *, corrupt_every: int = 0) -> None:
        self._folder = folder
        self._corrupt_every = corrupt_every
        self._files: dict[str, int] = {}
        for file in row.manifest.files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[file.path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def write(self, piece: Piece, data: memoryview, /) -> None:
        """Write a piece; a corrupting node spoils some of them, after they were verified."""
        if self._corrupt_every and piece.index % self._corrupt_every == 0:
            data = memoryview(bytearray(data))
            data[0] ^= 0xFF
        done = 0
        while done < len(data):
            done += os.pwrite(self._files[piece.path], data[done:], piece.offset + done)

    def open_file(self, path: str, /) -> int:
        """Open one of the files for reading."""
        return os.open(self._folder / path, os.O_RDONLY)


class _Body:
    """The body of an answer, read into memory of the caller's."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def read_into(self, memory: memoryview, /) -> None:
        """Fill the memory."""
        filled = 0
        while filled < len(memory):
            count = self._response.readinto(memory[filled:])
            if not count:
                raise OSError("it ended before what it had promised")
            filled += count


class HttpOrigin:
    """Ranges of files over HTTP."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    @contextmanager
    def open_range(self, path: str, offset: int, length: int, /) -> Iterator[_Body]:
        """Begin to read a range."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=5.0)
        try:
            connection.request("GET", f"/{path}", headers={"Range": f"bytes={offset}-{offset + length - 1}"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                raise OSError(f"it answers {response.status}")
            yield _Body(response)
        except http.client.HTTPException as error:
            raise OSError(f"no proper answer: {error!r}") from error
        finally:
            connection.close()


def main() -> None:
    """Run until the standard input closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--origin", required=True)
    parser.add_argument("--corrupt-every", type=int, default=0)
    options = parser.parse_args()
    data = options.manifest.read_bytes()
    name = manifests.digest_of(data)
    row = PieceRow(manifests.decode(data, name), name)
    server = PieceServer(options.node, options.address)
    server.start()
    host, _, port = options.origin.rpartition(":")
    sink = FolderSink(options.folder, row, corrupt_every=options.corrupt_every)
    member = SwarmMember(server, row, sink, origin=HttpOrigin(host, int(port)))
    _say({"port": server.port})
    threading.Thread(target=_tell, args=(member,), daemon=True).start()
    for line in sys.stdin:
        told = json.loads(line)
        if "key" in told:
            member.keys.put(1, bytes.fromhex(told["key"]), _KEY_SECONDS)
        if "follow" in told:
            member.follow([[Parent(*parent) for parent in parents] for parents in told["follow"]])


def _tell(member: SwarmMember) -> None:
    began = time.monotonic()
    while True:
        status = member.status()
        pulls = [
            {
                "stripe": pull.stripe,
                "stage": pull.stage.value,
                "parent": pull.parent,
                "why": pull.why,
                "bytes_per_second": pull.meter.rate(),
                "starved_seconds": pull.starved_seconds,
                "bottleneck": pull.bottleneck(),
            }
            for pull in status.pulls
        ]
        _say(
            {
                "at_seconds": time.monotonic() - began,
                "have": status.have_bytes,
                "pulls": pulls,
                "origin_bytes": status.origin_bytes,
                "failure": status.failure,
                "bad": {node: s.bad_pieces for node, s in status.standings.items() if s.bad_pieces},
                "gone": [node for node, s in status.standings.items() if s.failures and not s.lives],
            }
        )
        time.sleep(_STATUS_SECONDS)


def _say(what: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()
    except OSError:
        os._exit(1)  # the benchmark is gone


if __name__ == "__main__":
    main()
