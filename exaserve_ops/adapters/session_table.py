"""Which replica a session lives on: 24 bytes in Redis for each, shared by all gateways.

A claim is set-if-absent and a re-pin is compare-and-swap on the owner epoch, so two gateways that act
at once end up with one owner. What is asked together goes into one script call, whose answer is one
string. Every call is bounded; who gets no entry falls back to hashing, which all gateways
do alike.

Sessions share hashes, `exaops:s:0000` to `exaops:s:3fff`, which Redis packs: about 40 bytes a session
at a million of them, where a key of its own would take 200. A field is 8 bytes of the digest of model and
session; a record names its replica by 8 bytes of a digest too, which a gateway looks up among those that
it routes to. One that it does not know has gone, and the session with it moves.

Time is Redis's. A record that no turn has touched for the TTL counts as absent; it goes with its hash, or
when others move into the hash.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import struct
from collections.abc import Callable
from typing import NamedTuple

from exaserve_ops.adapters.resp_link import LinkError, Reply, RespLink, word

DEFAULT_TTL_SECONDS = 24 * 3600
ANSWER_SECONDS = 0.150
"""Longer than this and a turn is better off with the fall-back."""
BUCKETS = 1 << 14
KEY_PREFIX = b"exaops:s:"
NOBODY = bytes(8)
MOST_IN_A_CALL = 256
"""One script call holds Redis up for about 3 µs a session."""

COMPANY_SECONDS = 0.002
"""Asks that nobody waits for share a call each so many seconds; after a pause the first goes at once."""

_RECORD = struct.Struct("<8sIIII")
_ASK = struct.Struct("<c8s8sII")
_MOST_TOKENS = 0xFFFF_FFFF
_CLAIM = b"c"
_REPIN = b"r"
_NOTE = b"n"
_LOOK_UP = b"l"

SCRIPT = b"""
local now = tonumber(redis.call('TIME')[1])
local ttl = tonumber(ARGV[1])
local span = math.max(1, math.floor(ttl / 8))
local call, pack, unpack = redis.call, struct.pack, struct.unpack
local answers = {}

-- ARGV[2] has 25 bytes for each key: what is asked, the field, and what goes with it.
-- A hash lives until the last of its sessions is too old: told so whenever one enters a new span.
local function keep(key, last)
  if math.floor(now / span) ~= math.floor(last / span) then
    call('EXPIRE', key, ttl + span)
  end
end

local function sweep(key)
  local all = call('HGETALL', key)
  for i = 1, #all, 2 do
    if now - unpack('<I4', all[i + 1], 21) > ttl then call('HDEL', key, all[i]) end
  end
end

for i, key in ipairs(KEYS) do
  local what, field, owner, epoch, context = unpack('<c1c8c8I4I4', ARGV[2], 25 * i - 24)
  local raw = call('HGET', key, field)
  local kept, old_epoch, turns, old_context, last
  if raw then
    kept, old_epoch, turns, old_context, last = unpack('<c8I4I4I4I4', raw)
    if now - last > ttl then raw = false end
  end
  local entry = raw
  if what == 'c' then
    if raw then entry = pack('<c8I4I4I4I4', kept, old_epoch, turns + 1, old_context, now)
    elseif owner ~= string.rep('\\0', 8) then entry = pack('<c8I4I4I4I4', owner, 1, 1, 0, now) end
  elseif what == 'r' then
    if not raw then entry = pack('<c8I4I4I4I4', owner, epoch + 1, 1, 0, now)
    elseif old_epoch == epoch and (context == 0 or context == turns) then
      entry = pack('<c8I4I4I4I4', owner, epoch + 1, turns, old_context, now)
    end
  elseif what == 'n' and raw then
    entry = pack('<c8I4I4I4I4', kept, old_epoch, turns, context, now)
  end
  if entry and entry ~= raw then
    if call('HSET', key, field, entry) == 1 and call('HLEN', key) % 16 == 0 then sweep(key) end
    keep(key, raw and last or 0)
  end
  answers[i] = entry or string.rep('\\0', 24)
