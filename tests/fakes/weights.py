"""Made-up weights, their manifests, and places that give them, well or badly."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from tests.fakes.node import wait_for
from workers.protocol import manifest as manifests
from workers.protocol.imports import Findings, ImportSeen, ImportState, WeightsImport, decode_findings
from workers.protocol.manifest import Manifest, ManifestFile
from workers.protocol.v1 import ImportFindings
from workers.protocol.weights import WeightsHeld, WeightsSource, WeightsState, WeightsWanted
from workers.weights.imports.desk import ImportDesk
from workers.weights.imports.places import open_lister
from workers.weights.imports.run import Places
from workers.weights.keeper import KeeperSettings, WeightsKeeper
from workers.weights.planning import StorePolicy
from workers.weights.secrets import Secrets
from workers.weights.shelf import Shelf
from workers.weights.sources.opening import open_source
from workers.weights.sources.port import Source
from workers.weights.swarm.rates import RateCap
from workers.weights.swarm_desk import SwarmDesk

PIECE = 64 * 1024
NODE_ID = "11111111-2222-4333-8444-555555555555"


def shard_of(size_bytes: int, seed: int) -> bytes:
    """A safetensors file of one tensor of random bytes."""
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(size_bytes)  # noqa: S311 - made-up weights


@dataclass(frozen=True, slots=True)
class Weights:
    """A revision: its contents and its manifest."""

    contents: Mapping[str, bytes]
    manifest: Manifest
    digest: str
    body: bytes

    @property
    def revision(self) -> str:
        return self.manifest.revision

    @property
    def total_bytes(self) -> int:
        return self.manifest.total_bytes

    def write_to(self, folder: Path) -> Path:
        for path, content in self.contents.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return folder

    def wanted(self, *sources: WeightsSource, **changes: object) -> WeightsWanted:
        fields: dict[str, object] = {
            "revision": self.revision,
            "manifest_digest": self.digest,
            "total_bytes": self.total_bytes,
            "sources": sources,
        }
        return WeightsWanted(**(fields | changes))  # type: ignore[arg-type]  # fields of a test


def weights_of(contents: Mapping[str, bytes]) -> Weights:
    """The manifest of these files."""
    files = []
    for path in sorted(contents):
        content = contents[path]
        pieces = b"".join(blake3(content[i : i + PIECE]).digest() for i in range(0, len(content), PIECE))
        files.append(ManifestFile(path, len(content), hashlib.sha256(content).hexdigest(), pieces))
    manifest = Manifest(manifests.revision_of(tuple(files)), PIECE, tuple(files))
    digest, body = manifests.encode(manifest)
    return Weights(dict(contents), manifest, digest, body)


def made_weights(seed: int = 1, *, shards: int = 2, shard_bytes: int = 8 * PIECE + 17) -> Weights:
    """A small revision of shards, index, config and an empty file."""
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    contents = {name: shard_of(shard_bytes, 1000 * seed + n) for n, name in enumerate(names)}
    contents["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {f"w{n}": name for n, name in enumerate(names)}}
    ).encode()
    contents["config.json"] = json.dumps({"seed": seed}).encode()
    contents["original/empty.txt"] = b""
    return weights_of(contents)


def folder_source(folder: Path) -> WeightsSource:
    return WeightsSource(kind="folder", location=folder.as_uri())


@dataclass
class BadSource:
    """Gives what a test says: `spoil` changes the bytes of a range, or raises."""

    contents: Mapping[str, bytes]
    spoil: Callable[[str, int, bytes], bytes] = lambda _path, _offset, data: data
    kind: str = "folder"
    name: str = "bad"
    asked: list[tuple[str, int]] = field(default_factory=list)
    pause_seconds: float = 0.0
    gate: threading.Event | None = None
    """Waited for before each read."""

    @contextmanager
    def open_range(self, path: str, offset: int, length: int) -> Iterator[_Reader]:
        self.asked.append((path, offset))
        yield _Reader(self, path, offset)
        assert length >= 0

    def close(self) -> None:
        pass


@dataclass
class _Reader:
    source: BadSource
    path: str
    offset: int

    def read_into(self, memory: memoryview, /) -> None:
        if self.source.gate is not None:
            self.source.gate.wait(20)
        time.sleep(self.source.pause_seconds)
        data = self.source.contents[self.path][self.offset : self.offset + len(memory)]
        memory[:] = self.source.spoil(self.path, self.offset, data)
        self.offset += len(memory)


class Store:
    """A keeper over a real folder, with what a test hands it."""

    def __init__(
        self,
        root: Path,
        *,
        margin_bytes: int = 0,
        limit_bytes: int = 0,
        scrub: float = 0.0,
        node_id: str = "",
    ) -> None:
        """Keep weights; in swarms, too, if it is told which node it is."""
        self.root = root
        self.shelf = Shelf(root / "store")
        self.manifests: dict[str, bytes] = {}
        self.in_use: frozenset[str] = frozenset()
        self.sources: dict[str, Source] = {}
        """Instead of what would be opened for these locations."""
        self.told: list[ImportFindings] = []
        self.allow_local = True
        """Imports may come from loopback."""
        self.changes = 0
        self.revision = 0
        self.keeper = WeightsKeeper(
            self.shelf,
            KeeperSettings(StorePolicy(margin_bytes, limit_bytes), scrub_bytes_per_second=scrub),
            read_manifest=self.manifests.get,
            open_source=self._open,
            in_use=lambda: self.in_use,
            on_change=self._note_change,
            swarm=SwarmDesk(node_id, "127.0.0.1", self.shelf.ready_folder) if node_id else None,
            open_imports=self._open_imports,
        )

    def _open_imports(self, cap: RateCap, wake: Callable[[], None]) -> ImportDesk:
        secrets = Secrets(self.root / "secrets")

        def open_place(order: WeightsImport, location: str) -> Source:
            told = WeightsSource(kind=order.kind, location=location, secret=order.secret)
            return open_source(told, secrets, allow_local=self.allow_local)

        places = Places(
            open_lister=lambda order: open_lister(order, secrets, allow_local=self.allow_local),
            open_source=open_place,
            caps=(cap,),
            first_rest_seconds=0.01,
            piece_bytes=PIECE,
        )
        return ImportDesk(NODE_ID, self.shelf, places, tell=self.told.append, on_change=wake)

    def take_in(self, *orders: WeightsImport, wanted: Sequence[WeightsWanted] = ()) -> None:
        """Have these models taken in, beside what is wanted."""
        self.revision += 1
        self.keeper.take(wanted, self.revision, orders)

    def seen(self, order: WeightsImport) -> ImportSeen | None:
        """How an import goes, as it is reported."""
        found = self.keeper.report().imports
        return next((one for one in found if one.import_id == order.import_id), None)

    def wait_import(self, order: WeightsImport, state: ImportState) -> ImportSeen:
        def reached() -> ImportSeen | None:
            seen = self.seen(order)
            return seen if seen is not None and (seen.state, seen.attempt) == (state, order.attempt) else None

        try:
            return wait_for(reached, str(state))
        except AssertionError as error:
            raise AssertionError(f"{error}, but {self.seen(order)}") from None

    def findings(self, order: WeightsImport) -> Findings:
        """What was told of an import, put together."""
        digest = self.wait_import(order, ImportState.FOUND).findings_digest

        def parts() -> dict[int, bytes] | None:
            mine = {part.index: part for part in list(self.told) if part.digest == digest}
            whole = mine and len(mine) == next(iter(mine.values())).count
            return {index: part.data for index, part in mine.items()} if whole else None

        told = wait_for(parts, "all parts to be told")
        return decode_findings(b"".join(told[index] for index in sorted(told)), digest)

    def _open(self, told: WeightsSource) -> Source:
        return self.sources.get(told.location) or open_source(
            told, Secrets(self.root / "secrets"), allow_local=True
        )

    def _note_change(self) -> None:
        self.changes += 1

    def know(self, *weights: Weights) -> None:
        self.manifests.update({one.digest: one.body for one in weights})

    def give(self, location: str, source: Source) -> WeightsSource:
        """A source that a test made, and how it is named."""
        self.sources[location] = source
        return WeightsSource(kind="folder", location=location)

    def want(self, *wanted: WeightsWanted) -> None:
        self.revision += 1
        self.keeper.take(wanted, self.revision)

    def held(self, weights: Weights) -> WeightsHeld | None:
        return next((one for one in self.keeper.report().held if one.revision == weights.revision), None)

    def state(self, weights: Weights) -> WeightsState | None:
        held = self.held(weights)
        return None if held is None else held.state

    def wait_state(self, weights: Weights, state: WeightsState) -> WeightsHeld:
        try:
            return wait_for(lambda: self._held_in(weights, state), str(state))
        except AssertionError as error:
            raise AssertionError(f"{error}, but {self.held(weights)}") from None

    def _held_in(self, weights: Weights, state: WeightsState) -> WeightsHeld | None:
        held = self.held(weights)
        return held if held is not None and held.state is state else None

    def folder(self, weights: Weights) -> Path:
        return self.shelf.ready_folder(weights.revision)

    def is_right(self, weights: Weights) -> bool:
        """Whether what is in place is what the manifest says, to the byte, and nothing else."""
        folder = self.folder(weights)
        found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        return found == dict(weights.contents)


@contextmanager
def running_store(root: Path, **options: float | str) -> Iterator[Store]:
    """A store whose threads run."""
    store = Store(root, **options)  # type: ignore[arg-type]  # options of a test
    store.keeper.start()
    try:
        yield store
    finally:
        store.keeper.stop()


def put(store: Store, weights: Weights, name: str = "origin") -> WeightsSource:
    """Write weights to a folder, and have the store know their manifest."""
    store.know(weights)
    return folder_source(weights.write_to(store.root / name))
