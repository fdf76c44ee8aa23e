"""What a vocabulary is, whatever file it came from: each token's text, kind and bytes, and the tokens with a role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

SPACE_MARK = "▁"  # SentencePiece writes a space as this character


class Kind(IntEnum):
    """Token kinds with the numbers of `tokenizer.ggml.token_type` (GGUF) and of SentencePiece's model files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts that end an answer in the model families we know, looked up among the control tokens.
END_TEXTS = (
    "</s>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|call|>",
    "<|user_end|>",
    "<EOT>",
    "< EOT >",
    "_<EOT>",
    "<eos>",
    "[EOS]",
    "[|endofturn|]",
    "<｜end▁of▁sentence｜>",
)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The vocabulary by token id. `data[i]` is what token i adds to an answer, control tokens included."""

    texts: Sequence[str]
    kinds: Sequence[int]
    data: Sequence[bytes]

    def is_hidden(self, token: int) -> bool:
        """Whether the token is left out of an answer's text (control and unknown tokens)."""
        return self.kinds[token] in (Kind.CONTROL, Kind.UNKNOWN)


class Encoder(Protocol):
    """Turns valid Unicode into token ids; see `Tokenizer.encode`."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All that a Tokenizer needs. `eog_ids` end an answer; `strips_leading_space`: decoding takes one space off."""

    pieces: Pieces
    encoder: Encoder
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]
    adds_bos: bool
    adds_eos: bool
    strips_leading_space: bool


def byte_level_table() -> dict[int, int]:
    """The characters that byte-level vocabularies write bytes as, by code point (GPT-2's table, for `str.translate`).

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards in order of the byte. The
    characters below U+0100 that stand for no byte are mapped outside Latin-1, so that encoding them there fails.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, 0xFFFF)
    table.update({0x100 + i: byte for i, byte in enumerate(others)})
    return table


def byte_level_data(texts: Iterable[str], kinds: Iterable[int]) -> list[bytes]:
    """The bytes of each token of a byte-level vocabulary. Added tokens, and texts off the table, are plain UTF-8."""
    table = byte_level_table()
    data = []
    for text, kind in zip(texts, kinds, strict=True):
        if kind in (Kind.CONTROL, Kind.USER_DEFINED):
            data.append(text.encode("utf-8", "replace"))
            continue
        try:
            data.append(text.translate(table).encode("latin-1"))
        except UnicodeEncodeError:
            data.append(text.encode("utf-8", "replace"))
    return data


def sentencepiece_data(texts: Iterable[str], kinds: Iterable[int]) -> list[bytes]:
    """The bytes of each token of a SentencePiece vocabulary: `▁` is a space, `<0x0A>` of kind BYTE is that byte."""
    data = []
    for text, kind in zip(texts, kinds, strict=True):
        if kind == Kind.BYTE and (value := byte_value(text)) is not None:
            data.append(bytes([value]))
        elif kind in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN):
            data.append(text.encode("utf-8", "replace"))
        else:
            data.append(text.replace(SPACE_MARK, " ").encode("utf-8", "replace"))
    return data


def byte_value(text: str) -> int | None:
    """10 for `<0x0A>`; None for a text of another form."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        return int(text[3:5], 16)
    except ValueError:
        return None


def end_tokens(pieces: Pieces, known: Iterable[int | None]) -> frozenset[int]:
    """The tokens that end an answer: those the file names (`known`) and control tokens with a well-known end text."""
    ends = {token for token in known if token is not None}
    by_text = {text: i for i, text in enumerate(pieces.texts) if pieces.kinds[i] == Kind.CONTROL and text in END_TEXTS}
    if "<|return|>" in by_text and "<|call|>" in by_text:
        by_text.pop("<|end|>", None)  # in the harmony format it closes a message within an answer that goes on
    return frozenset(ends | set(by_text.values()))
