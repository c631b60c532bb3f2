"""An agent that knows the torch engine and the rogue one: `python rogue_agent.py HOME`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fakes.rogue_engine import RogueAdapter
from workers.agent.agent import Agent
from workers.agent.config import load_config
from workers.agent.engines import NodeEngines
from workers.agent.home import Home
from workers.engines.torch_adapter import TorchAdapter

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    adapters = {"torch": TorchAdapter(), "rogue": RogueAdapter()}
    agent = Agent(Home(Path(sys.argv[1])), load_config(None, os.environ), engines=NodeEngines(adapters))
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    agent.run()
