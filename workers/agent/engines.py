"""Which engines this node offers: those that come with the agent, and those that its settings lead to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from workers.agent.config import AgentConfig
from workers.engines.base import EngineAdapter, EngineInstall
from workers.engines.registry import ENGINES, INSTALLED
from workers.probes.engines import EngineAbsentError, FoundEngine, find_engine
from workers.protocol.engines.option import read_version

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 30.0
_ASK_AGAIN_SECONDS = 900.0

Find = Callable[[Path, str, tuple[str, ...]], FoundEngine]


@dataclass(frozen=True, slots=True)
class NodeEngines:
    """Engines of one node."""

    adapters: Mapping[str, EngineAdapter]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of those that do not come with the agent."""
    notes: tuple[str, ...] = ()
    """Why one is not offered, or is newer than what is known of it."""


def find_engines(config: AgentConfig, find: Find = find_engine) -> NodeEngines:
    """Look for what the settings name. An engine that does not answer is not offered, and noted."""
    found = find_installed(config, find)
    _log(found)
    return NodeEngines({**ENGINES, **found.adapters}, found.versions, found.notes)


def find_installed(config: AgentConfig, find: Find = find_engine) -> NodeEngines:
    """Look for those that do not come with the agent."""
    adapters: dict[str, EngineAdapter] = {}
    versions: dict[str, str] = {}
    notes: list[str] = []
    for kind in INSTALLED:
        told = _pythons(config)[kind.table.engine]
        if not told:
            continue
        try:
            found = find(Path(told), kind.module, kind.distributions)
        except EngineAbsentError as error:
            notes.append(f"{kind.table.title} is not offered: {error}")
            continue
        install = EngineInstall(Path(told), found.version, found.distribution)
        adapters[kind.table.engine] = kind.make(install)
        versions[kind.table.engine] = found.version
        newer = kind.table.note_of(read_version(found.version))
        notes += [newer] if newer else []
    return NodeEngines(adapters, versions, tuple(notes))


def _pythons(config: AgentConfig) -> dict[str, str]:
    """Interpreters that the settings name, by engine."""
    return {"vllm": config.vllm_python, "sglang": config.sglang_python}


def _log(found: NodeEngines) -> None:
    for engine, version in found.versions.items():
        logger.info("event=engine_offered engine=%s version=%s", engine, version)
    for note in found.notes:
        logger.warning("event=engine_note %s", note)


class EngineWatch:
    """Sees engines come, change and go while the agent runs, in a thread of its own.

    Interpreters are asked when something about them or their packages has changed on disk, and now and then
    all the same. One that does not answer once is asked again before its engine is withdrawn.
    """

    def __init__(
        self,
        engines: NodeEngines,
        config: AgentConfig,
        on_change: Callable[[frozenset[str]], None],
        *,
        find: Find = find_engine,
        interval_seconds: float = _INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with what was found. `on_change` gets the names of engines that came or are others now."""
        self._config = config
        self._on_change = on_change
        self._find = find
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._known = dict(engines.adapters)
        self._seen = self._look_at_disk()
        self._asked_at = clock()
        self._in_doubt = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self.offered = engines
        """What may be placed here; replaced whole."""
        self.adapters: Mapping[str, EngineAdapter] = MappingProxyType(self._known)
        """Every engine that was ever offered: what runs is read and ended as before."""

    def start(self) -> None:
        """Start watching, where there is anything to watch."""
        if any(_pythons(self._config).values()):
            self._thread.start()

    def stop(self) -> None:
        """Stop; an interpreter that hangs is not waited for."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_seconds):
            try:
                self.look()
            except Exception:  # top of the loop: an odd environment must not end the watch
                logger.exception("looking for engines failed")

    def look(self) -> bool:
        """Look whether anything has changed. Returns whether something did that others were told."""
        seen, now = self._look_at_disk(), self._clock()
        if seen == self._seen and not self._in_doubt and now - self._asked_at < _ASK_AGAIN_SECONDS:
            return False
        found = find_installed(self._config, self._find)
        lost = {engine for engine in self.offered.versions if engine not in found.versions}
        self._seen, self._asked_at = seen, now
        self._in_doubt = bool(lost) and not self._in_doubt
        if self._in_doubt:
            return False
        return self._take(found)

    def _take(self, found: NodeEngines) -> bool:
        before = self.offered
        if (before.versions, before.notes) == (found.versions, found.notes):
            return False
        _log(found)
        ours = {name: adapter for name, adapter in before.adapters.items() if name not in before.versions}
        self._known.update(found.adapters)
        self.offered = NodeEngines({**ours, **found.adapters}, found.versions, found.notes)
        known = before.versions
        self._on_change(frozenset(name for name in found.versions if known.get(name) != found.versions[name]))
        return True

    def _look_at_disk(self) -> tuple[object, ...]:
        """What changes as an environment is made, removed, or gets other packages: no process is started."""
        return tuple(
            _stamp(path)
            for python in map(Path, filter(None, _pythons(self._config).values()))
            for path in (python, *sorted(python.parent.parent.glob("lib*/python*/*-packages")))
        )


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        found = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), found.st_ino, found.st_mtime_ns
