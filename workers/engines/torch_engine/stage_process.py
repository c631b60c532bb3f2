"""A stage behind the first as a process: no HTTP, it computes for the first one and ends with it."""

from __future__ import annotations

import logging
import queue
import signal
import threading
from types import FrameType

from workers.engines.openai_server.serve import EXIT_LOAD_FAILED
from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.settings import EngineSettings, StageSettings
from workers.engines.torch_engine.stage_company import Company, Ending, open_company

log = logging.getLogger(__name__)

_TOLD_SECONDS = 2.0
"""What broke a step is known by the connection to stage 0 at about the same time, and in better words."""


def run_stage(
    settings: EngineSettings, config: ModelConfig, stage: StageSettings, *, drain_seconds: float
) -> int:
    """Serve until stage 0 ends (returns 0), or until any stage is lost or fails (1, and a line says why).

    Told to end, it goes on for as long as stage 0 may take to answer what is open.
    """
    endings: queue.SimpleQueue[Ending] = queue.SimpleQueue()

    def end_soon(number: int, _frame: FrameType | None) -> None:
        log.info("signal %d: ends with stage 0, or in %g s", number, drain_seconds)
        timer = threading.Timer(drain_seconds, endings.put, (Ending("told to end", is_failure=False),))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_soon)
    worker = _Worker(settings, config, stage, endings)
    threading.Thread(target=worker.run, name="stage", daemon=True).start()
    ending = endings.get()
    worker.leave(ending)
    level = logging.ERROR if ending.is_failure else logging.INFO
    log.log(level, "stage %d of %d ends: %s", stage.number, stage.count, ending.reason)
    return EXIT_LOAD_FAILED if ending.is_failure else 0


class _Worker:
    """Loads, then computes, in a thread of its own: the main one hears signals."""

    def __init__(
        self,
        settings: EngineSettings,
        config: ModelConfig,
        stage: StageSettings,
        endings: queue.SimpleQueue[Ending],
    ) -> None:
        self._settings = settings
        self._config = config
        self._stage = stage
        self._endings = endings
        self._company: Company | None = None

    def run(self) -> None:
        """Until something ends it, which is told."""
        try:
            self._serve()
        except Exception as error:
            ending = self._company.wait_for_end(seconds=_TOLD_SECONDS) if self._company else None
            if ending is None and self._company is not None:
                log.exception("stage %d failed", self._stage.number)
            self._endings.put(ending or Ending(str(error) or type(error).__name__))

    def leave(self, ending: Ending) -> None:
        """Tell the others, unless they told it."""
        if self._company is not None:
            self._company.leave(ending.reason, is_failure=ending.is_failure)

    def _serve(self) -> None:
        # Imported here: torch takes a second, in which a signal is to be heard.
        from workers.engines.torch_engine.loading import load_stage  # noqa: PLC0415

        self._company = open_company(self._stage)
        self._company.watch(self._endings.put)
        stage = load_stage(self._settings, self._config, self._company)
        log.info("stage %d of %d is ready", self._stage.number, self._stage.count)
        while True:
            stage.serve_step()
