"""Heads that were read before but for a few values: what they meant then, they mean again.

A client's heads differ in the session, in the body's length and in little else. A head is cut at those
lines, and if all the rest of it was read by llhttp and admitted before, neither is asked again: that
takes a fifth of the time. Only values of an alphabet that says nothing in HTTP are cut out, each line is
whole, and only a request that is whole in one read is looked at here. Everything else goes the long way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from exaserve_ops.gateway.admission import Admission
from exaserve_ops.gateway.headers import Roles
from exaserve_ops.gateway.requests import Request

_HEAD_END = b"\r\n\r\n"
_LINE_END = b"\r\n"
_LENGTH = b"content-length"
_REQUEST_ID = b"x-request-id"
_LONGEST_HEAD_BYTES = 4096
_LONGEST_LENGTH_DIGITS = 9
_MOST_HEADS = 1024
_MOST_STRANGERS = 8192
_LONG_WAY = frozenset({b"expect", b"transfer-encoding"})
"""Heads with these are for llhttp alone."""


@dataclass(frozen=True, slots=True)
class _Familiar:
    """What a head means, whatever its values are; places count its pieces, a value being one of them."""

    path: bytes
    lines: bytes
    """All lines of it that go to an engine and have no value cut out."""
    token: bytes
    asked_class: bytes
    is_continued: bool
    length_at: int
    session_at: int
    """0 where the head names no session: what is cut out never comes first."""
    request_id_at: int
    passing: tuple[tuple[int, bytes], ...]
    """Where values are that go to the engine, and the start of their lines."""


class FamiliarHeads:
    """The heads that this process has learnt."""

    def __init__(self, roles: Roles, admission: Admission, session_headers: Sequence[bytes]) -> None:
        self._roles = roles
        self._admission = admission
        self._session_headers = session_headers
        self._heads: dict[tuple[bytes, ...], _Familiar] = {}
        self._strangers: set[int] = set()
        """Hashes of those seen once. Some clients say something new each time: not worth learning."""
        names = b"|".join(map(re.escape, (_LENGTH, _REQUEST_ID, *session_headers)))
        self._varying = re.compile(rb"\r\n(" + names + rb"): ([A-Za-z0-9._:-]{1,128})(?=\r\n)", re.IGNORECASE)

    def read(self, data: bytes) -> Request | None:
        """Read what is exactly one request, admitted; `None` if it has to go the long way."""
        end = data.find(_HEAD_END, 0, _LONGEST_HEAD_BYTES)
        if end < 0:
            return None
        pieces = self._varying.split(data[: end + len(_LINE_END)])
        head = self._heads.get((*pieces[::3], *pieces[1::3]))
        if head is None:
            return None
        body = data[end + len(_HEAD_END) :]
        length = pieces[head.length_at]
        if len(length) > _LONGEST_LENGTH_DIGITS or not length.isdigit() or int(length) != len(body):
            return None
        request = Request()
        request.method = b"POST"
        request.path = head.path
        request.is_continued = head.is_continued
        request.lines.append(head.lines)
        for place, prefix in head.passing:
            request.lines.append(prefix + pieces[place] + _LINE_END)
        request.body_parts.append(body)
        if head.session_at:
            request.session_id = pieces[head.session_at].decode()
        given_id = pieces[head.request_id_at] if head.request_id_at else None
        return request if self._admission.readmit(request, head.token, head.asked_class, given_id) else None

    def learn(self, data: bytes, request: Request) -> None:
        """Learn the head of what was read the long way, all of `data`, if it came for the second time."""
        end = data.find(_HEAD_END, 0, _LONGEST_HEAD_BYTES)
        if end < 0 or request.refusal is not None or request.key is None or request.repeated:
            return
        if len(request.body) != len(data) - end - len(_HEAD_END):
            return  # not one request from beginning to end, or no telling where its head ended
        pieces = self._varying.split(data[: end + len(_LINE_END)])
        key = (*pieces[::3], *pieces[1::3])
        if hash(key) not in self._strangers:
            if len(self._strangers) >= _MOST_STRANGERS:
                self._strangers.clear()
            self._strangers.add(hash(key))
            return
        head = self._describe(pieces, request)
        if head is not None:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            self._heads[key] = head

    def _describe(self, pieces: Sequence[bytes], request: Request) -> _Familiar | None:
        known = request.known
        places = {pieces[place].lower(): place + 1 for place in range(1, len(pieces), 3)}
        session_header = next((name for name in self._session_headers if name in known), b"")
        is_plain = (
            known.get(b"connection", b"keep-alive").lower() == b"keep-alive"
            and not _LONG_WAY & known.keys()
            and request.version == "1.1"
            and _LENGTH in places
            and (not session_header or session_header in places)
            and (_REQUEST_ID in places or _REQUEST_ID not in known)
        )
        if not is_plain:
            return None
        passing = tuple(
            (place, prefix) for name, place in places.items() if (prefix := self._roles[name].prefix)
        )
        cut_out = [prefix + pieces[place] + _LINE_END for place, prefix in passing]
        return _Familiar(
            path=request.path,
            lines=b"".join(line for line in request.lines if line not in cut_out),
            token=known[b"authorization"].partition(b" ")[2].strip(),
            asked_class=known.get(b"x-traffic-class", b""),
            is_continued=request.is_continued,
            length_at=places[_LENGTH],
            session_at=places.get(session_header, 0),
            request_id_at=places.get(_REQUEST_ID, 0),
            passing=passing,
        )
