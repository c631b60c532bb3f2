"""Words of a pasted command, split as its shell would have, without one, and saying what it would lose."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

LONGEST = 20_000
"""Characters of what is pasted."""
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_OPERATORS = ("&&", "||", ";", "|", "&", ">>", ">", "<")
_QUOTES = "\"'"
_UNEXPANDED = re.compile(r"\$\(\(|\$\(|\$\{|\$[A-Za-z_]|`")
_FLAG_LINE = re.compile(r"^\s*-{1,2}[A-Za-z]")


class PasteError(ValueError):
    """What was pasted cannot be read at all; the text says why."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    environment: tuple[tuple[str, str], ...]
    """Assignments before it."""
    words: tuple[str, ...]
    notes: tuple[str, ...] = ()


def is_unexpanded(text: str) -> bool:
    """Whether a shell would have put something else there: `$X`, `${X}`, `$((1+1))` or a command's output."""
    return _UNEXPANDED.search(text) is not None


def read_command(text: str) -> Command:
    """Split a pasted command. Raises `PasteError`."""
    joined, notes = _join_lines(text)
    words, rest = _split(joined)
    if rest:
        notes.append(f"what follows “{rest[:40]}” is another command, and is left out")
    environment: list[tuple[str, str]] = []
    while words and (words[0] in ("env", "export", "exec", "sudo") or _ASSIGNMENT.match(words[0])):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            environment.append((name, value))
    return Command(tuple(environment), tuple(words), tuple(notes))


def _join_lines(text: str) -> tuple[str, list[str]]:
    """One line of it. Flags on a line after one without `\\` a shell would have lost: that is said."""
    notes: list[str] = []
    joined = ""
    continues = True
    for line in text.strip().splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if not continues and _FLAG_LINE.match(line):
            notes.append(
                f"the line before “{stripped[:40]}” ends without a \\: a shell would have lost what follows; "
                "it is read as part of the command here"
            )
        elif not continues and not joined.endswith(";"):
            joined += " ;" if not _is_assignment(joined) else ""
        continues = stripped.endswith("\\")
        joined += " " + stripped.removesuffix("\\").rstrip()
    return joined.strip(), notes


def _is_assignment(text: str) -> bool:
    """Whether all that was read so far is `export X=y`."""
    first, _, rest = text.strip().partition(" ")
    return first == "export" and bool(_ASSIGNMENT.match(rest.strip()))


def _split(text: str) -> tuple[list[str], str]:
    """Words up to the first operator, and what stands from it on. Raises `PasteError`."""
    words: list[str] = []
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        if text.startswith(_OPERATORS, place):
            return words, text[place:]
        word, place = _word(text, place)
        words.append(word)
    return words, ""


def _word(text: str, place: int) -> tuple[str, int]:
    """One word and where it ends. JSON at its start or after `=` is taken whole: a shell would break it."""
    found = ""
    while place < len(text) and not text[place].isspace() and not text.startswith(_OPERATORS, place):
        letter = text[place]
        if letter in "{[" and (not found or found.endswith("=")):
            whole, place = _json(text, place)
            found += whole
        elif letter in _QUOTES:
            quoted, place = _quoted(text, place)
            found += quoted
        elif letter == "$":
            whole, place = _expansion(text, place)
            found += whole
        elif letter == "\\" and place + 1 < len(text):
            found += text[place + 1]
            place += 2
        else:
            found += letter
            place += 1
    return found, place


def _json(text: str, place: int) -> tuple[str, int]:
    try:
        _, end = json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return text[place], place + 1
    return text[place:end], end


def _quoted(text: str, place: int) -> tuple[str, int]:
    quote = text[place]
    found = ""
    place += 1
    while place < len(text) and text[place] != quote:
        if text[place] == "\\" and quote == '"' and text[place + 1 : place + 2] in ('"', "\\", "$", "`"):
            place += 1
        found += text[place]
        place += 1
    if place >= len(text):
        raise PasteError(f"a quote {quote} is opened and never closed: “{found[:40]}”")
    return found, place + 1


def _expansion(text: str, place: int) -> tuple[str, int]:
    """`$X`, `${X}`, `$((1 + 1))` and `$(x y)` as they stand, blanks included."""
    closing = {"$((": "))", "$(": ")", "${": "}"}
    opened = next((mark for mark in closing if text.startswith(mark, place)), "")
    if not opened:
        return "$", place + 1
    end = text.find(closing[opened], place)
    if end < 0:
        return text[place:], len(text)
    end += len(closing[opened])
    return text[place:end], end
