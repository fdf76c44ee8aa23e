"""A vocabulary from the `tokenizer.ggml.*` keys of a GGUF file.

Two kinds (`tokenizer.ggml.model`):

* `gpt2`: byte-level BPE. Words are cut by the rules named in `tokenizer.ggml.pre`, then merged in the order of
  `tokenizer.ggml.merges`.
* `llama`: SentencePiece BPE. No cutting; spaces become `▁`, one is put before each stretch of plain text (unless
  `add_space_prefix` is false), and the two neighbours whose union has the best score merge first. A score per piece
  is the same as a rank per pair, except that pairs which make the same piece get neighbouring ranks instead of one:
  the pair with the longer left half goes first, which is what merging from the left gives for runs of one character.
  Characters without a piece become `<0xNN>` byte tokens.

Control and unknown tokens are left out of the vocabulary that the library sees, so no merge can make one out of plain
text. Their texts are cut out of the input here before the library sees it, at one place the longest, if the caller
wants them parsed; user-defined tokens always are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Pipeline
from tokenizers import models, normalizers

from pyserve.errors import ModelFileError
from pyserve.text import pieces, pretokenizers
from pyserve.text.pieces import Kind, Pieces, Vocabulary

_PREFIX = "tokenizer.ggml."
_NO_TOKEN = 0xFFFFFFFF  # how files write -1, "there is none", in an unsigned field


def read(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary that `metadata` (key -> value) describes. Raises ModelFileError naming the key at fault."""
    keys = _Keys(metadata)
    model = keys.text("model")
    if model == "gpt2":
        return _byte_level(keys)
    if model == "llama":
        return _sentencepiece(keys)
    raise ModelFileError(f"{_PREFIX}model is {model!r}; supported are 'gpt2' (BPE) and 'llama' (SentencePiece)")


def _byte_level(keys: _Keys) -> Vocabulary:
    name = keys.text("pre", "default")
    rules = pretokenizers.by_name(name)
    if rules is None:
        raise ModelFileError(f"{_PREFIX}pre names an unknown pre-tokenizer: {name!r}")
    texts, kinds = keys.vocabulary()
    vocab = _plain_vocabulary(texts, kinds)
    merges = _merges_in_file(keys, vocab, set(texts))
    pipeline = _pipeline(vocab, merges, ignore_merges=rules.ignores_merges)
    pipeline.pre_tokenizer = rules.build()
    if (normalizer := rules.normalizer()) is not None:
        pipeline.normalizer = normalizer
    tokens = Pieces(texts, kinds, pieces.byte_level_data(texts, kinds))
    return _assemble(keys, tokens, pipeline, adds_bos=rules.adds_bos, defaults=(None, None), strips_space=False)


