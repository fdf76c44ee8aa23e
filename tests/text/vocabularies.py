"""Small trained vocabularies in the form of GGUF metadata, and texts that tokenizers stumble over."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "Once upon a time there was a little girl named Lily. She loved to play outside in the sunshine with her friends.",
    "def count(items):\n    total = 0\n    for item in items:\n        total += 1\n    return total\n",
    "It's what they've said: we'll see, I'm sure, don't you'd rather know? HTTPServer parseXMLFile IT'S",
    "In 2024 there were 12345 of 1000000 things, 3.14159 and 42.",
    "Größe, naïve café, Москва и Киев, 日本語のテキスト, 中文字符, 한국어, ελληνικά, हिन्दी",
    "a  b   c    d\t\te\r\n\r\nf\n\n\ng   \n   h !!! ??? ... --- === //////",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 e\u0301 ñ n\u0303 ﬁ ½ ²",
]

HURTING = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "  two  spaces   three    four     five",
    "tabs\tand\t\tmore\t \tmixed",
    "lines\nand\r\nCRLF\r\n\r\n\nblank   \n\n  indented\n\ttabbed",
    "numbers 1 12 123 1234 12345 3.14159 1,000,000 ١٢٣ ½ ² Ⅷ",
    "it's IT'S they've THEY'VE I'm we'll we'd don't 'sss ''s o'clock ’s",
    "camelCase PascalCase HTTPServer snake_case kebab-case SCREAMING_CASE x2y",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # note\n\n\nclass A: pass\n",
    "https://example.org/path?query=1&other=%20#part user@example.org",
    "😀😀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ☺️ 🇩🇪",
    "日本語のテキスト。中文字符，한국어 텍스트 ไทย हिन्दी العربية עברית",
    "Größe naïve café e\u0301 n\u0303 ﬁ ſ ẞ İ ǅ Москва ελληνικά",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\u200d\ufeffbom\x00nul\x7f\x85",
    "𝒳𝓎 𐐀𐐨 \U0010ffff \ufffd \ue000",
    "!!! ??? ... --- ===>>> <<<||| ((())) [[[]]] {{{}}} `~@#$%^&*",
    "a" * 300 + " " * 300 + "\n" * 50,
]


@cache
def _trained_bytes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tokens by id, merges) of a byte-level vocabulary."""
    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    lines = CORPUS + ["123 12 23 34 45 '' \n\n\n\r\n '''s ''ve 'S 'VE 日本 本語 \n//"] * 3
    pipeline.train_from_iterator(lines * 2, trainer)
    return _vocabulary_of(pipeline)


@cache
def _trained_pieces() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tokens by id, merges) of a SentencePiece-like vocabulary. Characters of the corpus come first."""
    pipeline = Tokenizer(models.BPE())
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, max_token_length=16)
    lines = [line for line in CORPUS if "日本語" not in line and "😀" not in line]
    pipeline.train_from_iterator([word for line in lines * 2 for word in line.split("\n")], trainer)
    return _vocabulary_of(pipeline)


def _vocabulary_of(pipeline: Tokenizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    model = json.loads(pipeline.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(tokens), tuple(" ".join(merge) for merge in model["merges"])


CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>", "</think>")


def byte_level(pre: str | None = "gpt-2", **changes: object) -> dict[str, object]:
    """Metadata of a byte-level vocabulary: CONTROL first, USER_DEFINED last. `changes` sets or (None) drops keys."""
    tokens, merges = _trained_bytes()
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*CONTROL, *tokens, *USER_DEFINED],
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * len(tokens) + [4] * len(USER_DEFINED),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return _changed(metadata, changes)


def sentencepiece(**changes: object) -> dict[str, object]:
    """Metadata of a SentencePiece vocabulary: <unk> <s> </s>, 256 bytes, pieces, two user-defined tokens."""
    pieces, merges = _trained_pieces()
    ranks = {merge.replace(" ", ""): rank for rank, merge in reversed(list(enumerate(merges)))}
    scores = [-float(ranks[piece]) - 1 if piece in ranks else -1e4 for piece in pieces]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{i:02X}>" for i in range(256)),
            *pieces,
            *USER_DEFINED,
        ],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4] * len(USER_DEFINED),
        "tokenizer.ggml.scores": [0.0] * 259 + scores + [0.0] * len(USER_DEFINED),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(metadata, changes)


def vocab_of(metadata: dict[str, object]) -> dict[str, int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return {text: token for token, text in enumerate(tokens)}


def merges_of(metadata: dict[str, object]) -> list[tuple[str, str]]:
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    return [(merge.split(" ")[0], merge.split(" ")[1]) for merge in merges]


def sentencepiece_merges() -> list[tuple[str, str]]:
    """The merges in the order in which the SentencePiece vocabulary learned them."""
    return [(merge.split(" ")[0], merge.split(" ")[1]) for merge in _trained_pieces()[1]]


def _changed(metadata: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}
