"""What two engines say to one another about a session that moves, and how they know that they may.

Neither knows the other's key. Whoever ordered a move derived a key for this one transfer from the target's;
the source got it with the order, and the target derives it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

EXPORT_IMPORT, WARM_PREFILL = "export_import", "warm_prefill"
NIXL, COMPUTED = "nixl", "computed"
"""What got the context to the target: its KV over NIXL, or computing it there."""
TRANSFERS = "/kv/transfers/"
PROOF = "x-exaops-transfer"
_TAG_BYTES = 32
_CONNECT_SECONDS = 5.0
_OK = 200
_PERSON = b"exaserve-ops"


class MoveError(Exception):
    """Something that was asked and is refused. `code` is for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def transfer_key(engine_key: str, transfer_id: bytes) -> bytes:
    """32-byte key of one transfer, as whoever ordered it derived it."""
    purpose = f"transfer:{transfer_id.hex()}".encode()
    return hashlib.blake2b(purpose, key=engine_key.encode()[:64], digest_size=32, person=_PERSON).digest()


def proof(key: bytes, method: str, transfer_id: bytes) -> str:
    """What a request of a transfer shows before its body is read."""
    return hashlib.blake2b(method.encode() + transfer_id, key=key, digest_size=32).hexdigest()


def tagged(key: bytes, transfer_id: bytes, message: dict[str, Any]) -> bytes:
    """A body with a tag behind it."""
    body = json.dumps(message).encode()
    return body + _tag(key, transfer_id, body)


def untagged(key: bytes, transfer_id: bytes, data: bytes) -> dict[str, Any]:
    """Read a body that the holder of the key made. Raises `MoveError` for any other."""
    body, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(key, transfer_id, body)):
        raise refused()
    message = json.loads(body)
    if not isinstance(message, dict):
        raise refused()
    return message


def refused() -> MoveError:
    """Nobody is told what was wrong."""
    return MoveError(401, "invalid_transfer", "This transfer was not ordered by anybody who may.")


def _tag(key: bytes, transfer_id: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(transfer_id + body, key=key, digest_size=_TAG_BYTES).digest()


class Target:
    """The other engine, as the source talks to it for one transfer."""

    def __init__(self, address: str, transfer_id: bytes, key: bytes) -> None:
        """Raises `MoveError` if the address is none."""
        parts = urlsplit(address)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme != "http" or not host or not port:
            raise MoveError(400, "bad_target", "The target is no http://host:port.")
        self._host, self._port = host, port
        self._transfer_id, self._key = transfer_id, key

    async def ask(self, method: str, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message of the transfer and return the answer. Raises `MoveError`."""
        return await asyncio.to_thread(self._ask, method, message, seconds)

    def _ask(self, method: str, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            connection.request(
                method,
                TRANSFERS + self._transfer_id.hex(),
                tagged(self._key, self._transfer_id, message),
                {
                    "Content-Type": "application/octet-stream",
                    PROOF: proof(self._key, method, self._transfer_id),
                },
            )
            answer = connection.getresponse()
            status, told = answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MoveError(502, "target_unreachable", f"The target does not answer: {error}") from error
        finally:
            connection.close()
        if status == _OK and isinstance(told, dict):
            return told
        raise _told_error(status, told)


def _told_error(status: int, told: object) -> MoveError:
    error = told.get("error") if isinstance(told, dict) else None
    known = error if isinstance(error, dict) else {}
    code = known.get("code")
    return MoveError(
        502,
        code if isinstance(code, str) else f"target_said_{status}",
        str(known.get("message") or f"The target answered {status}."),
    )
