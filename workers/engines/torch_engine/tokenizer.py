"""Text to tokens and back: tokenizer.json and the chat template, as hubs ship them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from workers.engines.openai_server.errors import bad_request
from workers.engines.openai_server.port import ChatMessage

_REPLACEMENT = "\ufffd"
_LONGEST_OPEN_CHARACTER = 3
"""A UTF-8 character of four bytes can lack its end after one, two or three of them."""
_CONTEXT_TOKENS = 6


class TokenizerError(ValueError):
    """The tokenizer files cannot be used; the message says why."""


class ModelTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, model_dir: Path) -> None:
        """Read the files of a model folder. Raises `TokenizerError`."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} is missing")
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust binding raises no class of its own
            raise TokenizerError(f"cannot read {path}: {error}") from error
        settings = _read_settings(model_dir)
        self._special = {
            name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")
        }
        self._template = _compile_template(_find_template(model_dir, settings))

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokens of a conversation and the opening of the answer. Raises `ApiError` (400)."""
        if self._template is None:
            raise bad_request("This model has no chat template; use /v1/completions.")
        rows = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._template.render(messages=rows, add_generation_prompt=True, **self._special)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise bad_request(f"The chat template refused: {error}", param="messages") from error
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def decode_certain(self, tokens: Sequence[int]) -> str:
        """Text of tokens without a character that they may not have ended."""
        return _without_open_end(self.decode(tokens))


class IncrementalDecoder:
    """Text of a growing list of tokens, piece by piece, never half a character.

    Decodes a short window only. A replacement mark at the window's end may yet turn into a
    character and is held back; one before that is final, since its bytes are complete.
    """

    def __init__(self, tokenizer: ModelTokenizer, prompt: Sequence[int]) -> None:
        """Continue after `prompt`, the end of which decides about leading spaces."""
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._shown = len(tokenizer.decode_certain(self._window))

    def feed(self, token: int) -> str:
        """Take one more token; return the text that became certain."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = _without_open_end(text)
        fresh = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if len(self._window) > 2 * _CONTEXT_TOKENS:
            # A character has at most four tokens, so cutting here never cuts an open one. It may
            # cut a complete one, whose remains look open: what is held back is counted, not found.
            self._window = self._window[-_CONTEXT_TOKENS:]
            held_back = len(text) - len(certain)
            self._shown = len(self._tokenizer.decode(self._window)) - held_back
        return fresh


def _without_open_end(text: str) -> str:
    end = len(text)
    while end > 0 and text[end - 1] == _REPLACEMENT and len(text) - end < _LONGEST_OPEN_CHARACTER:
        end -= 1
    return text[:end]


def _read_settings(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return settings


def _token_text(value: object) -> str:
    """Text of a special token, which hubs write as text or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _find_template(model_dir: Path, settings: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compile_template(source: str | None) -> jinja2.Template | None:
    if source is None:
        return None
    # A template comes with the model, from strangers: it must reach nothing of this process.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template does not compile: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
