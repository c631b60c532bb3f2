"""Settings of an installation behind a TLS proxy, with its own stores."""

from __future__ import annotations

from exaserve_ops.settings.base import *  # noqa: F403 - settings modules layer by star import
from exaserve_ops.settings.base import ENV
from exaserve_ops.settings.env import require

require(ENV)

SECURE_HSTS_SECONDS = 31_536_000 if ENV.uses_tls else 0
SECURE_SSL_REDIRECT = ENV.uses_tls
