"""What this node is in Redis: its own user, and whether Redis still takes it for that."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from workers.agent import redis_link
from workers.agent.home import Home
from workers.protocol import store_user

_FILE = "link.json"
_PRIVATE_FILE = 0o600

REMEDY = (
    "trying on, since the control plane makes users again that Redis has lost. If this node's keys were "
    "revoked, it has to join anew: stop the agent, remove identity.json from its home folder, then 'join'"
)

logger = logging.getLogger(__name__)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How the line to Redis is."""

    state: Literal["reached", "away", "refused"]
    detail: str = ""


REACHED = Link(state="reached")


def judge(error: Exception) -> Link:
    """Tell a Redis that is away from one that does not want this node (any more)."""
    if isinstance(error, AuthenticationError | NoPermissionError):
        return Link(state="refused", detail=f"redis refuses this node's credential ({error}): {REMEDY}")
    return Link(state="away", detail=f"redis is not reached: {type(error).__name__}")


@dataclass(frozen=True, slots=True)
class LinkFile:
    """Where the running agent says it, for `status`, which is a process of its own."""

    home: Home

    @property
    def path(self) -> Path:
        """In the folder that the agent's lock lies in too."""
        return self.home.run / _FILE

    def write(self, link: Link) -> None:
        """Replace it; its time is since when it is so. A full disk is no reason to fall silent."""
        draft = self.path.with_suffix(".new")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE_FILE)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(link))
            draft.replace(self.path)
        except OSError as error:
            logger.warning("cannot write %s: %s", self.path, error.strerror)

    def read(self) -> Link | None:
        """What was written last; `None` where nothing can be read."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Link)
        except (OSError, msgspec.DecodeError):
            return None


def take_own_user(home: Home) -> bool:
    """Replace a password that all nodes share by this node's own user, if Redis knows that one by now.

    For nodes that joined before nodes had users of their own: both sides derive the password, so nothing
    need be sent. Returns whether the identity has its own user.
    """
    identity = home.load_identity()
    if store_user.is_own(identity.redis_url, identity.node_id):
        return True
    url = store_user.url_for(identity.redis_url, identity.node_id, identity.key)
    try:
        with redis_link.connect(url, lambda: None) as client:
            client.ping()
    except (RedisError, OSError) as error:
        # With the fleet's own password it goes on as before; the next start tries again.
        logger.warning("no redis user of its own yet (%s): going on with the fleet's password", error)
        return False
    home.save_identity(msgspec.structs.replace(identity, redis_url=url))
    logger.info("redis user of its own taken, and the fleet's password forgotten")
    return True