end
return table.concat(answers)
"""
_SHA1 = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest().encode()  # how Redis names a script


class SessionTableUnavailableError(Exception):
    """Redis is away, slow or confused; decide without it."""


class SessionEntry(NamedTuple):
    """Where a session lives. `turns` counts requests, this one included."""

    owner: bytes
    """`owner_digest` of its replica."""
    owner_epoch: int
    """Raised by each re-pin; a re-pin that expects another epoch changes nothing."""
    turns: int
    context_tokens: int
    last_turn_at_seconds: int
    """Unix time, by the clock of Redis."""


ABSENT = SessionEntry(NOBODY, 0, 0, 0, 0)
"""The table was asked, and has no such session. No entry has epoch 0."""

OnEntry = Callable[[SessionEntry | None], None]
"""Gets the entry in force, or `ABSENT`; `None` if the table is not to be had."""


@functools.lru_cache(maxsize=65_536)
def owner_digest(replica_id: str) -> bytes:
    """Eight bytes that name a replica in a record."""
    return hashlib.blake2b(replica_id.encode(), digest_size=8, person=b"owner").digest()


def session_place(model: str, session_id: str) -> tuple[bytes, bytes]:
    """Key and field of one session of one model."""
    digest = hashlib.blake2b(f"{model}\0{session_id}".encode(), digest_size=10).digest()
    bucket = int.from_bytes(digest[:2], "little") % BUCKETS
    return b"%b%04x" % (KEY_PREFIX, bucket), digest[2:]


@functools.lru_cache(maxsize=16_384)
def _encoded_place(model: str, session_id: str) -> tuple[bytes, bytes]:
    """The key as a word of a command, and the field."""
    key, field = session_place(model, session_id)
    return word(key), field


class SessionTable:
    """The table, over one link. What is asked while a call is under way goes into the next one."""

    def __init__(self, link: RespLink, *, ttl_seconds: int = DEFAULT_TTL_SECONDS) -> None:
        """Sessions are forgotten `ttl_seconds` after their last turn: all who write it must agree."""
        self._link = link
        self._ttl = word(b"%d" % ttl_seconds)
        self._keys: list[bytes] = []
        self._asks: list[bytes] = []
        self._callers: list[OnEntry | None] = []
        self._is_asking = False
        self._is_due = False  # something waits that is to go as soon as no call is under way
        self._is_timed = False
        self._sent_at = 0.0
        self.calls = 0
        """Script calls so far."""

    # ------------------------------------------------------------------ by call-back: the data path
    def claim(self, model: str, session_id: str, owner: bytes, on_entry: OnEntry) -> None:
        """Count a turn; the session goes to `owner` if it has none yet, and stays absent for `NOBODY`."""
        self._add(model, session_id, (_CLAIM, owner, 0, 0), on_entry)

    def repin(
        self,
        model: str,
        session_id: str,
        owner: bytes,
        expected_epoch: int,
        on_entry: OnEntry,
        *,
        expected_turns: int = 0,
    ) -> None:
        """Move the session if its owner epoch, and its turns unless 0, are still the expected ones.

        The entry in force comes back: another gateway's if that was faster.
        """
        self._add(model, session_id, (_REPIN, owner, expected_epoch, expected_turns), on_entry)

    def count(self, model: str, session_id: str, owner: bytes, on_entry: OnEntry) -> None:
        """Do as `claim` does, perhaps a little later: for a turn that is on its way to `owner` already."""
        self._add_later(model, session_id, (_CLAIM, owner, 0, 0), on_entry)

    def note_context(self, model: str, session_id: str, context_tokens: int) -> None:
        """Record the length of a session's context, if it has an entry. Lost silently if Redis is away.

        It goes with the next call, or by itself a little later: nobody waits for it.
        """
        self._add_later(model, session_id, (_NOTE, NOBODY, 0, min(context_tokens, _MOST_TOKENS)), None)

    def look_up(self, model: str, session_id: str, on_entry: OnEntry) -> None:
        """Ask without counting a turn; `ABSENT` for a session that has no entry."""
        self._add(model, session_id, (_LOOK_UP, NOBODY, 0, 0), on_entry)

    # ------------------------------------------------------------------ by coroutine: everybody else
    async def claimed(self, model: str, session_id: str, replica_id: str) -> SessionEntry:
        """Do as `claim` does. Raises `SessionTableUnavailableError`."""
        return await self._entry(functools.partial(self.claim, model, session_id, owner_digest(replica_id)))

    async def repinned(
        self, model: str, session_id: str, replica_id: str, expected_epoch: int, *, expected_turns: int = 0
    ) -> SessionEntry:
        """Do as `repin` does. Raises `SessionTableUnavailableError`."""
        owner = owner_digest(replica_id)
        ask = functools.partial(self.repin, model, session_id, owner, expected_epoch)
        return await self._entry(functools.partial(ask, expected_turns=expected_turns))

    async def found(self, model: str, session_id: str) -> SessionEntry:
        """Do as `look_up` does. Raises `SessionTableUnavailableError`."""
        return await self._entry(functools.partial(self.look_up, model, session_id))

    async def _entry(self, ask: Callable[[OnEntry], None]) -> SessionEntry:
        answer: asyncio.Future[SessionEntry | None] = asyncio.get_running_loop().create_future()
        ask(lambda entry: None if answer.done() else answer.set_result(entry))
        entry = await answer
        if entry is None:
            raise SessionTableUnavailableError("no entry")
        return entry

    # ------------------------------------------------------------------ one call for many
    def _add(
        self, model: str, session_id: str, ask: tuple[bytes, bytes, int, int], on_entry: OnEntry | None
    ) -> None:
        """Put into the next call: what is asked, for which owner, at which epoch, with which count."""
        self._gather(model, session_id, ask, on_entry)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _add_later(
        self, model: str, session_id: str, ask: tuple[bytes, bytes, int, int], on_entry: OnEntry | None
    ) -> None:
        """Put into the next call what waits a moment for company if there was a call a moment ago."""
        self._gather(model, session_id, ask, on_entry)
        if not self._is_timed and not self._is_due:
            self._is_timed = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._sent_at + COMPANY_SECONDS), self._send_late)

    def _send_late(self) -> None:
        self._is_timed = False
        self._is_due = True
        self._send()

    def _gather(
        self, model: str, session_id: str, ask: tuple[bytes, bytes, int, int], on_entry: OnEntry | None
    ) -> None:
        key, field = _encoded_place(model, session_id)
        what, owner, epoch, context_tokens = ask
        self._keys.append(key)
        self._asks.append(_ASK.pack(what, field, owner, epoch, context_tokens))
        self._callers.append(on_entry)

    def _send(self) -> None:
        """Ask for all that has come together. One call at a time: under load the next one gathers more."""
        if self._is_asking or not self._is_due:
            return
        keys, self._keys = self._keys[:MOST_IN_A_CALL], self._keys[MOST_IN_A_CALL:]
        asks, self._asks = self._asks[:MOST_IN_A_CALL], self._asks[MOST_IN_A_CALL:]
        callers, self._callers = self._callers[:MOST_IN_A_CALL], self._callers[MOST_IN_A_CALL:]
        self._is_due = bool(self._keys)
        tail = b"%b%b%b%b" % (word(b"%d" % len(keys)), b"".join(keys), self._ttl, word(b"".join(asks)))
        self.calls += 1
        self._sent_at = asyncio.get_running_loop().time()
        self._is_asking = True
        encode = functools.partial(_encode, len(keys), tail)
        self._link.call(encode(b"EVALSHA", _SHA1), functools.partial(self._take, encode, callers))

    def _take(
        self, encode: Callable[[bytes, bytes], bytes], callers: list[OnEntry | None], reply: Reply | LinkError
    ) -> None:
        if isinstance(reply, LinkError) and str(reply).startswith("NOSCRIPT"):
            self._link.call(encode(b"EVAL", SCRIPT), functools.partial(self._take, encode, callers))
            return
        self._is_asking = False
        self._send()
        if not isinstance(reply, bytes) or len(reply) != len(callers) * _RECORD.size:
            for waiting in filter(None, callers):
                waiting(None)
            return
        for on_entry, record in zip(callers, _RECORD.iter_unpack(reply), strict=True):
            if on_entry is not None:
                on_entry(SessionEntry._make(record))


def _encode(key_count: int, tail: bytes, name: bytes, script: bytes) -> bytes:
    """One script call: with `EVALSHA` by its digest, or with `EVAL` by its text."""
    return b"*%d\r\n%b%b%b" % (key_count + 5, word(name), word(script), tail)
