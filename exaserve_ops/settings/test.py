"""Settings of the tests: real Postgres and Redis, addresses from the environment."""

from __future__ import annotations

from exaserve_ops.settings.base import *  # noqa: F403 - settings modules layer by star import

SECRET_KEY = "only-for-tests"  # noqa: S105 - no secret
ALLOWED_HOSTS = ["testserver", "127.0.0.1", "localhost"]
# A slow hash protects stored passwords; tests make many users and store none.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
