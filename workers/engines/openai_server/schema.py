"""Request bodies: what is understood, what is refused, and in which words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from workers.engines.openai_server.errors import bad_request
from workers.engines.openai_server.port import ChatMessage

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_STOP_STRINGS = 16
MAX_TEMPERATURE = 2.0
_DEFAULT_COMPLETION_TOKENS = 16

_FIELD_AT_FAULT = re.compile(r"(?:at `\$\.|required field `)([a-z_]+)")


class StreamOptions(msgspec.Struct, frozen=True):
    """How to stream."""

    include_usage: bool = False


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message; only `text` is understood."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One message as sent."""

    role: str
    content: str | list[ContentPart] | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both routes. Fields that are not named here are ignored, as clients send many."""

    model: str
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    return_token_ids: bool | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[msgspec.Raw] | None = None
    response_format: dict[str, msgspec.Raw] | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    continued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling fields of a request, with defaults filled in."""

    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool


class PrefetchRequest(msgspec.Struct, frozen=True):
    """Body of POST /kv/prefetch: one of both."""

    session_id: str = ""
    tokens: list[int] = []


Body = TypeVar("Body", ChatRequest, CompletionRequest)
Decoded = TypeVar("Decoded", bound=msgspec.Struct)


def decode_body(data: bytes, kind: type[Decoded]) -> Decoded:
    """Parse a request body. Raises `ApiError` (400) that names the field at fault."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        found = _FIELD_AT_FAULT.search(str(error))
        param = found.group(1) if found else None
        raise bad_request(str(error), param=param, code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not JSON: {error}", code="invalid_json") from error


def check_sampling(body: ChatRequest | CompletionRequest) -> Sampling:
    """Check the fields of both routes and fill in defaults. Raises `ApiError` (400)."""
    _refuse_unsupported(body)
    temperature = 1.0 if body.temperature is None else body.temperature
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise bad_request("temperature must be from 0 to 2.", param="temperature")
    top_p = 1.0 if body.top_p is None else body.top_p
    if not 0.0 < top_p <= 1.0:
        raise bad_request("top_p must be over 0 and at most 1.", param="top_p")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true.", param="stream_options")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        seed=body.seed,
        stop=_check_stop(body.stop),
        ignore_eos=body.ignore_eos,
    )


def check_max_tokens(body: ChatRequest | CompletionRequest) -> int | None:
    """Return the wanted length, or `None` for as many tokens as fit. Raises `ApiError` (400)."""
    wanted, param = body.max_tokens, "max_tokens"
    if wanted is msgspec.UNSET:
        # As elsewhere: a completion that says nothing is short, one that says null has no bound of its own.
        wanted = None if isinstance(body, ChatRequest) else _DEFAULT_COMPLETION_TOKENS
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        wanted, param = body.max_completion_tokens, "max_completion_tokens"
    if wanted is not None and wanted < 1:
        raise bad_request(f"{param} must be at least 1.", param=param)
    return wanted


def check_continued(body: ChatRequest | CompletionRequest, prompt_tokens: int) -> int:
    """Return how many of the prompt's last tokens were generated elsewhere. Raises `ApiError` (400)."""
    count = body.continued_tokens if isinstance(body, CompletionRequest) else 0
    if not 0 <= count < max(1, prompt_tokens):
        raise bad_request(
            f"continued_tokens must be from 0 to {prompt_tokens - 1}: fewer than the prompt has.",
            param="continued_tokens",
        )
    return count


def check_messages(messages: list[Message]) -> list[ChatMessage]:
    """Join the text parts of each message. Raises `ApiError` (400) for what is not text."""
    if not messages:
        raise bad_request("messages must not be empty.", param="messages")
    return [ChatMessage(role=message.role, content=_join_text(message)) for message in messages]


def single_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    """Return the one prompt of a completion, text or token ids. Raises `ApiError` (400)."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        return prompt[0]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return ids
    raise bad_request("prompt must be one text or one list of token ids.", param="prompt")


def _refuse_unsupported(body: ChatRequest | CompletionRequest) -> None:
    """Refuse what would change the answer and is not done here, rather than ignore it."""
    unsupported: list[tuple[str, object]] = [
        ("n", body.n not in (None, 1)),
        ("logit_bias", body.logit_bias),
        ("presence_penalty", body.presence_penalty),
        ("frequency_penalty", body.frequency_penalty),
    ]
    if isinstance(body, ChatRequest):
        unsupported += [
            ("logprobs", body.logprobs),
            ("top_logprobs", body.top_logprobs),
            ("tools", body.tools),
            ("response_format", _is_constrained(body.response_format)),
        ]
    else:
        unsupported += [
            ("logprobs", body.logprobs is not None),
            ("echo", body.echo),
            ("suffix", body.suffix),
            ("best_of", body.best_of not in (None, 1)),
        ]
    for name, is_set in unsupported:
        if is_set:
            raise bad_request(f"{name} is not supported.", param=name, code="unsupported_value")


def _is_constrained(response_format: dict[str, msgspec.Raw] | None) -> bool:
    if response_format is None:
        return False
    return bytes(response_format.get("type", msgspec.Raw(b'"text"'))) != b'"text"'


def _check_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_request(f"stop takes at most {MAX_STOP_STRINGS} strings.", param="stop")
    if any(not text for text in stops):
        raise bad_request("stop strings must not be empty.", param="stop")
    return stops


def _join_text(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text":
            raise bad_request(
                f"content of type {part.type!r} is not supported; only text is.", param="messages"
            )
    return "".join(part.text for part in content)
