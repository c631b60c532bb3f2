"""Text on its way out: no half characters, no half stop strings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engines.openai_server.errors import ApiError
from workers.engines.openai_server.port import ChatMessage
from workers.engines.openai_server.stop_strings import StopFilter, StopKeeper
from workers.engines.torch_engine.tokenizer import (
    IncrementalDecoder,
    ModelTokenizer,
    TokenizerError,
)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> ModelTokenizer:
    return ModelTokenizer(demo_model)


# A special token's name in the text is read as that token, and what is shown leaves those out.
PLAIN_TEXT = st.text(max_size=40).filter(lambda text: "<|" not in text)


@settings(max_examples=200, deadline=None)
@given(prompt=st.text(max_size=12), text=PLAIN_TEXT)
def test_pieces_add_up_to_the_text_and_hold_no_half_character(
    tokenizer: ModelTokenizer, prompt: str, text: str
) -> None:
    decoder = IncrementalDecoder(tokenizer, tokenizer.encode_text(prompt))
    pieces = [decoder.feed(token) for token in tokenizer.encode_text(text)]
    # U+FFFD in the text itself looks like a character still open, until another follows it.
    assert "".join(pieces) == text.rstrip("\ufffd") or "\ufffd" in text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_special_token_in_the_text_is_not_shown(tokenizer: ModelTokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer, [])
    tokens = tokenizer.encode_text("so<|pad|>it goes<|end|>")
    assert "".join(decoder.feed(token) for token in tokens) == "soit goes"


def test_character_of_four_bytes_comes_out_whole(tokenizer: ModelTokenizer) -> None:
    tokens = tokenizer.encode_text("🙂é")
    assert len(tokens) == 6
    decoder = IncrementalDecoder(tokenizer, [])
    assert [decoder.feed(token) for token in tokens] == ["", "", "", "🙂", "", "é"]


def test_bytes_that_are_no_text_do_not_hold_the_stream_up(tokenizer: ModelTokenizer) -> None:
    broken = tokenizer.encode_text("🙂")[:1] * 50
    decoder = IncrementalDecoder(tokenizer, [])
    text = "".join(decoder.feed(token) for token in [*broken, *tokenizer.encode_text(" on")])
    assert text == "\ufffd" * 50 + " on"


BYTES_AND_WORDS = st.lists(st.sampled_from([*range(256), 300, 700]), min_size=1, max_size=30)


@settings(max_examples=300)
@given(prompt=st.lists(st.integers(0, 255), max_size=8), tokens=BYTES_AND_WORDS, data=st.data())
def test_decoder_that_takes_over_says_what_the_first_had_not_said_yet(
    tokenizer: ModelTokenizer, prompt: list[int], tokens: list[int], data: st.DataObject
) -> None:
    """Also within a character, and among bytes that make none."""
    unbroken = IncrementalDecoder(tokenizer, prompt)
    pieces = [unbroken.feed(token) for token in tokens]
    cut = data.draw(st.integers(0, len(tokens)))
    second = IncrementalDecoder(tokenizer, [*prompt, *tokens[:cut]])
    assert "".join(second.feed(token) for token in tokens[cut:]) == "".join(pieces[cut:])


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_that_keeps_its_stop_string_ends_where_the_other_would(
    pieces: list[str], stops: list[str]
) -> None:
    cutting, keeping = StopFilter(stops), StopKeeper(stops)
    cut, kept = "", ""
    for piece in pieces:
        (shown, stopped), (more, also_stopped) = cutting.feed(piece), keeping.feed(piece)
        cut, kept = cut + shown, kept + more
        assert stopped == also_stopped
        if stopped:
            assert kept.removeprefix(cut) in stops
            assert StopFilter(stops).feed(kept) == (cut, True)
            return
    assert kept == "".join(pieces) == cut + cutting.flush()


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_the_same_place_however_the_text_is_split(
    pieces: list[str], stops: list[str]
) -> None:
    whole = "".join(pieces)
    found = [whole.index(stop) for stop in stops if stop in whole]
    stop_filter = StopFilter(stops)
    shown, stopped = "", False
    for piece in pieces:
        fresh, stopped = stop_filter.feed(piece)
        shown += fresh
        if stopped:
            break
    if not stopped:
        shown += stop_filter.flush()
    assert stopped == bool(found)
    # One piece may end two stop strings; the one that was complete first decides.
    assert shown == whole[: min(found)] if len(found) == 1 else whole.startswith(shown)
    assert not any(stop in shown for stop in stops)


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    stop_filter = StopFilter(["END"])
    assert stop_filter.feed("hello") == ("hello", False)
    assert stop_filter.feed(" E") == (" ", False)
    assert stop_filter.feed("N") == ("", False)
    assert stop_filter.feed("x") == ("ENx", False)


def test_chat_template_writes_roles_and_opens_the_answer(tokenizer: ModelTokenizer) -> None:
    tokens = tokenizer.encode_chat([ChatMessage("user", "Hi"), ChatMessage("assistant", "Yes")])
    raw = tokenizer.encode_text("<|begin|><|user|>Hi<|end|><|assistant|>Yes<|end|><|assistant|>")
    assert tokens == raw


@pytest.mark.parametrize(
    "template", ["{{ messages.__class__.__mro__ }}", "{{ messages + 1 }}", "{{ nothing.there }}"]
)
def test_template_that_fails_or_reaches_out_of_its_sandbox_is_a_refusal(
    demo_model: Path, tmp_path: Path, template: str
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(demo_model / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ApiError, match="refused"):
        ModelTokenizer(tmp_path).encode_chat([ChatMessage("user", "x")])


def test_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot read"):
        ModelTokenizer(tmp_path)
