"""What engines say when memory does not suffice, read into a fix that can be offered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Complaint:
    """An engine's own figures about memory that did not suffice."""

    kind: str
    """`too_long`, `card_taken`, `no_room_for_kv`, `weights_too_large` or `out_of_memory`."""
    text: str
    """For people: what happened and what to do."""
    options: tuple[tuple[str, str], ...] = ()
    """Options that would make it start, in the names of the engine that complained."""
    asked_tokens: int | None = None
    possible_tokens: int | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None


_COUNT = r"(\d[\d,_]{0,18})"
_DECIMAL = r"(\d{1,9}(?:\.\d{1,9})?)"
_SIZE = rf"{_DECIMAL} ?GiB"


def _tokens(text: str) -> int:
    return int(re.sub(r"[,_]", "", text))


def _gib(text: str) -> int:
    return round(float(text) * GIB)


def _stored(match: re.Match[str]) -> Complaint:
    asked, possible = _tokens(match[1]), _tokens(match[2])
    return _too_long(asked, possible, None, None)


def _serve_one(match: re.Match[str]) -> Complaint:
    asked, needed, available = _tokens(match[1]), _gib(match[2]), _gib(match[3])
    possible = _tokens(match[4]) if match[4] else asked * available // needed if needed else None
    return _too_long(asked, possible, needed, available)


def _too_long(asked: int, possible: int | None, needed: int | None, available: int | None) -> Complaint:
    advice = f"serve at most {possible:,} tokens" if possible else "serve shorter sequences"
    return Complaint(
        "too_long",
        f"sequences of {asked:,} tokens do not fit into the KV memory: {advice}",
        (("max_model_len", str(possible)),) if possible else (),
        asked,
        possible,
        needed,
        available,
    )


def _taken(match: re.Match[str]) -> Complaint:
    free, total, wanted = _gib(match[1]), _gib(match[2]), _gib(match[4])
    # A hundredth less than what is free: the figures are rounded.
    share = int(free / total * 100 - 1) / 100 if total else 0.0
    fits = 0 < share < 1
    advice = f"let it take {share:g} of the card, or end what holds the rest" if fits else "end what holds it"
    return Complaint(
        "card_taken",
        f"{match[1]} of {match[2]} GiB were free at start, and its share is {match[4]} GiB: {advice}",
        (("gpu_memory_utilization", f"{share:g}"),) if fits else (),
        needed_bytes=wanted,
        available_bytes=free,
    )


def _no_room(_: re.Match[str]) -> Complaint:
    return Complaint(
        "no_room_for_kv",
        "weights and overhead leave no memory for KV: use more of the card, or more accelerators",
    )


def _static_too_small(_: re.Match[str]) -> Complaint:
    return Complaint(
        "no_room_for_kv",
        "weights leave no memory for KV in mem_fraction_static: raise it or use more accelerators",
    )


def _own_engine(match: re.Match[str]) -> Complaint:
    left, block = _tokens(match[1]), _tokens(match[2])
    return Complaint(
        "no_room_for_kv",
        f"{left:,} bytes are left for KV and one block takes {block:,}: set more memory aside",
        needed_bytes=block,
        available_bytes=left,
    )


def _out(match: re.Match[str]) -> Complaint:
    return Complaint(
        "out_of_memory",
        f"{match[1]} {match[2]} could not be allocated: run fewer tokens a step, or leave KV a smaller share",
    )


_STORED = (
    rf"max seq(?:uence)? len(?:gth)? \({_COUNT}\) is larger than the maximum number of tokens that can be "
    rf"stored in (?:the )?KV cache \({_COUNT}\)"
)
_SERVE_ONE = (
    rf"to serve at least one request with the models?'?s max seq len \({_COUNT}\), \(?{_SIZE} KV cache is "
    rf"needed, which is larger than the available KV cache memory \({_SIZE}\)"
    rf"(?:.{{0,80}}?estimated maximum model length is {_COUNT})?"
)
_TAKEN = (
    rf"free memory on device.{{0,20}}? \({_DECIMAL}/{_SIZE}\) on startup is less than desired GPU memory "
    rf"utilization \({_DECIMAL}, {_SIZE}\)"
)
_STATIC = r"not enough memory\. please try (?:to increase|increasing) --mem-fraction-static"
_OWN = rf"{_COUNT} bytes are left for KV, and one block takes {_COUNT}"

_READERS: tuple[tuple[str, Callable[[re.Match[str]], Complaint]], ...] = (
    (_STORED, _stored),
    (_SERVE_ONE, _serve_one),
    (_TAKEN, _taken),
    (r"no available memory for the cache blocks", _no_room),
    (_STATIC, _static_too_small),
    (_OWN, _own_engine),
    (rf"out of memory\. tried to allocate {_DECIMAL} ?([KMG]iB)", _out),
)
_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE | re.DOTALL), read) for pattern, read in _READERS)


def read_complaint(lines: Iterable[str]) -> Complaint | None:
    """First complaint about memory in an engine's last lines; `None` if there is none.

    A message may be broken over lines. Where there are several, the one with figures to act on goes first.
    """
    text = " ".join(lines)
    for pattern, read in _PATTERNS:
        match = pattern.search(text)
        if match is not None:
            return read(match)
    return None
