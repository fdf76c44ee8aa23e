"""Byte-level BPE from GGUF metadata, against the tokenizers of `transformers` with the same vocabulary and merges."""

from __future__ import annotations

import time
import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import CohereTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer, Qwen3_5Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from pyserve.errors import ModelFileError
from pyserve.text.pretokenizers import by_name, known_names
from pyserve.text.tokenizer import Tokenizer, from_gguf
from tests.text.vocabularies import HURTING, byte_level, merges_of, vocab_of

ORACLES = {
    "gpt-2": GPT2Tokenizer,
    "qwen2": Qwen2Tokenizer,
    "qwen35": Qwen3_5Tokenizer,
    "command-r": CohereTokenizer,
}


def oracle(name: str) -> PreTrainedTokenizerBase:
    metadata = byte_level(name)
    special = {"unk_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    if name == "command-r":
        special |= dict.fromkeys(("pad_token", "cls_token", "sep_token", "mask_token"), "<|endoftext|>")
    tokenizer: PreTrainedTokenizerBase = ORACLES[name](vocab=vocab_of(metadata), merges=merges_of(metadata), **special)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.mark.parametrize("name", ORACLES)
def test_ids_are_those_of_transformers(name: str) -> None:
    ours, theirs = from_gguf(byte_level(name)), oracle(name)
    for text in [
        *HURTING,
        "<|im_start|>user\nit's 123<|im_end|>\n<think>\n\nso</think> <|im_end>",
        "\n\n\n".join(HURTING),
    ]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = _gpt2()
    assert tokenizer.decode(tokenizer.encode(text), include_special=True) == text


@settings(deadline=None)
@given(st.text(alphabet="ab's \n\t19日é😀'<|im_end>S"))
def test_ids_of_short_odd_texts_are_those_of_transformers(text: str) -> None:
    ours, theirs = _qwen2_pair()
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_the_cuts_of_llama_3() -> None:
    """Against the pattern that `transformers` converts tiktoken files with."""
    converter: Any = TikTokenConverter
    theirs = pre_tokenizers.Split(Regex(converter().pattern), "isolated")
    for text in HURTING:
        expected = [word for word, _ in theirs.pre_tokenize_str(text)]
        assert cuts("llama-bpe", text) == expected, text


WORDS = {
    "gpt-2": ["It", "'s", " 12345", " IT", "'", "S", " ok", "\n\n", "\t", "x"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " IT", "'", "S", " ok", "\n\n", "\t", "x"],
    "llama-bpe": ["It", "'s", " ", "123", "45", " IT", "'S", " ok", "\n\n", "\tx"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " IT", "'S", " ok", "\n\n", "\tx"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", "5", " IT", "'S", " ok", "\n\n", "\tx"],
    "gpt-4o": ["It's", " ", "123", "45", " IT'S", " ok", "\n\n", "\tx"],
    "deepseek-v3": ["It", "'s", " ", "123", "45", " IT", "'S", " ok", "\n\n", "\tx"],
    "deepseek-llm": ["It", "'", "s", " ", "12345", " IT", "'", "S", " ok", "\n", "\n", "\tx"],
    "deepseek-coder": ["It", "'", "s", " ", "1", "2", "3", "4", "5", " IT", "'", "S", " ok", "\n", "\n", "\tx"],
    "falcon": ["It", "'", "s", " ", "123", "45", " IT", "'", "S", " ok", "\n\n", "\t", "x"],
    "default": ["It", "'", "s", " ", "123", "45", " IT", "'", "S", " ok", "\n\n", "\t", "x"],
    "bloom": ["It's", " 12345", " IT'S", " ok", "\n\n\t", "x"],
}


@pytest.mark.parametrize("name", WORDS)
def test_where_each_rule_cuts(name: str) -> None:
    assert cuts(name, "It's 12345 IT'S ok\n\n\tx") == WORDS[name]


def test_words_in_capitals_and_small_letters() -> None:
    assert cuts("gpt-4o", "parseXMLFile HTTPServer") == ["parse", "XMLFile", " HTTPServer"]
    assert cuts("tekken", "parseXMLFile HTTPServer") == ["parse", "XMLFile", " HTTPServer"]
    assert cuts("llama-bpe", "parseXMLFile HTTPServer") == ["parseXMLFile", " HTTPServer"]
    assert cuts("qwen35", "हिन्दी x") == ["हिन्दी", " x"]
    assert cuts("qwen2", "हिन्दी x") == ["ह", "िन", "्द", "ी", " x"]
    assert cuts("deepseek-v3", "日本abc中文") == ["日本", "abc", "中文"]


def test_every_known_name_loses_nothing() -> None:
    """Whatever a rule cuts, the text comes back, so no expression of the table drops or repeats anything."""
    text = "\n".join(HURTING)
    for name in known_names():
        tokenizer = from_gguf(byte_level(name))
        rules = by_name(name)
        assert rules is not None
        decoded = tokenizer.decode(tokenizer.encode(text))
        assert decoded == (unicodedata.normalize("NFC", text) if rules.is_composed else text), name


def test_special_tokens_are_wholes_only_when_parsed() -> None:
    tokenizer = _gpt2()
    assert tokenizer.encode("a<|im_end|>") == [*tokenizer.encode("a"), 2]
    plain = tokenizer.encode("a<|im_end|>", parse_special=False)
    assert not set(plain) & {0, 1, 2}
    assert tokenizer.decode(plain) == "a<|im_end|>"


def test_user_defined_tokens_are_wholes_always() -> None:
    tokenizer = _gpt2()
    think = tokenizer.vocab_size - 2
    assert tokenizer.encode("<think>", parse_special=False) == [think] == tokenizer.encode("<think>")
    assert tokenizer.decode([think]) == "<think>"


def test_no_merge_makes_a_control_token_of_plain_text() -> None:
    """A file whose merges build the text of a control token: without parsing it stays in parts."""
    metadata = byte_level(
        "bloom",  # its rules leave "<s>" in one word
        tokens=["<s>", "<", "s", ">", "<s"],
        token_type=[3, 1, 1, 1, 1],
        merges=["< s", "<s >"],
        bos_token_id=0,
        eos_token_id=0,
    )
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("<s>", parse_special=False) == [4, 3]
    assert tokenizer.encode("<s>") == [0]


def test_of_two_special_tokens_the_longer_one_matches() -> None:
    metadata = byte_level()
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, list)
    tokenizer = from_gguf(byte_level(tokens=[*tokens, "<a>", "<a><b>"], token_type=[*kinds, 3, 3]))
    assert tokenizer.encode("<a><b>") == [tokenizer.vocab_size - 1]
    assert tokenizer.encode("<a><a><b>") == [tokenizer.vocab_size - 2, tokenizer.vocab_size - 1]


def test_control_tokens_leave_no_text_unless_asked() -> None:
    tokenizer = _gpt2()
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, include_special=True) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.token_bytes(2) == b"" and tokenizer.token_bytes(2, include_special=True) == b"<|im_end|>"
    assert tokenizer.token_text(2) == "<|im_end|>"


