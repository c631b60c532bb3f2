"""Entry point: `python -m bench.swarm --json`. Needs root, for network namespaces."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from bench.swarm import faults, fluid, lan, torrent
from bench.swarm.contest import Outcome, Weights
from bench.swarm.ours import run_central, run_ours
from workers.protocol import manifest as manifests

Run = Callable[[Weights, int, float, Path, float], Outcome]
_FILE = "model.safetensors"
_FAULT_NODES = 6
_WRITE_BYTES = 16 * 1024 * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    options = _parse(arguments)
    # Ctrl-C and a plain kill both unwind, and with that take the network away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    told: dict[str, Any] = {"megabits": options.megabits, "megabytes": options.megabytes}
    reason = lan.why_not()
    if reason:
        told["not_measured"] = reason
    else:
        folder = Path(tempfile.mkdtemp(prefix="exaops-swarm-", dir=options.folder))
        try:
            told |= _measure(options, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    told |= fluid.report(fluid.Fleet())
    print(json.dumps(told, indent=2) if options.json else _table(told))
    return 0


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    weights = make_weights(folder, options.megabytes * 1_000_000, options.piece_kib * 1024)
    bound = weights.total_bytes / (options.megabits * 125_000)
    ways: dict[str, Run] = {"ours": run_ours, "libtorrent": torrent.run_libtorrent, "central": run_central}
    told: dict[str, Any] = {"bound_seconds": bound, "load_before": os.getloadavg()[0], "runs": {}}
    missing = torrent.why_not()
    if missing:
        told["libtorrent_not_measured"] = missing
        del ways["libtorrent"]
    for way in options.ways.split(","):
        if way not in ways:
            continue
        for nodes in options.nodes:
            limit = bound * (nodes + 2) * 3 + 60
            outcome = ways[way](weights, nodes, options.megabits, folder / f"{way}-{nodes}", limit)
            shutil.rmtree(folder / f"{way}-{nodes}", ignore_errors=True)
            told["runs"].setdefault(way, {})[str(nodes)] = {
                **asdict(outcome),
                "ratio_to_bound": outcome.seconds / bound,
            }
            print(f"{way} {nodes}: {outcome}", file=sys.stderr)
    for way, runs in told["runs"].items():
        prefix = "" if way == "ours" else f"{way}_"
        told[f"{prefix}worst_ratio_to_bound"] = max(run["ratio_to_bound"] for run in runs.values())
        told[f"{prefix}worst_origin_copies"] = max(run["origin_copies"] for run in runs.values())
    if options.faults:
        limit = bound * 6 + 60
        told["faults"] = faults.run_faults(weights, _FAULT_NODES, options.megabits, folder / "faults", limit)
        told["faults_finished"] = all(fault["finished"] for fault in told["faults"].values())
        told["faults_bad_bytes"] = sum(f["bad_bytes_on_whole_nodes"] for f in told["faults"].values())
    return told


def make_weights(folder: Path, total_bytes: int, piece_bytes: int) -> Weights:
    """Write one file of random bytes, and its manifest."""
    files = folder / "weights"
    files.mkdir(parents=True)
    whole, pieces = hashlib.sha256(), []
    with (files / _FILE).open("wb") as file:
        for start in range(0, total_bytes, piece_bytes):
            data = os.urandom(min(piece_bytes, total_bytes - start))
            file.write(data)
            whole.update(data)
            pieces.append(blake3(data).digest())
    listed = (manifests.ManifestFile(_FILE, total_bytes, whole.hexdigest(), b"".join(pieces)),)
    manifest = manifests.Manifest(manifests.revision_of(listed), piece_bytes, listed)
    _, encoded = manifests.encode(manifest)
    (folder / "manifest").write_bytes(encoded)
    return Weights(files, folder / "manifest", total_bytes, piece_bytes)


def _table(told: dict[str, Any]) -> str:
    lines = [f"{'':12} {'nodes':>5} {'seconds':>8} {'x bound':>8} {'CPU s':>7} {'origin copies':>14}"]
    for way, runs in told.get("runs", {}).items():
        lines.extend(
            f"{way:12} {nodes:>5} {run['seconds']:8.1f} {run['ratio_to_bound']:8.2f} "
            f"{run['cpu_seconds']:7.1f} {run['origin_copies']:14.2f}"
            for nodes, run in runs.items()
        )
    for name, fault in told.get("faults", {}).items():
        lines.append(f"{name}: {fault}")
    lines.extend(f"{key}: {value}" for key, value in told.items() if key not in ("runs", "faults"))
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.swarm", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--megabits", type=float, default=200.0, help="rate of each link, both ways")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--piece-kib", type=int, default=512)
    parser.add_argument("--ways", default="ours,libtorrent,central")
    parser.add_argument("--no-faults", dest="faults", action="store_false")
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a folder of its own is made there
    parser.add_argument("--folder", default=shared, help="where nodes keep what they get; memory by default")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
