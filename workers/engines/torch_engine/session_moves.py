"""A conversation's KV blocks, read out for another replica or taken in from one. For the computing thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.openai_server.port import Borrowed, HeldSession
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.scheduler import Scheduler
from workers.kv.neighbour import LentBlock, PoolReader
from workers.kv.tiers.sessions import SessionTable
from workers.kv.tiers.store import TieredStore
from workers.kv.transfer import Block, Ticket
from workers.protocol.digests import KV_BLOCK_TOKENS


class SessionMoves:
    """Reads and writes blocks by the digest of the prefix that they end.

    What is taken in is cached content like any other: it is used by whoever's prompt begins with it, and
    evicted when it is needed least. A move that breaks off therefore leaves nothing to be cleaned up.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        scheduler: Scheduler,
        pool: KvPool,
        sessions: SessionTable,
        *,
        store: TieredStore | None = None,
        neighbours: PoolReader | None = None,
    ) -> None:
        """Move what `allocator` knows of, in the blocks of `pool`.

        `store` has what lies in lower tiers, `neighbours` reads what other replicas of the node lend.
        """
        self._allocator = allocator
        self._scheduler = scheduler
        self._pool = pool
        self._sessions = sessions
        self._store = store
        self._neighbours = neighbours

    def held(self, session_id: str) -> HeldSession:
        """What this replica has of a session; what lies on disk is asked up for the next look."""
        chain = self._sessions.chain_of(session_id)
        readable = self._readable(chain)
        if readable < len(chain):
            self._scheduler.prefetch(chain)
        return HeldSession(chain, readable, self._sessions.open_requests(session_id))

    def read(self, digests: Sequence[bytes]) -> list[bytes]:
        """Copies of blocks, up to the first that is not in memory."""
        contents: list[bytes] = []
        for digest in digests:
            content = self._read_one(digest)
            if content is None:
                break
            contents.append(content)
        return contents

    def lend(self, ticket: Ticket, first: int, digests: Sequence[bytes]) -> list[LentBlock]:
        """Say where blocks lie and what is in them, up to the first that is not where it is computed with.

        Nothing is kept in place for the borrower: whoever reads something else there sees it by the tag.
        """
        places = self._allocator.match(digests)
        return [
            LentBlock(place, ticket.tag(index, digest, self._pool.export_block(place)))
            for index, (digest, place) in enumerate(zip(digests, places, strict=False), first)
        ]

    def borrow(
        self, ticket: Ticket, first: int, digests: Sequence[bytes], lent: Sequence[LentBlock]
    ) -> Borrowed:
        """Copy what a neighbour lends to blocks of our own, up to the first that is not as it was lent."""
        wanted = [n for n, digest in enumerate(digests) if not self._allocator.match((digest,))]
        places = self._scheduler.take_cold_blocks(len(wanted))
        good = 0
        for place, n in zip(places, wanted, strict=False):
            if not self._copy(place, ticket, first + n, digests[n], lent[n]):
                break
            self._allocator.register(place, digests[n])
            good += 1
        self._allocator.release(places)
        here = wanted[good] if good < len(wanted) else len(digests)
        return Borrowed(here, is_full=good == len(places) < len(wanted))

    def _copy(self, place: int, ticket: Ticket, index: int, digest: bytes, lent: LentBlock) -> bool:
        into = self._pool.export_block(place)
        return self._neighbours is not None and self._neighbours.copy(ticket, index, digest, lent, into)

    def known(self, chain: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are here already."""
        return len(self._allocator.match(chain))

    def take(self, blocks: Sequence[Block]) -> int:
        """Cache what came; returns how many of the blocks are here now, from the first on."""
        wanted = [block for block in blocks if not self._allocator.match((block.digest,))]
        places = self._scheduler.take_cold_blocks(len(wanted))
        for place, block in zip(places, wanted, strict=False):
            self._pool.import_block(place, block.content)
            self._allocator.register(place, block.digest)
        self._allocator.release(places)
        missing = {block.digest for block in wanted[len(places) :]}
        return next((n for n, block in enumerate(blocks) if block.digest in missing), len(blocks))

    def adopt(self, session_id: str, chain: Sequence[bytes]) -> int:
        """Keep a session's blocks hot for its next turn; returns the tokens that are here."""
        here = tuple(chain[: self.known(chain)])
        self._sessions.adopt(session_id, here, now=time.monotonic())
        return len(here) * KV_BLOCK_TOKENS

    def let_go(self, session_id: str) -> bool:
        """Let a session's blocks go before others'. False if it is unknown, or a turn of it runs here."""
        return self._sessions.let_go(session_id)

    def _readable(self, chain: Sequence[bytes]) -> int:
        here = len(self._allocator.match(chain))
        while here < len(chain) and self._store is not None and self._store.read(chain[here]) is not None:
            here += 1
        return here

    def _read_one(self, digest: bytes) -> bytes | None:
        block = next(iter(self._allocator.match((digest,))), None)
        if block is not None:
            return bytes(self._pool.export_block(block))
        return None if self._store is None else self._store.read(digest)
