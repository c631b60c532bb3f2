"""`manage.py run_controllers`: one leads, others wait as spares."""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType

from django.core.management.base import BaseCommand

from exaserve_ops.controllers.process import LostLeadError
from exaserve_ops.wiring import build_controllers

SWITCH_SECONDS = 0.0005
"""Ingest and detection wait for answers all the time. With the usual 5 ms each of these waits ends
with one more for whichever thread is busy computing a plan, and reports pile up behind it."""

YOUNG_OBJECTS = 50_000
"""New objects between two looks for garbage. Reports come and go by the thousand and hold no cycles;
with the usual 700 a look at everything that lives follows each few seconds, and costs a tenth of all."""


class Command(BaseCommand):
    """Runs until SIGTERM or SIGINT."""

    help = "Run the reconcile loops, the failure detector and report ingest."

    def handle(self, *_args: object, **_options: object) -> None:
        """Run the loops in this process."""
        sys.setswitchinterval(SWITCH_SECONDS)
        controllers = build_controllers()
        gc.collect()
        gc.freeze()  # code and settings stay
        gc.set_threshold(YOUNG_OBJECTS, 20, 20)

        def stop(_signal: int, _frame: FrameType | None) -> None:
            controllers.stop()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        try:
            controllers.run()
        except LostLeadError as error:
            self.stderr.write(str(error))
            sys.exit(1)
