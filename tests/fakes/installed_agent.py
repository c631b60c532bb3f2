"""An agent as operators run it, with the engines that it really has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.node import Node

CODE = Path(__file__).resolve().parents[2]


class InstalledAgent(Node):
    """`python -m workers.agent run`, seen from the outside."""

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.prefix,
                    *(sys.executable, "-m", "workers.agent", "run", "--home", str(self.home.root)),
                ],
                cwd=CODE,
                env=os.environ | self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
