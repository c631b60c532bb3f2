"""Whether a stream can be continued on another replica, and what to ask engines for it. Pure.

An engine is asked for token ids beside its text, so that another one can be given exactly what the
first had: the prompt's ids and those that it generated, as the prompt of a completion. Text would not do,
because tokenising it again may give other tokens. Fields are those of vLLM; `continued_tokens` is our
own engines' alone, which others ignore.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

CHAT_PATH = b"/v1/chat/completions"
TEXT_PATH = b"/v1/completions"
_DEFAULT_TEXT_TOKENS = 16
"""What the API gives a completion that says nothing of its length."""

_CARRIED = frozenset(
    {
        *("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "logit_bias", "repetition_penalty", "user", "priority"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
    }
)
"""Fields that mean the same for the rest of a text as for all of it."""
_OF_PROMPT = frozenset(
    {
        *("messages", "prompt", "max_tokens", "max_completion_tokens"),
        *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "documents"),
        *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("parallel_tool_calls", "tool_choice"),  # nothing without tools
        "return_token_ids",  # which the gateway asks for anyway
    }
)
"""Fields that are of no more use once the prompt's tokens are known, or that the plan has in another form."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields with which a stream cannot be continued, and values that say as much as leaving them out."""
_PRINTABLE = re.compile(r"[a-z_]{1,40}")
_WHY_NOT: Mapping[str, str] = {
    **dict.fromkeys(("n", "best_of"), "of several choices each would have to go on from a place of its own"),
    **dict.fromkeys(
        ("tools", "functions", "response_format"),
        "what an engine has read of a call or a format so far is lost with it",
    ),
    **dict.fromkeys(
        ("logprobs", "top_logprobs"), "their shape and their places in the text would begin anew"
    ),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"),
        "the text so far would count as prompt, which is not penalised",
    ),
    "echo": "the text so far would be echoed as prompt",
    "include_stop_str_in_output": "a stop string across the break would lose its beginning",
    "min_tokens": "tokens would be counted anew",
    **dict.fromkeys(("messages", "modalities"), "it is not of text alone"),
    "prompt": "it is not one prompt of text or tokens",
    "body": "the gateway could not read it",
}
"""Why a stream cannot be put together again, for those who asked for it."""
_WHY_NOT_KNOWN = "the gateway does not know what it means for the rest of a text"


class _Message(msgspec.Struct, frozen=True):
    content: str | list[dict[str, msgspec.Raw]] | None = None


@dataclass(frozen=True, slots=True)
class ContinuationPlan:
    """What one stream is asked for, at first and after a break."""

    is_chat: bool
    first_body: bytes
    """The request's own body, and token ids beside the text."""
    carried: Mapping[str, msgspec.Raw]
    stops: tuple[str, ...]
    max_tokens: int | None
    """`None`: as many as fit."""
    includes_usage: bool
    shows_ids: bool
    """Whether the client itself asked for token ids."""

    def rest_body(self, prompt: Sequence[int], tokens: Sequence[int]) -> bytes:
        """Body of the completion that goes on after `tokens`, of which there are fewer than `max_tokens`."""
        fields: dict[str, Any] = dict(self.carried)
        fields["prompt"] = [*prompt, *tokens]
        fields["max_tokens"] = None if self.max_tokens is None else self.max_tokens - len(tokens)
        fields["continued_tokens"] = len(tokens)
        return msgspec.json.encode(fields | _beside_the_text(self.stops))


def plan_continuation(path: bytes, body: bytes) -> ContinuationPlan | str:
    """Return the plan for a stream's request, or the name of the field that rules it out."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name, raw in fields.items():
            if name not in _CARRIED and name not in _OF_PROMPT and not _says_nothing(name, raw):
                return name if _PRINTABLE.fullmatch(name) else "unknown field"
        if not _is_text(fields):
            return "messages" if "messages" in fields else "prompt"
        return _make_plan(path == CHAT_PATH, fields)
    except (ValueError, RecursionError) as error:  # the engine will say what is wrong with it
        found = re.search(r"`\$\.([a-z_]{1,40})", str(error))
        return found[1] if found else "body"


def why_ruled_out(field: str) -> str:
    """Say in a sentence's part why a stream with this field is not continued."""
    return f"refused ({field}), since {_WHY_NOT.get(field, _WHY_NOT_KNOWN)}"


def _make_plan(is_chat: bool, fields: Mapping[str, msgspec.Raw]) -> ContinuationPlan:  # noqa: FBT001 - which of two paths
    stop = msgspec.json.decode(fields.get("stop", b"null"), type=str | list[str] | None)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    options = msgspec.json.decode(fields.get("stream_options", b"null"), type=dict[str, Any] | None)
    shows_ids = msgspec.json.decode(fields.get("return_token_ids", b"null"), type=bool | None)
    return ContinuationPlan(
        is_chat=is_chat,
        first_body=msgspec.json.encode({**fields, **_beside_the_text(stops)}),
        carried={name: raw for name, raw in fields.items() if name in _CARRIED},
        stops=stops,
        max_tokens=_max_tokens(is_chat, fields),
        includes_usage=bool(options and options.get("include_usage")),
        shows_ids=bool(shows_ids),
    )


def _beside_the_text(stops: Sequence[str]) -> dict[str, Any]:
    """Have token ids, and nothing held back: a stop string's beginning must not die with its engine."""
    return {"return_token_ids": True} | ({"include_stop_str_in_output": True} if stops else {})


def _max_tokens(is_chat: bool, fields: Mapping[str, msgspec.Raw]) -> int | None:  # noqa: FBT001 - as above
    names = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    for name in names:
        limit = msgspec.json.decode(fields.get(name, b"null"), type=int | None)
        if limit is not None:
            return limit
    return None if is_chat or "max_tokens" in fields else _DEFAULT_TEXT_TOKENS


def _says_nothing(name: str, raw: msgspec.Raw) -> bool:
    """Whether a field's value is as good as none."""
    value = msgspec.json.decode(raw)
    if value is None:
        return True
    # True is 1 and False is 0 in Python, but not in a request.
    return any(
        value == known and isinstance(value, bool) == isinstance(known, bool)
        for known in _NEUTRAL.get(name, ())
    )


def _is_text(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the prompt is one, and of text or tokens only: token ids say nothing of a picture."""
    if "messages" in fields:
        messages = msgspec.json.decode(fields["messages"], type=list[_Message])
        parts = [
            part for message in messages if isinstance(message.content, list) for part in message.content
        ]
        return all(bytes(part.get("type", b"")) == b'"text"' for part in parts)
    prompt = msgspec.json.decode(fields.get("prompt", b"null"))
    if isinstance(prompt, list) and len(prompt) > 1:
        return all(isinstance(item, int) for item in prompt)
    return prompt is not None
