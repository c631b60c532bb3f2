"""Passwords and private keys on their way from a form to the controllers.

They are never in the database. The page seals them with a key derived from the fleet secret, bound to
their installation, and leaves them in Redis for a while: pages and controllers are different processes,
so memory alone will not do, and what has a time to live cannot be forgotten in a backup.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
from typing import cast

import paramiko
import redis
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from exaserve_ops.inventory.domain.installation import Credentials, StepFailedError

KEPT_SECONDS = 1800
"""Long enough to compare a fingerprint and to try again; then they have to be given again."""

_NONCE_BYTES = 12
_KEY_CLASSES: tuple[type[paramiko.PKey], ...] = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)


class CredentialVault:
    """Keeps the credentials of installations, sealed, for half an hour."""

    def __init__(self, client: redis.Redis, fleet_secret: bytes) -> None:
        self._redis = client
        key = hashlib.blake2b(b"ssh-credentials", key=fleet_secret, digest_size=32, person=b"exaserve-ops")
        self._cipher = ChaCha20Poly1305(key.digest())

    def keep(self, installation_id: str, credentials: Credentials) -> None:
        """Keep credentials for an installation, in place of earlier ones."""
        body = {
            "password": credentials.password,
            "private_key": credentials.private_key,
            "passphrase": credentials.passphrase,
        }
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, json.dumps(body).encode(), installation_id.encode())
        self._redis.set(_name(installation_id), nonce + sealed, ex=KEPT_SECONDS)

    def find(self, installation_id: str) -> Credentials | None:
        """Return the credentials; `None` where none were given, or their time is over."""
        data = cast("bytes | None", self._redis.get(_name(installation_id)))
        if data is None:
            return None
        nonce, sealed = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        try:
            body = self._cipher.decrypt(nonce, sealed, installation_id.encode())
        except InvalidTag:
            return None  # sealed under another fleet secret, or not by us
        return Credentials(**json.loads(body))

    def forget(self, installation_id: str) -> None:
        """Forget the credentials of an installation."""
        self._redis.delete(_name(installation_id))


def read_private_key(text: str, passphrase: str) -> paramiko.PKey:
    """Return the key in a file of OpenSSH or PEM. Raises `StepFailedError` that says what is wrong."""
    if text.lstrip().startswith("PuTTY-User-Key-File"):
        raise StepFailedError("this is a PuTTY key: export it as an OpenSSH key (PuTTYgen, Conversions)")
    if text.lstrip().startswith(("ssh-", "ecdsa-")):
        raise StepFailedError("this is a public key: give the private one")
    for kind in _KEY_CLASSES:
        try:
            return kind.from_private_key(io.StringIO(text), password=passphrase or None)
        except paramiko.PasswordRequiredException as error:
            raise StepFailedError("the private key is encrypted: give its passphrase") from error
        except (paramiko.SSHException, ValueError, IndexError, TypeError):
            continue  # not of this kind, or the passphrase is wrong: the last line says both
    wrong = "the passphrase is wrong, or " if passphrase else ""
    raise StepFailedError(f"the private key cannot be read: {wrong}it is no Ed25519, ECDSA or RSA key")


def _name(installation_id: str) -> str:
    return f"exaops:ssh:{installation_id}"
