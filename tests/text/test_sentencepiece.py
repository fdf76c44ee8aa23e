"""SentencePiece vocabularies from GGUF metadata: against `transformers`, and against the algorithm spelled out."""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaTokenizer

from pyserve.errors import ModelFileError
from pyserve.text.tokenizer import Tokenizer, from_gguf
from tests.text.vocabularies import HURTING, sentencepiece, sentencepiece_merges, vocab_of


def test_ids_are_those_of_transformers() -> None:
    """transformers gets the merges in the order they were learned; pyserve finds them from the scores.

    A leading space is left out: transformers puts no second one before it, SentencePiece does.
    """
    metadata = sentencepiece()
    theirs = LlamaTokenizer(vocab=vocab_of(metadata), merges=sentencepiece_merges())
    theirs.add_tokens(["<think>", "</think>"])
    ours = from_gguf(metadata)
    for text in HURTING:
        text = text.lstrip(" ")
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


@settings(deadline=None)
@given(st.text(alphabet="theraonisd .,\n<>é日😀", max_size=40))
def test_ids_are_those_of_merging_the_best_neighbours_from_the_left(text: str) -> None:
    assert _tokenizer().encode(text, parse_special=False) == merged_by_hand(text)


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = _tokenizer()
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids) == text.replace("▁", " ")  # the mark itself is a space to SentencePiece


def test_a_space_goes_before_each_stretch_of_text_and_one_comes_off_again() -> None:
    tokenizer = _tokenizer()
    assert tokenizer.token_bytes(tokenizer.encode("the")[0]).startswith(b" ")
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("  two")) == "  two"
    around = tokenizer.encode("the</s>the")
    the = tokenizer.encode("the")
    assert around == [*the, 2, *the]
    bare = from_gguf(sentencepiece(add_space_prefix=False))
    assert bare.token_bytes(bare.encode("the")[0]).startswith(b"t")
    assert bare.decode(bare.encode(" the")) == " the"


def test_characters_without_a_piece_become_bytes() -> None:
    tokenizer = _tokenizer()
    ids = tokenizer.encode("日")
    assert ids[1:] == [3 + byte for byte in "日".encode()]
    assert tokenizer.token_bytes(ids[1]) == "日".encode()[:1]
    assert tokenizer.decode(ids) == "日"
    assert tokenizer.token_text(ids[1]) == "\ufffd"


def test_text_that_looks_like_a_byte_or_control_token_stays_text() -> None:
    tokenizer = _tokenizer()
    for text in ("<0x41>", "<s>", "</s>", "<unk>"):
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {0, 1, 2}
    assert tokenizer.encode("</s>") == [2]


def test_bos_is_added_unless_the_file_says_otherwise() -> None:
    assert _tokenizer().adds_bos
    assert _tokenizer().encode("", add_special=True) == [1]
    assert from_gguf(sentencepiece(add_bos_token=False)).encode("", add_special=True) == []
    assert from_gguf(sentencepiece(add_eos_token=True)).encode("", add_special=True) == [1, 2]
    defaults = from_gguf(sentencepiece(bos_token_id=None, eos_token_id=None, unknown_token_id=None))
    assert (defaults.bos_id, defaults.eos_id) == (1, 2)


def test_a_vocabulary_without_bytes_uses_the_unknown_token() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "▁a"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0],
    }
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("a日") == [5, 0]
    assert tokenizer.decode([5, 0]) == "a"


def test_long_runs_take_about_a_second_at_most() -> None:
    for text in ("a" * 100_000, " " * 100_000, "the " * 25_000, "日" * 30_000):
        start = time.process_time()
        ids = _tokenizer().encode(text)
        assert time.process_time() - start < 3
        assert _tokenizer().decode(ids) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for"),
        ({"scores": "best"}, "tokenizer.ggml.scores is not a list"),
        ({"unknown_token_id": 10**6}, "tokenizer.ggml.unknown_token_id is 1000000"),
    ],
)
def test_a_broken_file_is_refused_in_one_line_that_names_the_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message.replace(".", r"\.")):
        from_gguf(sentencepiece(**changes))


def merged_by_hand(text: str) -> list[int]:
    """Merges the pair whose union has the best score, the leftmost of them, until there is none."""
    metadata = sentencepiece()
    vocab = vocab_of(metadata)
    scores, kinds = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(scores, list) and isinstance(kinds, list)
    ids: list[int] = []
    for i, stretch in enumerate(_user_defined_apart(text)):
        if i % 2:
            ids.append(vocab[stretch])
            continue
        symbols = list("▁" + stretch.replace(" ", "▁")) if stretch else []
        while True:
            unions = [(symbols[k] + symbols[k + 1], k) for k in range(len(symbols) - 1)]
            known = [(-scores[vocab[u]], k) for u, k in unions if u in vocab and kinds[vocab[u]] in (1, 4)]
            if not known:
                break
            _, k = min(known)
            symbols[k : k + 2] = [symbols[k] + symbols[k + 1]]
        for symbol in symbols:
            ids += [vocab[symbol]] if symbol in vocab else [3 + byte for byte in symbol.encode()]
    return ids


def _user_defined_apart(text: str) -> list[str]:
    parts = [text]
    for mark in ("<think>", "</think>"):
        parts = [
            piece
            for i, part in enumerate(parts)
            for piece in ([part] if i % 2 else _alternating(part.split(mark), mark))
        ]
    return parts


def _alternating(stretches: list[str], mark: str) -> list[str]:
    return [piece for stretch in stretches for piece in (mark, stretch)][1:]


@cache
def _tokenizer() -> Tokenizer:
    return from_gguf(sentencepiece())
