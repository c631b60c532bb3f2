"""What having weights on a node's disk costs: fetched, verified, activated; against `cp` and `sha256sum`.

`python -m bench.prewarm [--bytes N] [--rounds N] [--json]`. Runs of ours and of the tools take turns in one
process after another on the same files, so that a machine with other work slows all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from exaserve_ops.adapters.model_hashing import hash_files
from workers.protocol import manifest as manifests
from workers.protocol.weights import WeightsSource, WeightsState, WeightsWanted
from workers.weights.keeper import KeeperSettings, WeightsKeeper
from workers.weights.planning import StorePolicy
from workers.weights.secrets import Secrets
from workers.weights.shelf import Shelf
from workers.weights.sources.opening import open_source

SHARDS = 4
WANTED_RATIO = 1.2
_LONGEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Cost:
    """One way to get the files: medians over the rounds."""

    what: str
    seconds: float
    cpu_seconds: float
    megabytes_per_second: float


@dataclass(frozen=True, slots=True)
class Result:
    """All ways, and how ours compares with the slower of disk and hash."""

    bytes: int
    rounds: int
    costs: tuple[Cost, ...]
    ratio_to_the_slower: float
    """Ours to the slower of `cp` with sync and `sha256sum`; median of the rounds' own ratios."""
    ratio_to_both: float
    """Ours to one after the other, as a script without a store does it."""
    cpu_ratio_to_both: float
    """The same of CPU seconds, which other work on the machine changes less."""
    cpu_ratio_to_the_slower: float
    """Ours to the dearer of both tools."""
    wanted_ratio: float = WANTED_RATIO

    @property
    def well(self) -> bool:
        """Whether ours is as fast as wanted."""
        return self.ratio_to_the_slower <= self.wanted_ratio


def write_shards(folder: Path, total_bytes: int) -> None:
    """Write safetensors files of random bytes."""
    size = total_bytes // SHARDS
    folder.mkdir(parents=True)
    for number in range(SHARDS):
        header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with (folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            left = size
            while left:
                left -= file.write(os.urandom(min(left, 64 << 20)))
    (folder / "config.json").write_text("{}")


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of some work, its child processes included."""
    began, cpu = time.perf_counter(), _cpu_seconds()
    work()
    return time.perf_counter() - began, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def copy(source: Path, target: Path) -> None:
    """`cp -r`, then `sync` of what was copied: as durable as what the store activates."""
    subprocess.run(["/bin/cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["/bin/sync", *map(str, target.iterdir()), str(target)], check=True)


def checksum(source: Path) -> None:
    """`sha256sum` of all files."""
    files = [str(path) for path in sorted(source.iterdir())]
    subprocess.run(["/usr/bin/sha256sum", *files], check=True, stdout=subprocess.DEVNULL)


def fetch(source: Path, root: Path, digest: str, body: bytes) -> None:
    """Have the store fetch, verify and activate it."""
    manifest = manifests.decode(body, digest)
    shelf = Shelf(root)
    keeper = WeightsKeeper(
        shelf,
        KeeperSettings(StorePolicy(margin_bytes=0), scrub_bytes_per_second=0.0),
        read_manifest=lambda _digest: body,
        open_source=lambda told: open_source(told, Secrets(root)),
        in_use=frozenset,
    )
    place = WeightsSource(kind="folder", location=source.as_uri())
    wanted = WeightsWanted(
        revision=manifest.revision,
        manifest_digest=digest,
        total_bytes=manifest.total_bytes,
        sources=(place,),
        priority=100,
    )
    keeper.take((wanted,), 1)
    keeper.start()
    try:
        deadline = time.monotonic() + _LONGEST_SECONDS
        while keeper.verdict(manifest.revision).folder is None:
            failed = [held.reason for held in keeper.report().held if held.state is WeightsState.FAILED]
            if failed or time.monotonic() > deadline:
                raise SystemExit(f"the store did not fetch it: {failed}")
            time.sleep(0.005)
    finally:
        keeper.stop()


def measure(total_bytes: int, rounds: int, folder: Path) -> Result:
    """Take turns and compare."""
    source = folder / "source"
    write_shards(source, total_bytes)
    files = hash_files(source, sorted(path.name for path in source.iterdir()), lambda _bytes: None)
    manifest = manifests.Manifest(manifests.revision_of(files), manifests.PIECE_BYTES, files)
    digest, body = manifests.encode(manifest)
    ways: dict[str, Callable[[Path], None]] = {
        "cp + sync": lambda target: copy(source, target),
        "sha256sum": lambda _target: checksum(source),
        "store": lambda target: fetch(source, target, digest, body),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            target = folder / "target"
            taken[name].append(timed(lambda way=way, target=target: way(target)))  # type: ignore[misc]  # bound now
            shutil.rmtree(target, ignore_errors=True)
    costs = tuple(_cost(name, times, manifest.total_bytes) for name, times in taken.items())
    seconds = {name: [wall for wall, _ in times] for name, times in taken.items()}
    rows = list(zip(seconds["store"], seconds["cp + sync"], seconds["sha256sum"], strict=True))
    return Result(
        bytes=manifest.total_bytes,
        rounds=rounds,
        costs=costs,
        ratio_to_the_slower=round(statistics.median(ours / max(cp, sha) for ours, cp, sha in rows), 3),
        ratio_to_both=round(statistics.median(ours / (cp + sha) for ours, cp, sha in rows), 3),
        cpu_ratio_to_the_slower=round(
            costs[2].cpu_seconds / max(costs[0].cpu_seconds, costs[1].cpu_seconds), 3
        ),
        cpu_ratio_to_both=round(costs[2].cpu_seconds / (costs[0].cpu_seconds + costs[1].cpu_seconds), 3),
    )


def _cost(name: str, times: list[tuple[float, float]], total_bytes: int) -> Cost:
    wall = statistics.median(wall for wall, _ in times)
    cpu = statistics.median(cpu for _, cpu in times)
    return Cost(name, round(wall, 3), round(cpu, 3), round(total_bytes / wall / 1e6, 1))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prewarm-", dir=options.folder) as folder:
        result = measure(options.bytes, options.rounds, Path(folder))
    if options.json:
        print(json.dumps(asdict(result) | {"well": result.well}))
    else:
        for cost in result.costs:
            print(
                f"{cost.what:<12}{cost.seconds:>9.2f} s {cost.megabytes_per_second:>9.0f} MB/s "
                f"{cost.cpu_seconds:>8.2f} CPU s"
            )
        print(
            f"store / slower of cp + sync and sha256sum: {result.ratio_to_the_slower} (wanted {WANTED_RATIO})"
        )
    sys.exit(0 if result.well else 1)


if __name__ == "__main__":
    main()
