"""Commands of a pasted text, split as a shell would have, without one, and saying what it would lose."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

LONGEST = 20_000
"""Characters of what is pasted."""
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_CONTINUED = re.compile(r"[\\^`][ \t\r]*\n")
"""Line ends that shells of Unix and Windows read over; blanks before the end are let pass."""
_REDIRECTION = re.compile(r"[0-9]*(?:&>>?|>>?&?|<<?<?&?)[ \t]*")
_OPERATOR = re.compile(r"&&|\|\||;;?|\|&?|&|[()](?=\s|$)")
_SKIPPED = re.compile(rf"(?:{_CONTINUED.pattern}|[^\S\n]|#[^\n]*)+")
"""Blanks, comments and line ends that are read over."""
_LINE_ENDS = re.compile(r"(?:\n[^\S\n]*(?:#[^\n]*)?)+")
_FLAG = re.compile(r"-{1,2}[A-Za-z][\w-]*")
_QUOTES = "\"'"
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w .:/-]*>")
"""What documentation writes where a reader has to: `<model>`."""
_UNEXPANDED = re.compile(r"\$\(\(|\$\(|\$\{|\$[A-Za-z_]|`|^<[A-Za-z][\w .:/-]*>$")
_RUNNERS = ("env", "sudo", "exec", "time")
"""What may stand between variables and the command that gets them, with flags of its own."""
_RUNNERS_VALUES = ("-u", "--unset", "--user", "-g", "--group", "-C", "--chdir")


class PasteError(ValueError):
    """What was pasted cannot be read at all; the text says why, and repeats nothing that may be a secret."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    environment: tuple[tuple[str, str], ...]
    """Assignments before it, and those that commands before it exported."""
    words: tuple[str, ...]
    notes: tuple[str, ...] = ()


def is_unexpanded(text: str) -> bool:
    """Whether something else belongs there: `$X`, `${X}`, `$((1+1))`, a command's output, `<model>`."""
    return _UNEXPANDED.search(text) is not None


def read_commands(text: str) -> tuple[Command, ...]:
    """Split a pasted text. Raises `PasteError`."""
    exported: list[tuple[str, str]] = []
    commands: list[Command] = []
    for words, notes in _Splitter(text.replace("\r\n", "\n")).split():
        if words[0] == "export":
            exported += _pairs(words[1:])
            continue
        environment, rest = _take_environment(words)
        if rest:
            commands.append(Command((*exported, *environment), tuple(rest), tuple(notes)))
    return tuple(commands)


def _take_environment(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Assignments before a command, also behind `env` and `sudo` with their flags; and the command."""
    environment: list[tuple[str, str]] = []
    place = 0
    runs = False
    while place < len(words):
        word = words[place]
        if word in _RUNNERS:
            runs = True
        elif _ASSIGNMENT.match(word):
            environment += _pairs([word])
        elif runs and word.startswith("-"):
            place += word in _RUNNERS_VALUES
        else:
            break
        place += 1
    return environment, words[place:]


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, equals, value in (word.partition("=") for word in words) if equals]


class _Splitter:
    """Goes through a text and collects the words of each command, with what is to be noted of it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._commands: list[tuple[list[str], list[str]]] = [([], [])]

    def split(self) -> list[tuple[list[str], list[str]]]:
        """All commands that have words. Raises `PasteError`."""
        while self._place < len(self._text):
            if not (self._skip() or self._end_line() or self._redirect() or self._end_command()):
                self._take_word()
        return [command for command in self._commands if command[0]]

    def _skip(self) -> bool:
        return self._passes(_SKIPPED)

    def _end_line(self) -> bool:
        """A line end ends a command, unless flags stand behind it: a shell would have lost those."""
        if not self._passes(_LINE_ENDS):
            return False
        words, notes = self._commands[-1]
        flag = _FLAG.match(self._text, self._place)
        if flag and words:
            notes.append(
                f"the line before “{flag[0]}” ends without a \\: a shell would have lost what follows; "
                "it is read as part of the command here"
            )
        else:
            self._commands.append(([], []))
        return True

    def _redirect(self) -> bool:
        """Where output goes is no word of the command; `<model>` is one, for a reader to write."""
        if _PLACEHOLDER.match(self._text, self._place) or not self._passes(_REDIRECTION):
            return False
        _, self._place = _word(self._text, self._place)
        return True

    def _end_command(self) -> bool:
        if not self._passes(_OPERATOR):
            return False
        self._commands.append(([], []))
        return True

    def _take_word(self) -> None:
        placeholder = _PLACEHOLDER.match(self._text, self._place)
        if placeholder:
            word, self._place = placeholder[0], placeholder.end()
        else:
            word, self._place = _word(self._text, self._place)
        self._commands[-1][0].append(word)

    def _passes(self, what: re.Pattern[str]) -> bool:
        found = what.match(self._text, self._place)
        if found is None:
            return False
        self._place = found.end()
        return True


def _word(text: str, place: int) -> tuple[str, int]:
    """One word and where it ends. JSON at its start or after `=` is taken whole: a shell would break it."""
    found = ""
    while place < len(text) and not _ends_word(text, place):
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


def _ends_word(text: str, place: int) -> bool:
    return text[place].isspace() or text[place] in ";|&<>" or bool(_CONTINUED.match(text, place))


def _json(text: str, place: int) -> tuple[str, int]:
    try:
        _, end = json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return text[place], place + 1
    return text[place:end], end


def _quoted(text: str, place: int) -> tuple[str, int]:
    quote, begin = text[place], place
    found = ""
    place += 1
    while place < len(text) and text[place] != quote:
        if (
            text[place] == "\\"
            and quote == '"'
            and text[place + 1 : place + 2] in ('"', "\\", "$", "`", "\n")
        ):
            place += 1
            found += "" if text[place] == "\n" else text[place]
        else:
            found += text[place]
        place += 1
    if place >= len(text):
        line = text.count("\n", 0, begin) + 1
        raise PasteError(f"a quote {quote} is opened in line {line} and never closed")
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
