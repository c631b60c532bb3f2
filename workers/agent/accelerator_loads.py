"""Keeps the loads of this node's cards fresh, from whichever sources there are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import urllib3

from workers.agent.nvml_child import SILENT_SECONDS, NvmlChild
from workers.probes.accelerators import Survey
from workers.probes.card_loads import aged, loads_of_survey, merge_loads
from workers.probes.dcgm import DcgmReader
from workers.protocol.machine import AcceleratorLoad

INTERVAL_SECONDS = 5.0
_STALE_SECONDS = 45.0
"""A page that was fetched longer ago says nothing of now; exporters renew theirs each 30 s."""
_PAGE_SECONDS = 2.0
_MOST_PAGE_BYTES = 4 * 1024 * 1024
_OK = 200
_CUDA = "cuda"

logger = logging.getLogger(__name__)


class DcgmPage:
    """An exporter's page. Says once why it cannot be had, and once that it can again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = urllib3.PoolManager(num_pools=1, retries=False, timeout=_PAGE_SECONDS)
        self._reader = DcgmReader()
        self._problem = ""
        self._loads: tuple[AcceleratorLoad, ...] = ()
        self._fetched_at = float("-inf")

    def fetch(self) -> None:
        """Ask once; an answer that is no such page changes nothing but its age."""
        problem, loads = self._ask()
        if loads:
            self._loads, self._fetched_at = loads, time.monotonic()
        if problem != self._problem:
            self._problem = problem
            logger.warning("event=dcgm_page url=%s %s", self._url, problem or "answers again")

    def read(self) -> tuple[AcceleratorLoad, ...]:
        """What it said last, with its age; nothing once that is stale."""
        age = time.monotonic() - self._fetched_at
        return aged(self._loads, age) if age <= _STALE_SECONDS else ()

    def _ask(self) -> tuple[str, tuple[AcceleratorLoad, ...]]:
        try:
            answer = self._http.request("GET", self._url, preload_content=False, redirect=False)
            try:
                page = answer.read(_MOST_PAGE_BYTES + 1, decode_content=True)
            finally:
                answer.release_conn()
                answer.close()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            return f"cannot be had: {type(error).__name__}", ()
        if answer.status != _OK or len(page) > _MOST_PAGE_BYTES:
            return f"is not usable: status {answer.status}, {len(page)} bytes", ()
        loads = self._reader.read(page.decode("utf-8", "replace") + "\n")
        return ("" if loads else "tells of no card", loads)


class AcceleratorLoads:
    """One thread; `read` is for any other."""

    def __init__(
        self,
        survey: Callable[[], Survey],
        *,
        dcgm_url: str = "",
        nvml: NvmlChild | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._survey = survey
        self._page = DcgmPage(dcgm_url) if dcgm_url else None
        self._nvml = nvml or NvmlChild(interval_seconds)
        self._interval_seconds = interval_seconds
        self._seen_survey: Survey | None = None
        self._seen_survey_at = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accelerator-loads", daemon=True)
        self._made: tuple[float, tuple[AcceleratorLoad, ...]] = (0.0, ())

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and end the process that asks the library."""
        self._stopping.set()
        self._nvml.stop()

    def read(self) -> tuple[AcceleratorLoad, ...]:
        """Loads of all cards that anything is known of, with their ages now."""
        made_at, loads = self._made
        return aged(loads, time.monotonic() - made_at)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except Exception:  # top of the loop: an odd page must not end the watch
                logger.exception("reading the loads of accelerators failed")
            self._stopping.wait(self._interval_seconds)

    def look(self) -> None:
        """Take in what every source says."""
        survey, now = self._survey(), time.monotonic()
        if survey is not self._seen_survey:
            self._seen_survey, self._seen_survey_at = survey, now
        sources = [loads_of_survey(survey.devices, now - self._seen_survey_at)]
        if any(device.kind == _CUDA for device in survey.devices):
            self._nvml.check()
            loads, age = self._nvml.read()
            sources.insert(0, aged(loads, age) if age <= SILENT_SECONDS else ())
        if self._page is not None:
            self._page.fetch()
            sources.insert(0, self._page.read())
        own = {found.parent_uuid or found.uuid for found in (*survey.accelerators, *survey.split_cards)}
        # Every source tells of all cards of the machine; some may be another agent's.
        self._made = now, tuple(load for load in merge_loads(sources) if load.uuid in own)
