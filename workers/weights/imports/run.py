"""One try of an import: listed, admitted, fetched file by file, checked, put into its place."""

from __future__ import annotations

import enum
import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from workers.protocol import manifest as manifests
from workers.protocol.imports import Findings, FindingsError, WeightsImport, decode_findings, encode_findings
from workers.protocol.manifest import ManifestError
from workers.weights.checks import DamagedError, count_parameters, shards_of_index
from workers.weights.fetching import read_capped, yield_to_others
from workers.weights.imports.listing import CONFIG, INDEX, ListedFile, Lister, Listing, UnfitError, choose
from workers.weights.imports.one_file import IncomingFile, Tools, WrongBytesError, incoming
from workers.weights.imports.records import ImportRecord
from workers.weights.shelf import Shelf
from workers.weights.sources.port import (
    BusyError,
    MissingFileError,
    NoRangesError,
    RefusedError,
    Source,
    SourceError,
)
from workers.weights.swarm.port import RangeReader
from workers.weights.swarm.rates import RateCap, RateMeter

_FAILURES = 8
"""Of one file in a row, after which the try is over."""
_BEGINNINGS = 3
"""How often one file is begun anew in a try, where a server gives no ranges."""
_FIRST_REST_SECONDS = 0.5
_LONGEST_REST_SECONDS = 30.0
_CHANGES = 3
"""How often files may change at their place while they are read."""

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """What a run is doing."""

    LISTING = "listing"
    LISTED = "listed"
    """It waits to be admitted."""
    FETCHING = "fetching"
    FOUND = "found"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Places:
    """How places are opened, and how fast they are read."""

    open_lister: Callable[[WeightsImport], Lister]
    open_source: Callable[[WeightsImport, str], Source]
    """Of an import and its listed location."""
    caps: Sequence[RateCap] = ()
    streams: int = 4
    first_rest_seconds: float = _FIRST_REST_SECONDS
    piece_bytes: int = manifests.PIECE_BYTES


@dataclass(slots=True)
class Going:
    """How a run goes; changed under its lock."""

    phase: Phase = Phase.LISTING
    note: str = ""
    hopeless: bool = False
    """Trying again is of no use before something changes at the place."""
    retry_after_seconds: float = 0.0
    location: str = ""
    files: int = 0
    files_done: int = 0
    total_bytes: int = 0
    have_bytes: int = 0
    findings: bytes = b""
    findings_digest: str = ""
    revision: str = ""
    meter: RateMeter = field(default_factory=RateMeter)


@dataclass(slots=True)
class _Faults:
    """What went wrong with one file in one try."""

    in_a_row: int = 0
    wrong: int = 0
    beginnings: int = 0

    def count_wrong(self, error: WrongBytesError) -> None:
        """Count bytes that are not what their place tells. Raises `UnfitError` when that is no accident."""
        self.wrong += 1
        if self.wrong > 1:
            raise UnfitError(str(error)) from error

    def count(self, error: SourceError, *, came_on: bool) -> None:
        """Count a fault of the source. Raises it where a server always breaks off and gives no ranges."""
        self.in_a_row = 1 if came_on else self.in_a_row + 1
        self.beginnings += isinstance(error, NoRangesError)
        if self.beginnings > _BEGINNINGS:
            raise error


