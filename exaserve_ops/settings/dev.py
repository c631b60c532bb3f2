"""Settings of the all-in-one fleet that `make up` starts."""

from __future__ import annotations

from exaserve_ops.settings.base import *  # noqa: F403 - settings modules layer by star import
from exaserve_ops.settings.base import ENV

ALLOWED_HOSTS = [*ENV.hosts, "127.0.0.1", "localhost", "[::1]"]
