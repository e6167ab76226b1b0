"""Text that grows: together it is what all tokens decode to, each part is whole characters, and no part of a stop string leaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, trained

from fusible.errors import ArgumentError
from fusible.models.text import Detokenizer, StopStrings, TextStream, Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
WORDS = ["the", " class", " 日本語", "🙂", "👩‍👩‍👧", " é", "\n", "  ", "naïve", "привет", ".", " Python", "'s", "<s>", "x" * 9]


def pieces(tokenizer: Tokenizer, tokens: list[int], before: list[int] | tuple = ()) -> list[str]:
    stream = Detokenizer(tokenizer, before)
    return [*(stream.push(token) for token in tokens), stream.finish()]


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(WORDS, k=draw.randint(1, 120))) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_the_whole(kind: str) -> None:
    tokenizer = Tokenizer(trained(kind))
    for text in texts(40):
        tokens = tokenizer.encode(text)
        parts = pieces(tokenizer, tokens)
        assert "".join(parts) == tokenizer.decode(tokens)
        assert UNKNOWN not in "".join(parts)
        assert sum(map(bool, parts)) > min(len(tokens), len(text)) / 4


@pytest.mark.parametrize("kind", KINDS)
def test_parts_go_on_from_a_prompt(kind: str) -> None:
    tokenizer = Tokenizer(trained(kind))
    draw = random.Random(1)
    for text in texts(40):
        tokens = tokenizer.encode(text)
        cut = draw.randrange(len(tokens))
        shown = tokenizer.decode(tokens[:cut]).rstrip(UNKNOWN)
        assert shown + "".join(pieces(tokenizer, tokens[cut:], tokens[:cut])) == tokenizer.decode(tokens)


def test_parts_of_any_tokens_make_the_whole() -> None:
    tokenizer, draw = Tokenizer(trained()), random.Random(2)
    for _ in range(100):  # mostly bytes that are no UTF-8
        tokens = [draw.randrange(tokenizer.vocabulary) for _ in range(draw.randint(1, 150))]
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_bytes_that_are_no_utf8_are_not_waited_for() -> None:
    tokenizer = Tokenizer(trained("sentencepiece"))
    wrong, letter = tokenizer.token_of("<0xFF>"), tokenizer.encode("x", special=False)[-1]
    assert wrong is not None
    parts = pieces(tokenizer, [wrong] * 20 + [letter])
    assert parts[:3] == ["", "", ""] and all(parts[3:20])
    assert "".join(parts) == UNKNOWN * 20 + "x"


def test_an_incomplete_character_comes_at_the_end() -> None:
    tokenizer = Tokenizer(trained())
    tokens = tokenizer.encode("a🙂")
    assert pieces(tokenizer, tokens) == ["a", *[""] * (len(tokens) - 2), "🙂", ""]
    assert pieces(tokenizer, tokens[:-1])[-1] == UNKNOWN


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), cuts=st.lists(st.integers(1, 4)))
def test_stop_strings_do_not_hang_on_the_parts(text: str, stops: list[str], cuts: list[int]) -> None:
    stream, shown, left = StopStrings(stops), [], text
    for cut in [*cuts, 30]:
        shown.append(stream.push(left[:cut]))
        left = left[cut:]
    shown.append(stream.finish())
    ends = sorted((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    assert "".join(shown) == (text[: ends[0][1]] if ends else text)
    assert stream.stopped == bool(ends)


def test_nothing_of_a_stop_string_is_shown() -> None:
    tokenizer = Tokenizer(trained())
    tokens = tokenizer.encode("one two 日本 three STOP four")
    stream = TextStream(tokenizer, ["本 three ST", "fourth"])
    assert "".join(stream.push(token) for token in tokens) + stream.finish() == "one two 日" and stream.stopped
    kept = TextStream(tokenizer, ["fourth"])
    assert "".join(kept.push(token) for token in tokens).endswith("STOP ") and kept.finish() == "four" and not kept.stopped
    with pytest.raises(ArgumentError, match="stop: expected texts of at least one character"):
        TextStream(tokenizer, [""])
