"""The sending end of a move: offers a conversation to another engine and has its blocks get there.

The target's answer to the offer says which memory it draws on. Is that ours too, the target copies the
blocks out of it, told only where they lie and what is in them; everywhere else they go over the line.
Digests, tags and the key that they are made with are the same either way.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3

from workers.engines.openai_server.port import SessionMover
from workers.kv.neighbour import LentBlock
from workers.kv.transfer import Block, Ticket, frame

Carrier = Literal["shared_memory", "tcp"]
"""What blocks get to the target by."""

TRANSFERS_PATH = "/kv/transfers/"
PROOF_HEADER = "x-exaops-transfer"
TAG_BYTES = 32
BATCH_BLOCKS = 16
"""Read out or taken in between two steps: a few milliseconds of copying at most."""
MOST_LENT_BLOCKS = 256
_LENT_BYTES = 4 << 20
"""Of blocks that are lent at once: a few milliseconds between two steps, at either end."""
_LENDINGS = 3
"""So often blocks that had moved by the time the target looked are lent again."""
LENT_SUFFIX = "/lent"
SHARED_MEMORY: Carrier = "shared_memory"
TCP: Carrier = "tcp"
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


class Lending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of a transfer that the target may copy out of the node's memory, one after the other."""

    first: int
    """Place in the transfer of the first of them."""
    places: list[int]
    """Number of each block in the pool."""
    tags: list[str]
    """Of each one's content, as in a frame on the line; hexadecimal."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of a move."""

    blocks: int
    """Of the session's last turn, as far as they were offered."""
    sent_blocks: int
    """The target had the others."""
    sent_bytes: int
    carrier: Carrier
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
        """Have the target get the blocks of a chain. Raises `MoveError`."""
        began = time.monotonic()
        skip, arena = self._offer(session_id, chain)
        offered = time.monotonic()
        rest = chain[skip:]
        ticket = Ticket(
            self._transfer_id, self._key, self._engine.kv_shape, self._engine.kv_block_bytes, len(rest)
        )
        if arena and arena == self._engine.kv_arena and self._is_all_in_arena(rest):
            answer, sent_bytes = self._lend(ticket, rest), len(rest) * ticket.block_bytes
            carrier = SHARED_MEMORY
        else:
            frames = self._frames(ticket, rest)
            answer, sent_bytes = self._request("PUT", "", frames, ticket.total_bytes), ticket.total_bytes
            carrier = TCP
        return Sent(
            blocks=len(chain),
            sent_blocks=len(rest),
            sent_bytes=sent_bytes,
            carrier=carrier,
            target_tokens=int(answer["tokens"]),
            offer_seconds=offered - began,
            send_seconds=time.monotonic() - offered,
        )

    def _offer(self, session_id: str, chain: Sequence[bytes]) -> tuple[int, bytes]:
        """Return how many leading blocks the target has, and which memory it draws on."""
        offer = Offer(
            session_id,
            self._engine.kv_shape.hex(),
            self._engine.kv_block_bytes,
            [digest.hex() for digest in chain],
        )
        body = msgspec.json.encode(offer)
        body += body_tag(self._key, self._transfer_id, body)
        try:
            answer = self._request("POST", "", body, len(body))
        except MoveError as error:
            if error.code == "other_shape":
                described = f"{error.message} At the source it is {self._engine.kv_described}."
                raise MoveError(error.code, described) from error
            raise
        skip = int(answer["blocks"])
        if not 0 <= skip <= len(chain):
            raise MoveError("bad_answer", f"the target claims {skip} of {len(chain)} blocks")
        return skip, bytes.fromhex(str(answer.get("arena", "")))

    # -- through the node's memory -------------------------------------------------------------------
    def _is_all_in_arena(self, rest: Sequence[bytes]) -> bool:
        """Whether all blocks are where they are computed with: what is in lower tiers has no place there."""
        return self._engine.known_blocks(rest).result(ANSWER_SECONDS) == len(rest)

    def _lend(self, ticket: Ticket, rest: Sequence[bytes]) -> dict[str, Any]:
        """Lend blocks until the target has copied all; returns its last answer."""
        at, tries = 0, 0
        ahead = self._lend_at(ticket, 0, rest)
        with closing(self._connect()) as connection:
            while True:
                batch, lent = self._batch(ticket, at, rest), ahead.result(ANSWER_SECONDS)
                if len(lent) < len(batch):
                    raise _evicted()
                # What comes next is looked up while the target copies this.
                ahead = self._lend_at(ticket, at + len(batch), rest)
                answer = self._ask_lent(connection, at, lent)
                if "tokens" in answer:
                    return answer
                here = int(answer["blocks"])
                tries = tries + 1 if here == at else 0
                if tries >= _LENDINGS or not at <= here <= at + len(batch):
                    raise _evicted()
                if here != at + len(batch):
                    ahead = self._lend_at(ticket, here, rest)
                at = here

    def _batch(self, ticket: Ticket, at: int, rest: Sequence[bytes]) -> Sequence[bytes]:
        return rest[at:][: max(1, min(MOST_LENT_BLOCKS, _LENT_BYTES // ticket.block_bytes))]

    def _lend_at(self, ticket: Ticket, at: int, rest: Sequence[bytes]) -> Future[list[LentBlock]]:
        return self._engine.lend_blocks(ticket, at, self._batch(ticket, at, rest))

    def _ask_lent(
        self, connection: http.client.HTTPConnection, at: int, lent: Sequence[LentBlock]
    ) -> dict[str, Any]:
        lending = Lending(at, [one.place for one in lent], [one.tag.hex() for one in lent])
        body = msgspec.json.encode(lending)
        body += body_tag(self._key, self._transfer_id, body)
        return self._ask(connection, "POST", LENT_SUFFIX, body, len(body))

    # -- over the line -------------------------------------------------------------------------------
    def _frames(self, ticket: Ticket, rest: Sequence[bytes]) -> Iterator[bytes]:
        yield ticket.header()
        began, sent = time.monotonic(), 0
        index = 0
        ahead = self._read(rest[:BATCH_BLOCKS])
        while index < len(rest):
            contents = ahead.result(ANSWER_SECONDS)
            if len(contents) < min(BATCH_BLOCKS, len(rest) - index):
                raise _evicted()
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

    def _request(
        self, method: str, suffix: str, body: bytes | Iterator[bytes], length: int
    ) -> dict[str, Any]:
        with closing(self._connect()) as connection:
            return self._ask(connection, method, suffix, body, length)

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise MoveError("target_unreachable", f"no connection to the target: {error!r}") from error
        connection.sock.settimeout(_SEND_SECONDS)
        return connection

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        suffix: str,
        body: bytes | Iterator[bytes],
        length: int,
    ) -> dict[str, Any]:
        headers = {
            PROOF_HEADER: proof(self._key, method, self._transfer_id),
            "content-type": "application/octet-stream",
            "content-length": str(length),
        }
        try:
            connection.request(method, TRANSFERS_PATH + self._transfer_id.hex() + suffix, body, headers)
            response = connection.getresponse()
            content = response.read(1 << 20)
        except (OSError, http.client.HTTPException, TimeoutError) as error:
            raise MoveError("target_unreachable", f"{method} to the target: {error!r}") from error
        return _answer(response.status, content)


def _evicted() -> MoveError:
    return MoveError("evicted", "blocks of the session had to leave memory meanwhile")


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
