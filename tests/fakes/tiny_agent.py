"""An agent that also knows the tiny engine: `python tiny_agent.py HOME`, settings from the environment."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fakes.tiny_adapter import TinyAdapter
from workers.agent.agent import Agent
from workers.agent.config import load_config
from workers.agent.engines import NodeEngines
from workers.agent.home import Home

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    home = Home(Path(sys.argv[1]))
    agent = Agent(home, load_config(None, os.environ), engines=NodeEngines({"tiny": TinyAdapter()}))
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    agent.run()