def test_lone_surrogates_become_replacement_characters() -> None:
    tokenizer = _gpt2()
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udfff\ud83d\ude00c")) == "a\ufffdb\ufffd😀c"


def test_ids_beyond_the_vocabulary_leave_no_text() -> None:
    tokenizer = _gpt2()
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 5, -1]) == ""


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000, "1" * 100_000, "ab " * 33_000, "\n \n" * 33_000])
def test_long_runs_take_about_a_second_at_most(text: str) -> None:
    for name in ("gpt-2", "llama-bpe"):
        tokenizer = from_gguf(byte_level(name))
        start = time.process_time()
        ids = tokenizer.encode(text)
        assert time.process_time() - start < 3  # some 0.1 s here; quadratic would be minutes
        assert tokenizer.decode(ids) == text


def test_bos_and_eos_follow_the_file_or_the_name() -> None:
    assert from_gguf(byte_level("gpt-2")).encode("a", add_special=True) == from_gguf(byte_level("gpt-2")).encode("a")
    llama = from_gguf(byte_level("llama-bpe"))
    assert llama.adds_bos and llama.encode("a", add_special=True) == [1, *llama.encode("a")]
    assert not from_gguf(byte_level("llama-bpe", add_bos_token=False)).adds_bos
    both = from_gguf(byte_level("gpt-2", add_bos_token=True, add_eos_token=True))
    assert both.encode("", add_special=True) == [1, 2]
    assert both.encode("") == []
    assert not from_gguf(byte_level("gpt-2", add_bos_token=True, bos_token_id=None)).adds_bos


def test_what_ends_an_answer() -> None:
    assert from_gguf(byte_level()).eog_ids == {0, 2}  # <|endoftext|> is control and well known
    assert from_gguf(byte_level(eot_token_id=5, eom_token_id=6)).eog_ids == {0, 2, 5, 6}
    tokens = ["<|return|>", "<|call|>", "<|end|>", "<|eot_id|>", "a", "<|im_end|>"]
    harmony = byte_level(tokens=tokens, token_type=[3, 3, 3, 3, 1, 1], merges=[], bos_token_id=None, eos_token_id=0)
    assert from_gguf(harmony).eog_ids == {0, 1, 3}  # <|end|> goes on there; the last is no control token


def test_ignored_merges_take_a_word_that_is_in_the_vocabulary() -> None:
    tokens = ["a", "b", "c", "bc", "abc"]
    changes: dict[str, Any] = {"tokens": tokens, "token_type": [1] * 5, "merges": ["b c"], "eos_token_id": 0}
    assert from_gguf(byte_level("llama-bpe", **changes)).encode("abc") == [4]
    assert from_gguf(byte_level("gpt-2", **changes)).encode("abc") == [0, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"pre": "no-such-rules"}, "tokenizer.ggml.pre names an unknown pre-tokenizer: 'no-such-rules'"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": ["a", "\ud800"], "token_type": [1, 1], "merges": []}, "tokenizer.ggml.tokens cannot be used: "),
        ({"tokens": ["a", 7]}, "tokenizer.ggml.tokens holds something that is not a string"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a nowhere"]}, "tokenizer.ggml.merges[0] names 'nowhere'"),
        ({"merges": ["alone"]}, "tokenizer.ggml.merges[0] names"),
        ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000, but the vocabulary has"),
        ({"bos_token_id": "one"}, "tokenizer.ggml.bos_token_id is not an integer"),
    ],
)
def test_a_broken_file_is_refused_in_one_line_that_names_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError) as error:
        from_gguf(byte_level(**changes))
    assert message in error.value.message
    assert "\n" not in error.value.message


def test_a_missing_role_may_be_written_as_minus_one() -> None:
    assert from_gguf(byte_level(bos_token_id=0xFFFFFFFF)).bos_id is None


def cuts(name: str, text: str) -> list[str]:
    """The words that the rules `name` make of `text`."""
    rules = by_name(name)
    assert rules is not None
    words = rules.build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in words]


@cache
def _gpt2() -> Tokenizer:
    return from_gguf(byte_level("gpt-2"))


@cache
def _qwen2_pair() -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    return from_gguf(byte_level("qwen2")), oracle("qwen2")
