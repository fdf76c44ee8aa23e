"""Text as it comes, token by token, is the text of all tokens, in whole characters."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve.text.detokenizer import Detokenizer
from pyserve.text.tokenizer import Tokenizer, from_gguf
from tests.text.vocabularies import byte_level, sentencepiece


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return from_gguf(byte_level() if kind == "bytes" else sentencepiece())


KINDS = st.sampled_from(["bytes", "pieces"])


@settings(deadline=None)
@given(KINDS, st.lists(st.integers(0, 1300), max_size=60), st.booleans())
def test_pushes_and_flush_give_the_text_of_all_tokens(kind: str, tokens: list[int], include_special: bool) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer = Detokenizer(tokenizer, include_special=include_special)
    pushed = "".join([detokenizer.push(token) for token in tokens])
    assert pushed + detokenizer.flush() == tokenizer.decode(tokens, include_special=include_special)


@settings(deadline=None)
@given(KINDS, st.text())
def test_valid_text_is_never_replaced_while_it_comes(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer = Detokenizer(tokenizer)
    expected = text if kind == "bytes" else text.replace("▁", " ")
    seen = ""
    for token in tokenizer.encode(text, parse_special=False):
        seen += detokenizer.push(token)
        assert expected.startswith(seen)
    assert detokenizer.flush() == ""


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = tokenizer_of("pieces")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(3 + byte) for byte in "😀".encode()] == ["", "", "", "😀"]


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    detokenizer = Detokenizer(tokenizer_of("pieces"))
    assert [detokenizer.push(3 + byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_cannot_become_a_character_are_replaced_as_soon_as_that_is_sure() -> None:
    detokenizer = Detokenizer(tokenizer_of("pieces"))
    assert detokenizer.push(3 + 0xFF) == "\ufffd"
    assert detokenizer.push(3 + 0xE6) == ""
    assert detokenizer.push(3 + ord("a")) == "\ufffda"


@pytest.mark.parametrize(("is_continuation", "text"), [(False, "the girl"), (True, " the girl")])
def test_a_continuation_keeps_its_leading_space(is_continuation: bool, text: str) -> None:
    tokenizer = tokenizer_of("pieces")
    detokenizer = Detokenizer(tokenizer, is_continuation=is_continuation)
    assert "".join([detokenizer.push(token) for token in tokenizer.encode("the girl")]) == text


def test_the_leading_space_comes_off_the_first_token_that_has_text() -> None:
    tokenizer = tokenizer_of("pieces")
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(" the", add_special=True)
    assert ids[0] == tokenizer.bos_id
    assert "".join([detokenizer.push(token) for token in ids]) == " the"
