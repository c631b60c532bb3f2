"""libtorrent as the measured peer: one session a node, the origin its only seed.

Optional: `pip install libtorrent==2.1.1`, or name a folder that holds it in `EXAOPS_BENCH_LIBTORRENT`.
Run as a program it is one node; it tells its status in the lines that `bench.swarm.node` uses.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.swarm.contest import Outcome, Stage, Weights, measure, staged

_PORT = 6881
_STATUS_SECONDS = 0.1
_SETTINGS = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_outgoing_utp": False,
    "enable_incoming_utp": False,
    "allow_multiple_connections_per_ip": True,
    "alert_mask": 0,
    "connections_limit": 200,
    "unchoke_slots_limit": 8,
    "max_out_request_queue": 1000,
    "request_queue_time": 3,
}


def load() -> Any:  # noqa: ANN401 - the wheel has no types
    """Return the library's module. Raises `ImportError` if it is not installed."""
    extra = os.environ.get("EXAOPS_BENCH_LIBTORRENT")
    if extra and extra not in sys.path:
        sys.path.append(extra)
    return importlib.import_module("libtorrent")


def why_not() -> str:
    """Why it cannot be measured; empty where it can."""
    try:
        load()
    except ImportError as error:
        return f"libtorrent is not installed ({error}); pip install libtorrent==2.1.1"
    return ""


def make_torrent(weights: Weights, target: Path) -> None:
    """Write the torrent of the weights, with pieces as large as ours."""
    lt = load()
    storage = lt.file_storage()
    lt.add_files(storage, str(weights.folder))
    torrent = lt.create_torrent(storage, weights.piece_bytes)
    lt.set_piece_hashes(torrent, str(weights.folder.parent))
    target.write_bytes(lt.bencode(torrent.generate()))


def run_libtorrent(weights: Weights, nodes: int, megabits: float, folder: Path, seconds: float) -> Outcome:
    """Have sessions that all know one another send the weights."""
    torrent = folder / "weights.torrent"
    folder.mkdir(parents=True, exist_ok=True)
    make_torrent(weights, torrent)
    with staged(nodes, megabits, weights, folder) as stage:
        seed = ["--torrent", str(torrent), "--seed", str(weights.folder.parent)]
        stage.start_extra("bench.swarm.torrent", stage.origin_place, seed)
        stage.start_nodes("bench.swarm.torrent", lambda _: ["--torrent", str(torrent)])
        try:
            return measure(
                stage, lambda: _introduce(stage), lambda: all(n.whole_at for n in stage.nodes), seconds
            )
        finally:
            torrent.unlink()


def _introduce(stage: Stage) -> None:
    places = [stage.origin_place.address, *(node.place.address for node in stage.nodes)]
    for number, node in enumerate(stage.nodes, start=1):
        # Each pair is connected once: whoever comes later connects to whoever came before.
        node.tell({"peers": places[:number]})


def main() -> None:
    """Be one node until the standard input closes."""
    parser = argparse.ArgumentParser()
    for name in ("--node", "--address", "--manifest", "--folder", "--origin", "--torrent", "--seed"):
        parser.add_argument(name)
    options = parser.parse_args()
    lt = load()
    session = lt.session({**_SETTINGS, "listen_interfaces": f"{options.address}:{_PORT}"})
    adding = lt.add_torrent_params()
    adding.ti = lt.torrent_info(options.torrent)
    adding.save_path = options.seed or options.folder
    if options.seed:
        adding.flags |= lt.torrent_flags.seed_mode
    adding.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    handle = session.add_torrent(adding)
    print(json.dumps({"port": _PORT}), flush=True)
    threading.Thread(target=_tell, args=(handle,), daemon=True).start()
    for line in sys.stdin:
        for peer in json.loads(line)["peers"]:
            handle.connect_peer((peer, _PORT))


def _tell(handle: Any) -> None:  # noqa: ANN401 - the wheel has no types
    while True:
        status = handle.status()
        whole = status.is_seeding
        told = {
            "have": status.total_wanted if whole else min(status.total_wanted_done, status.total_wanted - 1)
        }
        told |= {
            "redundant": status.total_redundant_bytes,
            "failure": status.errc.message() if status.errc.value() else "",
        }
        try:
            print(json.dumps(told), flush=True)
        except OSError:
            os._exit(1)  # the benchmark is gone
        time.sleep(_STATUS_SECONDS)


if __name__ == "__main__":
    main()
