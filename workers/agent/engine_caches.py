"""Puts what was compiled elsewhere into the caches of this node's engines, so that a launch need not compile.

It is a cache: engines start without it, and with files of their own beside it. What an engine has there
already is never replaced, and nothing that goes wrong here keeps a replica from starting.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from workers.protocol.weights import WeightsWanted

_LOOK_SECONDS = 5.0
_AGAIN_SECONDS = 60.0
_MARK = ".filled-"
_MARK_LETTERS = 24
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600

logger = logging.getLogger(__name__)


class EngineCaches:
    """A thread that fills caches from revisions that are whole and verified on this node."""

    def __init__(
        self,
        root: Path,
        engines: Collection[str],
        *,
        wanted: Callable[[], Sequence[WeightsWanted]],
        ready_folder: Callable[[str], Path | None],
    ) -> None:
        """Fill `root/<engine>`. `ready_folder`: where a revision's verified files are; `None`: not now."""
        self._root = root
        self._engines = engines
        self._wanted = wanted
        self._ready_folder = ready_folder
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-caches", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End; a file that is being copied is left out."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            pause = _LOOK_SECONDS
            try:
                self.step()
            except Exception:  # top of the loop: it is a cache, and the next look may go better
                self._failures += 1
                pause = _AGAIN_SECONDS
                logger.exception("event=engine_cache_not_filled failures=%d", self._failures)

    def step(self) -> int:
        """Fill what is due. Returns how many files were put there. Raises `OSError`."""
        count = 0
        for one in self._wanted():
            # The name of an engine that this agent does not have is no name of a folder here.
            if one.engine_cache not in self._engines:
                continue
            cache = self._root / one.engine_cache
            mark = cache / f"{_MARK}{one.revision.removeprefix('sha256:')[:_MARK_LETTERS]}"
            if mark.exists():
                continue
            folder = self._ready_folder(one.revision)
            if folder is not None:
                count += self._fill(folder, cache)
                mark.touch()
                logger.info("event=engine_cache_filled engine=%s files=%d", one.engine_cache, count)
        return count

    def _fill(self, folder: Path, cache: Path) -> int:
        cache.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        count = 0
        for source in sorted(path for path in folder.rglob("*") if path.is_file()):
            if self._stop.is_set():
                raise InterruptedError("the agent stops")
            count += _put(source, cache / source.relative_to(folder))
        return count


def _put(source: Path, target: Path) -> bool:
    """Copy a file to where none is, whole or not at all. Returns whether it did."""
    if os.path.lexists(target):
        return False
    target.parent.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with source.open("rb") as old, draft.open("wb") as new:
            os.fchmod(new.fileno(), _PRIVATE_FILE)
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
        # Unlike a rename, a link replaces nothing that an engine has put there meanwhile.
        with suppress(FileExistsError):
            os.link(draft, target)
            return True
        return False
    finally:
        draft.unlink(missing_ok=True)
