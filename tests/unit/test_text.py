"""Text that streams: whole characters, stop strings across tokens, increments that add up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_jax.engine.text import TextStream
from oscar_jax.models.tokenizer import byte_level

WORLD = (
    "Repeat exactly: \u0111\u00e1belsk\u00e9 \U0001f336\ufe0f "
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u9955\u992e"
)


# One token per byte: every character but ASCII is split over tokens.
TOKENIZER = byte_level(259)


def streamed(text: str, stop: Sequence[str] = (), include_stop: bool = False) -> list[str]:
    """The increments of ``text``, one token at a time, the flush last."""
    stream = TextStream(TOKENIZER, stop, include_stop)
    pieces = [stream.push([id])[0] for id in TOKENIZER.encode(text)]
    return [*pieces, stream.flush()]


def test_every_increment_is_whole_characters_and_their_sum_is_the_text() -> None:
    pieces = streamed(WORLD)
    assert "".join(pieces) == WORLD
    assert not any("\ufffd" in piece for piece in pieces)
    assert max(len(piece) for piece in pieces) == 1  # and none waits for the next


def test_a_character_cut_by_the_end_is_one_replacement_character_at_the_end_only() -> None:
    stream = TextStream(TOKENIZER)
    ids = TOKENIZER.encode("a\U0001f336")[:-1]
    assert [stream.push([id])[0] for id in ids] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_no_text() -> None:
    stream = TextStream(TOKENIZER, ["b"])
    (end,) = TOKENIZER.encode("<|im_end|>")
    assert stream.push([*TOKENIZER.encode("a"), end]) == ("a", False)
    assert stream.flush() == ""


def test_bytes_that_are_no_character_are_replaced_and_what_follows_still_comes() -> None:
    stream = TextStream(TOKENIZER)
    lone = TOKENIZER.encode("\u00e9")[1]  # a continuation byte
    ids = [lone, *TOKENIZER.encode("ok")]
    pieces = [stream.push([id])[0] for id in ids]
    assert "".join(pieces) + stream.flush() == "\ufffdok" == TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("text", "stop", "kept", "with_stop"),
    [
        ("one STOP two", ["STOP"], "one ", "one STOP"),
        ("one STO two", ["STOP"], "one STO two", "one STO two"),
        ("STOP", ["STOP"], "", "STOP"),
        ("aab", ["ab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "ababac"),  # the failed beginning contains the true one
        ("xyz", ["z", "yz"], "x", "xyz"),  # both end at z: the longer one
        ("abcd", ["abcd", "bc"], "a", "abc"),  # bc is complete first
        ("a\n\nb", ["\n\n"], "a", "a\n\n"),
        ("hot \U0001f336\ufe0f!", ["\U0001f336\ufe0f"], "hot ", "hot \U0001f336\ufe0f"),
        ("\u9955\u992e", ["\u992e"], "\u9955", "\u9955\u992e"),
    ],
)
def test_the_text_ends_at_the_first_stop_string_to_complete(
    text: str, stop: list[str], kept: str, with_stop: str
) -> None:
    assert "".join(streamed(text, stop)) == kept
    assert "".join(streamed(text, stop, include_stop=True)) == with_stop


def test_only_a_suffix_that_begins_a_stop_string_is_held_back() -> None:
    assert streamed("a<b</s>", ["</s>"]) == ["a", "", "<b", "", "", "", "", ""]
    assert streamed("a</", ["</s>"]) == ["a", "", "", "</"]
    assert streamed("aaab", ["aab"]) == ["", "", "a", "", ""]


def test_ids_after_the_stop_string_are_not_consumed() -> None:
    stream = TextStream(TOKENIZER, ["END"])
    assert stream.push(TOKENIZER.encode("ab")) == ("ab", False)
    assert stream.push(TOKENIZER.encode("cEND more")) == ("c", True)
    assert stream.consumed == len("abcEND")
    assert stream.push(TOKENIZER.encode("x")) == ("", True)
    assert stream.flush() == ""


def test_an_empty_stop_string_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"stop=\['a', ''\]: a stop string must not be empty"):
        TextStream(TOKENIZER, ["a", ""])


def cut(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """By definition: grow the text by one character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], text[:end]
    return text, text


@given(
    text=st.text("ab\u00e9\U0001f336", max_size=30),
    stop=st.lists(st.text("ab\u00e9\U0001f336", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_any_grouping_of_tokens_gives_the_same_text(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    ids = TOKENIZER.encode(text)
    for include, expected in zip((False, True), cut(text, stop), strict=True):
        stream, joined, at, turn = TextStream(TOKENIZER, stop, include), "", 0, 0
        while at < len(ids):
            size = sizes[turn % len(sizes)]
            joined += stream.push(ids[at : at + size])[0]
            assert expected.startswith(joined)  # nothing is ever taken back
            at, turn = at + size, turn + 1
        assert joined + stream.flush() == expected