class ImportRun:
    """Ends by itself; may be stopped at any time, and what the disk has for sure stays."""

    def __init__(
        self,
        shelf: Shelf,
        record: ImportRecord,
        order: WeightsImport,
        places: Places,
        on_change: Callable[[], None],
    ) -> None:
        self.order = order
        self.going = Going()
        self._shelf = shelf
        self._record = record
        self._places = places
        self._on_change = on_change
        self._lock = threading.Lock()
        self._admitted = threading.Event()
        self._stop = threading.Event()
        self._queue: deque[ListedFile] = deque()
        self._thread = threading.Thread(target=self._run, name="import", daemon=True)

    def start(self) -> None:
        """Begin to list."""
        self._thread.start()

    def admit(self) -> None:
        """Let it fetch: there is room."""
        self._admitted.set()

    def stop(self) -> None:
        """End it, and wait until nothing is written any more."""
        self._stop.set()
        self._admitted.set()
        self._thread.join()

    @property
    def ended(self) -> bool:
        """Whether nothing is done any more."""
        return not self._thread.is_alive() and self._thread.ident is not None

    # -- the thread ------------------------------------------------------------------------------
    def _run(self) -> None:
        yield_to_others()
        try:
            phase = self._work()
        except (UnfitError, DamagedError, ManifestError, FindingsError) as error:
            phase = self._fail(str(error), hopeless=True)
        except SourceError as error:
            rest = error.retry_after_seconds if isinstance(error, BusyError) else 0.0
            phase = self._fail(str(error), hopeless=_is_hopeless(error), retry_after_seconds=rest)
        except OSError as error:
            phase = self._fail(f"{error.filename or self._record.folder}: {error.strerror or error}")
        except Exception as error:  # top of a thread: the run must not stay open
            logger.exception("import %s failed", self.order.import_id)
            phase = self._fail(f"it failed: {type(error).__name__}")
        self.going.phase = phase
        self._on_change()

    def _fail(self, why: str, *, hopeless: bool = False, retry_after_seconds: float = 0.0) -> Phase:
        if self._stop.is_set():
            return Phase.STOPPED
        logger.warning("import of %s: %s", self.order.location, why)
        going = self.going
        going.note, going.hopeless, going.retry_after_seconds = why, hopeless, retry_after_seconds
        return Phase.FAILED

    def _work(self) -> Phase:
        if self._take_up_findings():
            return Phase.FOUND
        listing = self._list()
        self._record.take_listing(listing)
        self._count(listing)
        self.going.phase = Phase.LISTED
        self._on_change()
        self._admitted.wait()
        if self._stop.is_set():
            return Phase.STOPPED
        self.going.phase = Phase.FETCHING
        for _ in range(_CHANGES):
            self._fetch_missing(listing.location)
            if self._stop.is_set():
                return Phase.STOPPED
            if self.order.kind == "hub":
                return self._conclude(listing)  # a commit stays what it is
            listing = self._list()
            changed = self._record.take_listing(listing)
            self._count(listing)
            if not changed and not self._record.missing():
                return self._conclude(listing)
        raise UnfitError("its files change at their place while they are read")

    def _list(self) -> Listing:
        return choose(self._places.open_lister(self.order).list_files(), self.order.files)

    def _count(self, listing: Listing) -> None:
        whole = [file for file in listing.files if self._record.whole(file.path) is not None]
        synced = sum(self._record.synced_bytes(file.path) for file in listing.files)
        with self._lock:
            self.going.location = listing.location
            self.going.files, self.going.files_done = len(listing.files), len(whole)
            self.going.total_bytes = listing.total_bytes
            self.going.have_bytes = sum(file.size_bytes for file in whole) + synced

    # -- fetching --------------------------------------------------------------------------------
    def _fetch_missing(self, location: str) -> None:
        self._queue = deque(self._record.missing())
        at_once = max(1, min(self._places.streams, len(self._queue)))
        source = self._places.open_source(self.order, location)
        try:
            with (
                ThreadPoolExecutor(at_once, "import-hash", yield_to_others) as hashers,
                ThreadPoolExecutor(at_once, "import-file", yield_to_others) as readers,
            ):
                failed = threading.Event()
                tools = Tools(
                    self._record,
                    hashers,
                    lambda: self._stop.is_set() or failed.is_set(),
                    self._places.piece_bytes,
                )
                for one in [readers.submit(self._fetch_files, source, tools, failed) for _ in range(at_once)]:
                    one.result()
        finally:
            source.close()
            self._record.flush()

    def _fetch_files(self, source: Source, tools: Tools, failed: threading.Event) -> None:
        try:
            while not tools.stopped():
                with self._lock:
                    file = self._queue.popleft() if self._queue else None
                if file is None:
                    return
                self._fetch_file(file, source, tools)
        except BaseException:
            failed.set()
            raise

    def _fetch_file(self, file: ListedFile, source: Source, tools: Tools) -> None:
        with incoming(file, tools) as taken:
            self._correct(taken.have_bytes - self._record.synced_bytes(file.path))
            faults = _Faults()
            while not tools.stopped():
                before = taken.have_bytes
                try:
                    self._read_on(taken, source, tools)
                    if taken.is_whole:
                        self._record.note_whole(taken.finish())
                        self._note_file()
                        return
                except WrongBytesError as error:
                    faults.count_wrong(error)
                    self._say(str(error))
                    self._begin_anew(taken)
                except SourceError as error:
                    faults.count(error, came_on=taken.have_bytes > before)
                    self._rest(error, faults.in_a_row)
                    if isinstance(error, NoRangesError):
                        self._begin_anew(taken)

    def _read_on(self, taken: IncomingFile, source: Source, tools: Tools) -> None:
        if taken.is_whole:
            return
        left = taken.file.size_bytes - taken.have_bytes

        def read(reader: RangeReader, memory: memoryview) -> None:
            read_capped(reader, memory, self._places.caps, tools.stopped)

        with source.open_range(taken.file.path, taken.have_bytes, left) as reader:
            taken.take_from(reader, read, self._note_bytes)

    def _rest(self, error: SourceError, failures: int) -> None:
        """Leave the source alone for a while. Raises the error where that would be of no use."""
        self._say(str(error))
        if self._stop.is_set() or _is_hopeless(error) or failures >= _FAILURES:
            raise error
        rest = min(self._places.first_rest_seconds * 2 ** (failures - 1), _LONGEST_REST_SECONDS)
        if isinstance(error, BusyError):
            rest = max(rest, error.retry_after_seconds)
        self._stop.wait(rest)

    def _begin_anew(self, taken: IncomingFile) -> None:
        self._correct(-taken.have_bytes)
        taken.begin_anew()

    def _say(self, note: str) -> None:
        with self._lock:
            self.going.note = note

    def _correct(self, count: int) -> None:
        with self._lock:
            self.going.have_bytes += count

    def _note_bytes(self, count: int) -> None:
        with self._lock:
            self.going.note = ""
            self.going.have_bytes += count
            self.going.meter.add(count)

    def _note_file(self) -> None:
        with self._lock:
            self.going.files_done += 1

    # -- what was found --------------------------------------------------------------------------
    def _conclude(self, listing: Listing) -> Phase:
        files, folder = self._record.manifest_files(), self._record.files
        manifest = manifests.Manifest(manifests.revision_of(files), self._places.piece_bytes, files)
        digest, body = manifests.encode(manifest)
        findings = Findings(
            location=listing.location,
            manifest_digest=digest,
            manifest=body,
            config=(folder / CONFIG).read_bytes(),
            parameter_count=count_parameters(folder, manifest),
            shards=shards_of_index(folder, manifest, INDEX),
        )
        name, data = encode_findings(findings)
        self._record.keep_findings(name.encode() + data)
        self._place(findings)
        self._take(findings, name, data)
        return Phase.FOUND

    def _take_up_findings(self) -> bool:
        """Whether it was found before, and all of it is still here."""
        kept = self._record.findings()
        if kept is None:
            return False
        name, data = kept[:64].decode("ascii", "replace"), kept[64:]
        try:
            findings = decode_findings(data, name)
            self._place(findings)
        except (FindingsError, ManifestError, DamagedError) as error:
            logger.warning("import %s begins again: %s", self.order.import_id, error)
            self._record.forget_findings()
            return False
        self._take(findings, name, data)
        return True

    def _place(self, findings: Findings) -> None:
        manifest = self._shelf.keep_manifest(findings.manifest_digest, findings.manifest)
        if self._shelf.ready_folder(manifest.revision).exists():
            shutil.rmtree(self._record.files, ignore_errors=True)
        else:
            self._shelf.place(self._record.files, manifest)

    def _take(self, findings: Findings, name: str, data: bytes) -> None:
        manifest = manifests.decode(findings.manifest, findings.manifest_digest)
        with self._lock:
            going = self.going
            going.location, going.revision = findings.location, manifest.revision
            going.files = going.files_done = len(manifest.files)
            going.total_bytes = going.have_bytes = manifest.total_bytes
            going.findings, going.findings_digest = data, name


def _is_hopeless(error: SourceError) -> bool:
    return isinstance(error, MissingFileError | RefusedError)
