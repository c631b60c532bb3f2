"""The thread that pulses: it does nothing else, so whatever keeps reports back does not stop it."""

from __future__ import annotations

import logging
import threading

from redis import Redis
from redis.exceptions import RedisError

from workers.agent import redis_link
from workers.agent.credential import judge
from workers.protocol import pulse

_PAUSE_AFTER_FAILURE_SECONDS = 0.5

logger = logging.getLogger(__name__)


class PulseThread:
    """Keeps this node's pulse in Redis fresh, on a connection of its own."""

    def __init__(self, redis_url: str, node_id: str, node_key: bytes, boot_id: str) -> None:
        self._redis_url = redis_url
        self._node_id = node_id
        self._node_key = node_key
        self._boot_id = boot_id
        self._counter = 0
        self._is_reached = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Start pulsing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; at most one write is waited for."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(2 * redis_link.SOCKET_SECONDS)

    def _run(self) -> None:
        client = redis_link.connect(self._redis_url, lambda: None)
        while not self._stopping.is_set():
            self._stopping.wait(self._beat(client))
        client.close()

    def _beat(self, client: Redis) -> float:
        """Write one pulse. Returns the pause after it."""
        self._counter += 1
        try:
            data = pulse.encode(
                pulse.Pulse(self._boot_id, self._counter), node_id=self._node_id, node_key=self._node_key
            )
            lifetime = round(pulse.LIFETIME_SECONDS * 1000)
            client.set(pulse.key_of(self._node_id), data, px=lifetime)
        except (RedisError, OSError) as error:
            if self._is_reached:
                logger.warning("no pulse: %s", judge(error).detail)
            self._is_reached = False
            return _PAUSE_AFTER_FAILURE_SECONDS
        except Exception:  # top of the loop: an odd value must not end the signs of life
            logger.exception("making a pulse failed")
        self._is_reached = True
        return pulse.INTERVAL_SECONDS
