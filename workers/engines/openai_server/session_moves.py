"""Moving a conversation's KV from one engine to another, between its turns.

The source is told to (`POST /kv/moves`, with its own key) by its agent. It offers the conversation to the
target (`POST /kv/transfers/{id}`), which says how much it has already, and then sends the rest
(`PUT /kv/transfers/{id}`), block by block; or, where both draw on one memory, says where the rest lies
(`POST /kv/transfers/{id}/lent`), and the target copies it. Neither of the two knows the other's key: an
offer and all that follows are authenticated by a key for this one transfer, which whoever ordered the move
derived from the target's. The target keeps nothing as the conversation's before the last byte was checked,
and the source gives up nothing: its blocks go first once it is told that the conversation lives elsewhere
(`DELETE /kv/sessions/{id}`).
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Annotated, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from workers.engines.openai_server.errors import ApiError, bad_request, unavailable
from workers.engines.openai_server.port import HeldSession, SessionMover
from workers.engines.openai_server.schema import decode_body
from workers.engines.openai_server.session_sending import (
    ANSWER_SECONDS,
    BATCH_BLOCKS,
    LENT_SUFFIX,
    MOST_LENT_BLOCKS,
    PROOF_HEADER,
    TAG_BYTES,
    TRANSFERS_PATH,
    Lending,
    MoveError,
    Offer,
    Sender,
    body_tag,
    proof,
)
from workers.kv.neighbour import LentBlock
from workers.kv.transfer import DIGEST_BYTES, MOST_BLOCKS, Block, Intake, Ticket, TransferError
from workers.protocol.digests import KV_BLOCK_TOKENS, transfer_key

_OFFER_SECONDS = 30.0
_OPEN_OFFERS = 64
_REMEMBERED_TRANSFERS = 4096
_MOST_ORDER_BYTES = 4096
_MOST_LENDING_BYTES = MOST_LENT_BLOCKS * 64 + 256
_MOST_OFFER_BYTES = MOST_BLOCKS * 3 * DIGEST_BYTES
_TRANSFER_ID_HEX = 32
_READABLE_SECONDS = 2.0
"""How long blocks on disk are waited for before a move begins; what has not come stays behind."""
_POLL_SECONDS = 0.02
_ROOM_SECONDS = 1.0
"""How long a target waits for room: others give back what they borrowed within two steps."""

_T = TypeVar("_T")


class MoveOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks the source to send a session."""

    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    transfer_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    target: str
    """`http://host:port` of the engine that is to have it."""
    bytes_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """0: as fast as it goes."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """An offer that was accepted."""

    ticket: Ticket
    session_id: str
    chain: tuple[bytes, ...]
    skip: int
    """Leading blocks that were here already."""
    until: float
    borrowed: int = 0
    """Blocks that were copied out of the node's memory so far."""

    @property
    def rest(self) -> tuple[bytes, ...]:
        """Digests of what is to come."""
        return self.chain[self.skip :]


