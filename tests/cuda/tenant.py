"""A replica with tensors over a pool that a holder lends, in a process of its own, told what to do.

`python tenant.py FOLDER SOCKET DEVICE REPLICA`. Each line is a command in JSON, answered by one of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from workers.engines.torch_engine.borrowed_memory import tensor_over
from workers.engines.torch_engine.holder_place import open_place
from workers.kv.held_arena import HeldArena, HeldArenas
from workers.kv.layout import KvLayout
from workers.kv.lease import PoolMember, Terms, Use, join

BROUGHT_EXTENTS = 8


class DeviceTenant:
    """A member of a pool whose memory is a tensor."""

    def __init__(self, folder: Path, socket: Path, device: torch.device, replica_id: str) -> None:
        place = open_place(socket, device)
        hello = place.link.hello
        self.layout = KvLayout(
            layers=4,
            kv_heads=8,
            head_size=128,
            dtype="bfloat16",
            kind=hello.accelerator,
            page_bytes=hello.page_bytes,
        )
        size = self.layout.extent_blocks
        arenas = HeldArenas(place.memory, place.link)
        self.member: PoolMember = join(
            folder, self.layout, replica_id, 1, Terms(BROUGHT_EXTENTS * size), arenas=arenas
        )
        arena = self.member.arena
        assert isinstance(arena, HeldArena)
        self.memory = tensor_over(arena.address, arena.size_bytes, device)
        self._device = device

    def take(self, count: int) -> list[int]:
        size = self.layout.extent_blocks
        held = len(self.member.extents)
        return self.member.take(count, Use(live=held * size, needed=(held + count) * size))

    def give(self, extents: list[int]) -> None:
        self.member.give(extents, Use())

    def fill(self, extents: list[int], value: int) -> None:
        for extent in extents:
            self.of(extent).fill_(value)
        self.wait()

    def content(self, extents: list[int]) -> list[int]:
        found = torch.cat([self.of(extent).unique() for extent in extents]).unique()
        return [int(value) for value in found.cpu()]

    def of(self, extent: int) -> torch.Tensor:
        size = self.layout.extent_bytes
        return self.memory[extent * size : (extent + 1) * size]

    def wait(self) -> None:
        """Errors of kernels show when they are waited for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class TenantProcess:
    """The test's end of such a process."""

    def __init__(self, folder: Path, socket: Path, device: torch.device, replica_id: str) -> None:
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.tenant", str(folder), str(socket), str(device), replica_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        assert self._read() == "joined"

    def ask(self, command: str, *arguments: object) -> Any:
        """Send a command and return the answer; `None` if the process died of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def main() -> None:
    """Join and follow commands."""
    folder, socket, device, replica_id = sys.argv[1:]
    tenant = DeviceTenant(Path(folder), Path(socket), torch.device(device), replica_id)
    print(json.dumps("joined"), flush=True)  # noqa: T201 - the test reads it
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer = getattr(tenant, command)(*arguments)
        print(json.dumps(answer), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
