"""Text to token ids and back, for every vocabulary that pyserve loads.

The Rust library `tokenizers` does the work; this module gives both sources (GGUF metadata, Hugging Face folder) one
face:

* `encode` may match the texts of special tokens as wholes (`parse_special`, for rendered chat templates) or treat them
  as plain text (what a user typed: "<|im_end|>" must not end a turn). User-defined tokens are matched either way.
* `decode` joins the bytes of the tokens and reads them as UTF-8 once, so a character split over tokens comes out whole
  and bytes that are no UTF-8 become U+FFFD. Detokenizer gives the same text piece by piece.
* A vocabulary of the SentencePiece kind puts a space before a text; `decode` takes one leading space off again. The
  continuation of a prompt keeps it (Detokenizer's `is_continuation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pyserve.text import folder_vocabulary, gguf_vocabulary
from pyserve.text.pieces import Vocabulary


class WholeTexts(dict[int, str | None]):
    """What each token adds to an answer, where that is whole characters, else None; filled as tokens are asked for.

    Most tokens are whole characters, and to look one up costs a stream a tenth of decoding its bytes.
    """

    def __init__(self, tokenizer: Tokenizer, *, include_special: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._include_special = include_special

    def __missing__(self, token: int) -> str | None:
        try:
            text = self._tokenizer.token_bytes(token, include_special=self._include_special).decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class Tokenizer:
    """One model's vocabulary. Immutable and safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        self.adds_bos = vocabulary.adds_bos
        self.adds_eos = vocabulary.adds_eos
        self.strips_leading_space = vocabulary.strips_leading_space
        self.vocab_size = len(vocabulary.pieces.texts)
        self.longest_token_bytes = max(map(len, vocabulary.pieces.data), default=0)
        self.whole_texts = WholeTexts(self, include_special=False)
        self._pieces = vocabulary.pieces
        self._encoder = vocabulary.encoder

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` adds BOS and EOS as the model wants them.

        Without `parse_special` the text of a control token is plain text. A lone surrogate counts as U+FFFD.
        """
        return self._encoder.encode(without_surrogates(text), add_special=add_special, parse_special=parse_special)

    def token_bytes(self, token: int, *, include_special: bool = False) -> bytes:
        """What `token` adds to an answer, perhaps part of a character. Empty for a control token (unless
        `include_special`) and for an id beyond the vocabulary, which models with a padded output layer have."""
        if not 0 <= token < self.vocab_size or (not include_special and self._pieces.is_hidden(token)):
            return b""
        return self._pieces.data[token]

    def token_text(self, token: int) -> str:
        """The token as readable text, control tokens too; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token, include_special=True).decode("utf-8", "replace")

    def decode(self, tokens: Iterable[int], *, include_special: bool = False) -> str:
        """The text of `tokens`, without control tokens unless `include_special`. Invalid UTF-8 becomes U+FFFD."""
        data = b"".join([self.token_bytes(token, include_special=include_special) for token in tokens])
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")


def without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates as U+FFFD: the library takes valid Unicode only."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes. Raises ModelFileError naming the key at fault."""
    return Tokenizer(gguf_vocabulary.read(metadata))


def from_folder(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (tokenizer.json and its companions). Raises ModelFileError."""
    return Tokenizer(folder_vocabulary.read(Path(path)))
