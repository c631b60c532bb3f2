"""A replica of a KV pool in a process of its own, which does as it is told, line by line.

`python kv_tenant.py FOLDER REPLICA ATTEMPT BROUGHT_BLOCKS MINIMUM_BLOCKS LAYOUT HOLDER`, with `-` for no
minimum, and for no holder. HOLDER is where the holder of the pool's memory listens.
Each line is a command in JSON and is answered by one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fakes.cuda_library import open_memory
from workers.kv.arena import CpuArena, FileArenas
from workers.kv.held_arena import HeldArena, HeldArenas
from workers.kv.holder_link import HolderLink
from workers.kv.layout import KvLayout
from workers.kv.lease import PoolMember, Terms, Use, join

LAYOUT = KvLayout(layers=2, kv_heads=1, head_size=16, dtype="float32")
"""4 KiB a block, 64 KiB an extent."""
PATIENCE_SECONDS = 40.0


class Tenant:
    """The test's end of such a process."""

    def __init__(
        self,
        folder: Path,
        replica_id: str,
        *,
        brought: int,
        minimum: int | None = None,
        layout: KvLayout = LAYOUT,
        holder: Path | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                str(folder),
                replica_id,
                "1",
                str(brought),
                str(minimum or "-"),
                json.dumps(asdict(layout)),
                str(holder or "-"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self.read() == "joined"

    def ask(self, command: str, **arguments: object) -> Any:
        """Send a command and return the answer; `None` if the process died of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def memory_of(member: PoolMember, extent: int) -> int:
    """Address of an extent, whether or not it is leased."""
    arena = member.arena
    assert isinstance(arena, CpuArena | HeldArena)
    return arena.address + extent * arena.extent_bytes


def fill(member: PoolMember, extent: int, value: int) -> None:
    """Overwrite an extent."""
    ctypes.memset(memory_of(member, extent), value, member.arena.extent_bytes)


def content(member: PoolMember, extent: int) -> set[int]:
    """Values of all bytes of an extent."""
    return set(ctypes.string_at(memory_of(member, extent), member.arena.extent_bytes))


def patient_link(holder: Path) -> HolderLink:
    """A connection that a busy machine does not break."""
    return HolderLink(holder, greeting_seconds=PATIENCE_SECONDS, answer_seconds=PATIENCE_SECONDS)


def held_arenas(holder: Path) -> HeldArenas:
    """Arenas of a holder, over the kind of memory that it says it has."""
    link = patient_link(holder)
    return HeldArenas(open_memory(link.hello.kind), link)


def take(member: PoolMember, *, count: int, needed: int, live: int = 0) -> list[int]:
    return member.take(count, Use(live=live, needed=needed))


def give(member: PoolMember, *, extents: list[int]) -> None:
    member.give(extents, Use())


def fill_all(member: PoolMember, *, extents: list[int], value: int) -> None:
    for extent in extents:
        fill(member, extent, value)


def read_all(member: PoolMember, *, extents: list[int]) -> list[int]:
    return sorted(set().union(*(content(member, extent) for extent in extents)))


def write_for_ever(member: PoolMember, *, extents: list[int], value: int) -> None:
    say(answer=True)
    while True:
        fill_all(member, extents=extents, value=value)


def churn(member: PoolMember) -> None:
    say(answer=True)
    while True:
        member.give(member.take(2, Use(needed=64)), Use())


COMMANDS: dict[str, Callable[..., Any]] = {
    "take": take,
    "give": give,
    "fill": fill_all,
    "content": read_all,
    "write_for_ever": write_for_ever,
    "churn": churn,
}


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Join and follow commands."""
    folder, replica_id, attempt, brought, minimum, shape, holder = sys.argv[1:]
    terms = Terms(int(brought), None if minimum == "-" else int(minimum))
    arenas = FileArenas() if holder == "-" else held_arenas(Path(holder))
    layout = KvLayout(**json.loads(shape))
    member = join(Path(folder), layout, replica_id, int(attempt), terms, arenas=arenas)
    say("joined")
    for line in sys.stdin:
        command, arguments = json.loads(line)
        answer = COMMANDS[command](member, **arguments)
        say(answer)


if __name__ == "__main__":
    main()