class SessionMoveApi:
    """Both ends of moves, of one engine."""

    def __init__(self, engine: SessionMover, api_key: str, refuse_unless_ready: Callable[[], None]) -> None:
        """Serve `engine`; `refuse_unless_ready` raises `ApiError` while nothing can be asked of it."""
        self._engine = engine
        self._api_key = api_key
        self._refuse_unless_ready = refuse_unless_ready
        self._expected: OrderedDict[bytes, _Expected] = OrderedDict()
        self._used: OrderedDict[bytes, None] = OrderedDict()
        """Transfers that were offered: none is taken twice."""
        self._moving: set[str] = set()
        """Sessions that are being sent."""

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            Route("/kv/moves", self.move, methods=["POST"]),
            Route("/kv/sessions/{session_id}", self.let_go, methods=["DELETE"]),
            Route(TRANSFERS_PATH + "{transfer_id}", self.offer, methods=["POST"]),
            Route(TRANSFERS_PATH + "{transfer_id}", self.receive, methods=["PUT"]),
            Route(TRANSFERS_PATH + "{transfer_id}" + LENT_SUFFIX, self.borrow, methods=["POST"]),
        ]

    # -- the source --------------------------------------------------------------------------------
    async def move(self, request: Request) -> Response:
        """POST /kv/moves: send a session; answered when the target has it, or does not."""
        self._refuse_unless_ready()
        order = decode_body(await _read(request, _MOST_ORDER_BYTES), MoveOrder)
        if order.session_id in self._moving:
            raise ApiError(409, "This session is being sent already.", code="already_moving")
        self._moving.add(order.session_id)
        try:
            return await self._send(order)
        except MoveError as error:
            raise ApiError(502, error.message, code=error.code) from error
        finally:
            self._moving.discard(order.session_id)

    async def _send(self, order: MoveOrder) -> Response:
        held = await self._readable(order.session_id)
        sender = Sender(
            self._engine,
            target=order.target,
            transfer_id=bytes.fromhex(order.transfer_id),
            key=bytes.fromhex(order.key),
            bytes_per_second=order.bytes_per_second,
        )
        chain = held.chain[: held.readable_blocks]
        sent = await asyncio.to_thread(sender.send, order.session_id, chain)
        after = await _in_time(self._engine.held(order.session_id))
        # A turn that began meanwhile made the session longer than what was sent: nothing is lost, but
        # whoever ordered the move should not make it count.
        answer = asdict(sent) | {"turn_began": bool(after.open_requests) or after.chain != held.chain}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _readable(self, session_id: str) -> HeldSession:
        """What can be sent, once what lies on disk has come up or its time is over."""
        until = time.monotonic() + _READABLE_SECONDS
        while True:
            held = await _in_time(self._engine.held(session_id))
            if held.open_requests:
                raise ApiError(409, "A turn of this session is running.", code="turn_runs")
            if not held.chain:
                raise ApiError(404, "This engine has nothing of this session.", code="session_unknown")
            if held.readable_blocks == len(held.chain) or time.monotonic() >= until:
                return held
            await asyncio.sleep(_POLL_SECONDS)

    async def let_go(self, request: Request) -> Response:
        """DELETE /kv/sessions/{id}: it lives elsewhere now; its blocks go before others'."""
        self._refuse_unless_ready()
        gone = await _in_time(self._engine.let_session_go(request.path_params["session_id"]))
        return _told({"let_go": gone})

    # -- the target --------------------------------------------------------------------------------
    async def offer(self, request: Request) -> Response:
        """POST /kv/transfers/{id}: say how many leading blocks are here, and expect the rest."""
        transfer_id, key = self._proven(request)
        self._refuse_unless_ready()
        if transfer_id in self._used:
            raise ApiError(409, "This transfer was offered before.", code="transfer_used")
        offer = decode_body(await _read_tagged(request, _MOST_OFFER_BYTES, key, transfer_id), Offer)
        chain = self._chain_of(offer)
        skip = await _in_time(self._engine.known_blocks(chain))
        ticket = Ticket(
            transfer_id, key, self._engine.kv_shape, self._engine.kv_block_bytes, len(chain) - skip
        )
        self._expect(_Expected(ticket, offer.session_id, chain, skip, time.monotonic() + _OFFER_SECONDS))
        return _told({"blocks": skip, "arena": self._engine.kv_arena.hex()})

    def _chain_of(self, offer: Offer) -> tuple[bytes, ...]:
        if offer.shape != self._engine.kv_shape.hex() or offer.block_bytes != self._engine.kv_block_bytes:
            described = f"Its KV is of another model, type or shape: here it is {self._engine.kv_described}."
            raise ApiError(409, described, code="other_shape")
        try:
            chain = tuple(bytes.fromhex(digest) for digest in offer.digests)
        except ValueError as error:
            raise bad_request(f"digests: {error}", param="digests") from error
        if len(chain) > MOST_BLOCKS or any(len(digest) != DIGEST_BYTES for digest in chain):
            raise bad_request("digests must be of 16 bytes each.", param="digests")
        return chain

    def _expect(self, expected: _Expected) -> None:
        now = time.monotonic()
        for transfer_id in [key for key, known in self._expected.items() if known.until < now]:
            del self._expected[transfer_id]
        if len(self._expected) >= _OPEN_OFFERS:
            raise unavailable("Too many transfers are on their way here.", code="transfers_full")
        self._expected[expected.ticket.transfer_id] = expected
        self._used[expected.ticket.transfer_id] = None
        if len(self._used) > _REMEMBERED_TRANSFERS:
            self._used.popitem(last=False)

    async def receive(self, request: Request) -> Response:
        """PUT /kv/transfers/{id}: take the blocks in; answered when all are here, checked."""
        transfer_id, _ = self._proven(request)
        expected = self._take_up(transfer_id)
        intake = Intake(expected.ticket, expected.rest)
        batch: list[Block] = []
        try:
            async for part in request.stream():
                for block in intake.feed(part):
                    batch.append(block)
                    if len(batch) >= BATCH_BLOCKS:
                        await self._take(batch)
                        batch = []
        except TransferError as error:
            raise ApiError(400, str(error), code="damaged") from error
        except ClientDisconnect:
            raise _broke_off() from None
        await self._take(batch)
        if not intake.is_complete:
            raise _broke_off()
        return _told({"tokens": await self._adopt(expected)})

    async def borrow(self, request: Request) -> Response:
        """POST /kv/transfers/{id}/lent: copy blocks out of the memory that both draw on.

        Answered with how many of the transfer are here now; those after them were elsewhere by the time
        that they were looked for, and are to be lent again. The last ones' answer has the tokens.
        """
        transfer_id, key = self._proven(request)
        lending = decode_body(await _read_tagged(request, _MOST_LENDING_BYTES, key, transfer_id), Lending)
        lent = _lent_blocks(lending)
        expected = self._take_up(transfer_id)
        if lending.first != expected.borrowed or lending.first + len(lent) > len(expected.rest):
            raise bad_request("These are not the blocks that come next.", param="first")
        borrowed = expected.borrowed + await self._borrow(expected, lending.first, lent)
        if borrowed == len(expected.rest):
            return _told({"blocks": borrowed, "tokens": await self._adopt(expected)})
        until = time.monotonic() + _OFFER_SECONDS
        self._expected[transfer_id] = replace(expected, borrowed=borrowed, until=until)
        return _told({"blocks": borrowed})

    def _take_up(self, transfer_id: bytes) -> _Expected:
        """Take a transfer out of those that are expected: nobody else goes on with it meanwhile."""
        expected = self._expected.pop(transfer_id, None)
        if expected is None or expected.until < time.monotonic():
            raise ApiError(404, "This transfer is not expected, or not any more.", code="not_expected")
        return expected

    async def _adopt(self, expected: _Expected) -> int:
        tokens = await _in_time(self._engine.adopt_session(expected.session_id, expected.chain))
        if tokens < len(expected.chain) * KV_BLOCK_TOKENS:
            raise unavailable("Its first blocks had to leave for others' meanwhile.", code="no_room")
        return tokens

    async def _borrow(self, expected: _Expected, first: int, lent: Sequence[LentBlock]) -> int:
        """Copy what is lent; returns how many blocks, from the first on, are here now."""
        digests = expected.rest[first : first + len(lent)]
        here, until = 0, time.monotonic() + _ROOM_SECONDS
        while True:
            came = await _in_time(
                self._engine.borrow_blocks(expected.ticket, first + here, digests[here:], lent[here:])
            )
            here += came.blocks
            if not came.is_full:
                return here
            await _pause_for_room(until)

    async def _take(self, blocks: list[Block]) -> None:
        until = time.monotonic() + _ROOM_SECONDS
        while blocks := blocks[await _in_time(self._engine.take_blocks(blocks)) :] if blocks else []:
            await _pause_for_room(until)

    def _proven(self, request: Request) -> tuple[bytes, bytes]:
        """Id and key of the transfer, if the caller knows the key. Before any of the body is read."""
        text = request.path_params["transfer_id"]
        try:
            transfer_id = bytes.fromhex(text)
        except ValueError:
            raise _refused() from None
        key = transfer_key(self._api_key, transfer_id)
        given = request.headers.get(PROOF_HEADER, "")
        wanted = proof(key, request.method, transfer_id)
        if len(text) != _TRANSFER_ID_HEX or not hmac.compare_digest(given.encode(), wanted.encode()):
            raise _refused()
        return transfer_id, key


