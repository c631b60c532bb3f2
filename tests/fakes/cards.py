"""Cards that give memory back late: an nvidia-smi over a folder, and an engine's side of the same.

Below the folder each card has a folder by its UUID, with one file for each process that took memory: its pid,
holding mebibytes. Once the process is gone its memory stays in use, in nobody's name, until it is given back.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TOTAL_MIB = 80 * 1024


class FakeCards:
    """A host with cards of 80 GiB whose nvidia-smi is on `path`."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder / "cards"
        self.tools = folder / "tools"
        self.uuids = tuple(f"GPU-{number:08d}-fake" for number in range(count))
        for uuid in self.uuids:
            (self.folder / uuid).mkdir(parents=True)
        self.tools.mkdir()
        tool = self.tools / "nvidia-smi"
        code = Path(__file__).resolve().parents[2]
        tool.write_text(
            f"#!/bin/sh\ncd '{code}' && exec '{sys.executable}' -m tests.fakes.cards '{self.folder}' \"$@\"\n"
        )
        tool.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        """What an agent needs to find the tool."""
        return {"PATH": f"{self.tools}:{os.environ['PATH']}"}

    def take(self, uuid: str, pid: int, mebibytes: int) -> None:
        """Give memory to a process, such as one that is no replica."""
        (self.folder / uuid / str(pid)).write_text(str(mebibytes))

    def free(self, uuid: str, pid: int) -> None:
        """Take it back."""
        (self.folder / uuid / str(pid)).unlink()

    def give_back(self) -> int:
        """Free what dead processes took; returns how many there were."""
        dead = [file for file in self.folder.glob("*/*") if not _lives(int(file.name))]
        for file in dead:
            file.unlink()
        return len(dead)


def allocate(folder: Path, uuid: str, mebibytes: int) -> bool:
    """Take memory for this process; false where the card has not so much."""
    if TOTAL_MIB - used_mib(folder, uuid) < mebibytes:
        return False
    (folder / uuid / str(os.getpid())).write_text(str(mebibytes))
    return True


def used_mib(folder: Path, uuid: str) -> int:
    """In use of a card, by whomever."""
    return sum(size for _, size in _takers(folder, uuid))


def _takers(folder: Path, uuid: str) -> list[tuple[int, int]]:
    """Processes, living and dead, and what they took."""
    files = sorted((folder / uuid).iterdir())
    return [(int(file.name), int(file.read_text() or 0)) for file in files]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def main(folder: Path, arguments: list[str]) -> int:
    """Answer as nvidia-smi does."""
    uuids = sorted(path.name for path in folder.iterdir() if path.is_dir())
    match arguments:
        case ["-L"]:
            lines = [f"GPU {number}: Fake 80 (UUID: {uuid})" for number, uuid in enumerate(uuids)]
        case ["-q", "-x"]:
            cards = "".join(_element(folder, number, uuid) for number, uuid in enumerate(uuids))
            lines = [f"<nvidia_smi_log>{cards}</nvidia_smi_log>"]
        case [question, *_] if question.startswith("--query-compute-apps"):
            lines = [
                f"{uuid}, {pid}, {size}"
                for uuid in uuids
                for pid, size in _takers(folder, uuid)
                if _lives(pid)
            ]
        case [question, *_] if question.startswith("--query-gpu="):
            lines = [question.removeprefix("--query-gpu=")]
            lines += [
                f"{number}, {uuid}, Fake 80, 00000000:0{number + 1}:00.0, {TOTAL_MIB} MiB, "
                f"{used_mib(folder, uuid)} MiB, 30, 100 W, 0 %"
                for number, uuid in enumerate(uuids)
            ]
        case _:
            return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _element(folder: Path, number: int, uuid: str) -> str:
    return (
        f'<gpu id="00000000:0{number + 1}:00.0"><product_name>Fake 80</product_name><uuid>{uuid}</uuid>'
        f"<fb_memory_usage><total>{TOTAL_MIB} MiB</total><used>{used_mib(folder, uuid)} MiB</used>"
        "</fb_memory_usage></gpu>"
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