def _sentencepiece(keys: _Keys) -> Vocabulary:
    texts, kinds = keys.vocabulary()
    scores = keys.floats("scores", len(texts))
    vocab = _plain_vocabulary(texts, kinds)
    merges = merges_by_score(texts, kinds, scores)
    unknown = keys.token("unknown_token_id", len(texts), 0)
    unknown_text = texts[unknown] if unknown is not None else None
    if unknown is not None and unknown_text is not None:
        vocab[unknown_text] = unknown
    has_bytes = Kind.BYTE in kinds
    pipeline = _pipeline(vocab, merges, unk_token=unknown_text, fuse_unk=True, byte_fallback=has_bytes)
    prefixes_space = keys.flag("add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(pieces.SPACE_MARK)] if prefixes_space else []
    pipeline.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", pieces.SPACE_MARK)])
    tokens = Pieces(texts, kinds, pieces.sentencepiece_data(texts, kinds))
    return _assemble(keys, tokens, pipeline, adds_bos=True, defaults=(1, 2), strips_space=prefixes_space)


def _pipeline(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Pipeline:
    """The library's BPE. It has its own idea of valid texts: a token with half a surrogate pair, say, is refused."""
    try:
        return Pipeline(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{_PREFIX}tokens cannot be used: {' '.join(str(error).split())}") from error


def _assemble(
    keys: _Keys,
    tokens: Pieces,
    pipeline: Pipeline,
    *,
    adds_bos: bool,
    defaults: tuple[int | None, int | None],
    strips_space: bool,
) -> Vocabulary:
    """`adds_bos` and `defaults` (BOS and EOS ids) hold unless the file says otherwise."""
    size = len(tokens.texts)
    bos_id = keys.token("bos_token_id", size, defaults[0])
    eos_id = keys.token("eos_token_id", size, defaults[1])
    named_ends = [eos_id, keys.token("eot_token_id", size), keys.token("eom_token_id", size)]
    wants_bos = keys.flag("add_bos_token", adds_bos) and bos_id is not None
    wants_eos = keys.flag("add_eos_token", False) and eos_id is not None
    before = [bos_id] if wants_bos and bos_id is not None else []
    after = [eos_id] if wants_eos and eos_id is not None else []
    return Vocabulary(
        tokens,
        _SplittingEncoder(tokens, pipeline, before, after),
        bos_id=bos_id,
        eos_id=eos_id,
        eog_ids=pieces.end_tokens(tokens, named_ends),
        adds_bos=wants_bos,
        adds_eos=wants_eos,
        strips_leading_space=strips_space,
    )


class _SplittingEncoder:
    """Cuts the texts of special tokens out and gives the stretches between them to the library."""

    def __init__(self, tokens: Pieces, pipeline: Pipeline, before: list[int], after: list[int]) -> None:
        kinds = tokens.kinds
        special = (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
        self._special_ids = {text: i for i, text in enumerate(tokens.texts) if kinds[i] in special and text}
        always = [text for text, i in self._special_ids.items() if kinds[i] == Kind.USER_DEFINED]
        self._all = _any_of(list(self._special_ids))
        self._user_defined = _any_of(always)
        self._pipeline = pipeline
        self._before = before
        self._after = after

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = list(self._before) if add_special else []
        splitter = self._all if parse_special else self._user_defined
        parts = splitter.split(text) if splitter is not None else [text]
        for i, part in enumerate(parts):  # plain text at even places, special tokens between them
            if i % 2:
                ids.append(self._special_ids[part])
            elif part:
                # The batch call is twice as fast as `encode`, which also works out offsets.
                ids.extend(self._pipeline.encode_batch_fast([part], add_special_tokens=False)[0].ids)
        return ids + self._after if add_special else ids


def _any_of(texts: list[str]) -> re.Pattern[str] | None:
    """Matches any of `texts`, at one place the longest. None for no texts."""
    if not texts:
        return None
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) + ")")


def _plain_vocabulary(texts: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Text -> id of the tokens that plain text can become. Of two tokens with one text the first counts."""
    hidden = (Kind.CONTROL, Kind.UNKNOWN)
    vocab: dict[str, int] = {}
    for token, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind not in hidden:
            vocab.setdefault(text, token)
    return vocab


def _merges_in_file(keys: _Keys, vocab: dict[str, int], texts: set[str]) -> list[tuple[str, str]]:
    """The merges of plain tokens in the file's order; ModelFileError if one names a token that is nowhere."""
    merges = []
    for number, line in enumerate(keys.texts("merges")):
        left, _, right = line.partition(" ") if not line.startswith(" ") else (" ", "", line[2:])
        for text in (left, right, left + right):
            if text not in texts:
                raise ModelFileError(f"{_PREFIX}merges[{number}] names {text!r}, which is not in {_PREFIX}tokens")
        if left in vocab and right in vocab and left + right in vocab:
            merges.append((left, right))
    return merges


def merges_by_score(texts: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two pieces, the best-scored piece first, of one piece the longest left half."""
    mergeable = {text for text, kind in zip(texts, kinds, strict=True) if kind in (Kind.NORMAL, Kind.USER_DEFINED)}
    ranked = []
    for token, text in enumerate(texts):
        if text not in mergeable or len(text) < 2 or kinds[token] not in (Kind.NORMAL, Kind.USER_DEFINED):
            continue
        for cut in range(len(text) - 1, 0, -1):
            if text[:cut] in mergeable and text[cut:] in mergeable:
                ranked.append((-scores[token], token, len(text) - cut, text[:cut], text[cut:]))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


class _Keys:
    """Checked access to the `tokenizer.ggml.*` keys."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + name, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{_PREFIX}{name} is {'missing' if value is None else 'not a string'}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._metadata.get(_PREFIX + name, default))

    def token(self, name: str, size: int, default: int | None = None) -> int | None:
        """A token id below `size`; None if there is none."""
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return default if default is not None and default < size else None
        if not isinstance(value, int):
            raise ModelFileError(f"{_PREFIX}{name} is not an integer")
        if value in (-1, _NO_TOKEN):
            return None
        if not 0 <= value < size:
            raise ModelFileError(f"{_PREFIX}{name} is {value}, but the vocabulary has {size} tokens")
        return value

    def texts(self, name: str) -> list[str]:
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise ModelFileError(f"{_PREFIX}{name} holds something that is not a string")
        return values  # type: ignore[return-value]

    def floats(self, name: str, count: int) -> list[float]:
        return [float(value) for value in self._numbers(name, count)]

    def vocabulary(self) -> tuple[list[str], list[int]]:
        """Texts and kinds by token id."""
        texts = self.texts("tokens")
        if not texts:
            raise ModelFileError(f"{_PREFIX}tokens is empty")
        if _PREFIX + "token_type" not in self._metadata:
            return texts, [Kind.NORMAL] * len(texts)
        return texts, [int(value) for value in self._numbers("token_type", len(texts))]

    def _numbers(self, name: str, count: int) -> list[int | float]:
        values = self._list(name)
        if len(values) != count:
            raise ModelFileError(f"{_PREFIX}{name} has {len(values)} entries for {count} tokens")
        if not all(isinstance(value, int | float) for value in values):
            raise ModelFileError(f"{_PREFIX}{name} holds something that is not a number")
        return values  # type: ignore[return-value]

    def _list(self, name: str) -> list[object]:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            raise ModelFileError(f"{_PREFIX}{name} is missing")
        if not isinstance(value, list | tuple):
            to_list = getattr(value, "tolist", None)  # a numpy array
            value = to_list() if to_list is not None else None
        if not isinstance(value, list | tuple):
            raise ModelFileError(f"{_PREFIX}{name} is not a list")
        return list(value)
