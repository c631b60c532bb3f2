"""Keeps what is known of this node's accelerators fresh: cards fall off the bus, slices are cut anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import msgspec

from workers.probes.accelerators import AcceleratorProbe, Survey, settle
from workers.protocol.hardware import AcceleratorInfo

_INTERVAL_SECONDS = 60.0

logger = logging.getLogger(__name__)


class HardwareWatch:
    """Surveys once when made, then now and then in a thread of its own, since a tool may hang."""

    def __init__(
        self,
        probe: AcceleratorProbe,
        on_change: Callable[[Survey], None],
        *,
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        self._probe = probe
        self._on_change = on_change
        self._interval_seconds = interval_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hardware", daemon=True)
        self.survey = probe.survey()
        """The newest that is believed."""
        for note in self.survey.notes:
            logger.warning("event=probe_note %s", note)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; a tool that hangs is not waited for."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_seconds):
            try:
                self.look()
            except Exception:  # top of the loop: an odd tool must not end the watch
                logger.exception("surveying the accelerators failed")

    def look(self) -> bool:
        """Survey again. Returns whether anything changed that others were told."""
        before, self.survey = self.survey, settle(self.survey, self._probe.survey())
        if _told(before) == _told(self.survey):
            return False
        logger.info("event=accelerators_changed notes=%s", "; ".join(self.survey.notes))
        self._on_change(self.survey)
        return True


def _told(survey: Survey) -> tuple[object, ...]:
    """What goes into a Hello: loads and temperatures change all the time and are no reason for one."""
    cards = _steady(survey.accelerators), _steady(survey.split_cards)
    return *cards, survey.topology, survey.notes, survey.mps


def _steady(accelerators: Iterable[AcceleratorInfo]) -> tuple[AcceleratorInfo, ...]:
    """Without the generation of the link: it goes up with every request and down after it."""
    return tuple(msgspec.structs.replace(a, pcie_generation_now=None) for a in accelerators)
