"""The sending end of a move: offers a conversation to another engine and streams it there."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3

from workers.engines.openai_server.port import SessionMover
from workers.kv.transfer import Block, Ticket, frame

TRANSFERS_PATH = "/kv/transfers/"
PROOF_HEADER = "x-exaops-transfer"
TAG_BYTES = 32
BATCH_BLOCKS = 16
"""Read out or taken in between two steps: a few milliseconds of copying at most."""
ANSWER_SECONDS = 10.0
_CONNECT_SECONDS = 2.0
_SEND_SECONDS = 120.0
_OK = 200


class MoveError(Exception):
    """A move that did not come about; the conversation is where it was. `code` is for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the source has of a session."""

    session_id: str
    shape: str
    block_bytes: int
    digests: list[str]


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of a move."""

    blocks: int
    """Of the session's last turn, as far as they were offered."""
    sent_blocks: int
    """The target had the others."""
    sent_bytes: int
    target_tokens: int
    """Of the session's context that the target has now."""
    offer_seconds: float
    send_seconds: float


def proof(key: bytes, method: str, transfer_id: bytes) -> str:
    """What shows that a request of a transfer comes from who was told to make it."""
    return blake3(method.encode() + transfer_id, key=key).hexdigest()


def body_tag(key: bytes, transfer_id: bytes, body: bytes) -> bytes:
    """32 bytes behind an offer's body."""
    return blake3(transfer_id + body, key=key).digest(TAG_BYTES)


class Sender:
    """Sends one session. Blocks its thread; the engine goes on computing between batches."""

    def __init__(
        self,
        engine: SessionMover,
        *,
        target: str,
        transfer_id: bytes,
        key: bytes,
        bytes_per_second: float = 0.0,
    ) -> None:
        """Send to the engine at `target`. Raises `MoveError` if that is no address."""
        parts = urlsplit(target)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme != "http" or not host or port is None or parts.path.strip("/"):
            raise MoveError("bad_target", f"target must be http://host:port, not {target[:100]!r}")
        self._engine = engine
        self._host, self._port = host, port
        self._transfer_id = transfer_id
        self._key = key
        self._bytes_per_second = bytes_per_second

    def send(self, session_id: str, chain: Sequence[bytes]) -> Sent:
        """Send the blocks of a chain. Raises `MoveError`."""
        began = time.monotonic()
        skip = self._offer(session_id, chain)
        offered = time.monotonic()
        rest = chain[skip:]
        ticket = Ticket(
            self._transfer_id, self._key, self._engine.kv_shape, self._engine.kv_block_bytes, len(rest)
        )
        path = TRANSFERS_PATH + self._transfer_id.hex()
        answer = self._request("PUT", path, self._frames(ticket, rest), ticket.total_bytes)
        return Sent(
            blocks=len(chain),
            sent_blocks=len(rest),
            sent_bytes=ticket.total_bytes,
            target_tokens=int(answer["tokens"]),
            offer_seconds=offered - began,
            send_seconds=time.monotonic() - offered,
        )

    def _offer(self, session_id: str, chain: Sequence[bytes]) -> int:
        offer = Offer(
            session_id,
            self._engine.kv_shape.hex(),
            self._engine.kv_block_bytes,
            [digest.hex() for digest in chain],
        )
        body = msgspec.json.encode(offer)
        body += body_tag(self._key, self._transfer_id, body)
        answer = self._request("POST", TRANSFERS_PATH + self._transfer_id.hex(), body, len(body))
        skip = int(answer["blocks"])
        if not 0 <= skip <= len(chain):
            raise MoveError("bad_answer", f"the target claims {skip} of {len(chain)} blocks")
        return skip

    def _frames(self, ticket: Ticket, rest: Sequence[bytes]) -> Iterator[bytes]:
        yield ticket.header()
        began, sent = time.monotonic(), 0
        index = 0
        ahead = self._read(rest[:BATCH_BLOCKS])
        while index < len(rest):
            contents = ahead.result(ANSWER_SECONDS)
            if len(contents) < min(BATCH_BLOCKS, len(rest) - index):
                raise MoveError("evicted", "blocks of the session had to leave memory meanwhile")
            ahead = self._read(rest[index + len(contents) :][:BATCH_BLOCKS])
            for content in contents:
                yield b"".join(frame(ticket, index, Block(rest[index], content)))
                sent += len(content)
                index += 1
            self._pace(began, sent)

    def _read(self, digests: Sequence[bytes]) -> Future[list[bytes]]:
        return self._engine.read_blocks(digests)

    def _pace(self, began: float, sent_bytes: int) -> None:
        if self._bytes_per_second > 0:
            due = began + sent_bytes / self._bytes_per_second
            time.sleep(max(0.0, due - time.monotonic()))

    def _request(self, method: str, path: str, body: bytes | Iterator[bytes], length: int) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        headers = {
            PROOF_HEADER: proof(self._key, method, self._transfer_id),
            "content-type": "application/octet-stream",
            "content-length": str(length),
        }
        try:
            connection.connect()
            connection.sock.settimeout(_SEND_SECONDS)
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read(1 << 20)
        except (OSError, http.client.HTTPException, TimeoutError) as error:
            raise MoveError("target_unreachable", f"{method} to the target: {error!r}") from error
        finally:
            connection.close()
        return _answer(response.status, content)


def _answer(status: int, content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError:
        answer = {}
    if status == _OK and isinstance(answer, dict):
        return answer
    said = answer.get("error", {}) if isinstance(answer, dict) else {}
    code = said.get("code") or "target_refused"
    raise MoveError(str(code), f"the target answered {status}: {said.get('message') or content[:200]!r}")