def _refused() -> ApiError:
    return ApiError(401, "This transfer was not ordered by anybody who may.", code="invalid_transfer")


async def _pause_for_room(until: float) -> None:
    """Let requests end and other replicas of the node make room. Raises `ApiError` if it took too long."""
    if time.monotonic() >= until:
        raise unavailable("There is no room for more blocks.", code="no_room")
    await asyncio.sleep(_POLL_SECONDS)


def _broke_off() -> ApiError:
    """Nobody hears it where the sender died; what came is kept, as any cached blocks are."""
    return ApiError(400, "The transfer broke off.", code="broke_off")


def _told(answer: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _lent_blocks(lending: Lending) -> list[LentBlock]:
    if len(lending.places) != len(lending.tags) or len(lending.places) > MOST_LENT_BLOCKS:
        raise bad_request("Give as many tags as places, and not too many.", param="tags")
    try:
        tags = [bytes.fromhex(tag) for tag in lending.tags]
    except ValueError as error:
        raise bad_request(f"tags: {error}", param="tags") from error
    return [LentBlock(place, tag) for place, tag in zip(lending.places, tags, strict=True)]


async def _read_tagged(request: Request, most_bytes: int, key: bytes, transfer_id: bytes) -> bytes:
    """Return a body without its tag, if the sender made it."""
    data = await _read(request, most_bytes)
    body, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
    if not hmac.compare_digest(tag, body_tag(key, transfer_id, body)):
        raise _refused()
    return body


async def _read(request: Request, most_bytes: int) -> bytes:
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > most_bytes:
                raise ApiError(413, f"The body is over {most_bytes} bytes.", code="body_too_large")
    except ClientDisconnect:
        raise _broke_off() from None
    return bytes(data)


async def _in_time(answer: Future[_T]) -> _T:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_SECONDS)
    except TimeoutError:
        raise unavailable("The engine is busy.", code="busy") from None
