"""The first of several stages, which leads the others: tokenizer, requests and clients are here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.engine import LoopEngine
from workers.engines.torch_engine.settings import EngineSettings, StageSettings
from workers.engines.torch_engine.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from workers.engines.torch_engine.loading import LoadedEngine
    from workers.engines.torch_engine.stage_company import Company, Ending

log = logging.getLogger(__name__)


class StagedEngine(LoopEngine):
    """Fails for good as soon as any stage is lost. Sessions cannot move: no process has all of their KV."""

    def __init__(self, settings: EngineSettings, config: ModelConfig, stage: StageSettings) -> None:
        """Remember what to load; `start` loads it, and waits for the other stages."""
        super().__init__(settings, config)
        self._stage = stage
        self._company: Company | None = None

    def stop(self) -> None:
        """End the loop, then let the other stages go."""
        super().stop()
        if self._company is not None:
            is_failure = self.readiness().status == "failed"
            reason = "its model loop died" if is_failure else "told to end"
            self._company.leave(reason, is_failure=is_failure)

    def _load(self, tokenizer: ModelTokenizer) -> LoadedEngine:
        # Imported here: torch takes a second, and the port is to answer before that.
        from workers.engines.torch_engine import loading, stage_company  # noqa: PLC0415

        company = self._company = stage_company.open_company(self._stage)
        company.watch(self._lose)
        try:
            return loading.load_engine(
                self._settings,
                self._config,
                tokenizer,
                self.metrics,
                self._note_progress,
                company=company,
            )
        except Exception as error:
            company.leave(f"loading failed: {error}", is_failure=True)
            raise

    def _lose(self, ending: Ending) -> None:
        if ending.is_failure:
            log.error("the stages of this replica are no longer together: %s", ending.reason)
            self._fail()
