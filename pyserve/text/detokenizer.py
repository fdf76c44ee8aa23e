"""Token ids to text, token by token, in complete characters."""

from __future__ import annotations

import codecs

from pyserve.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence as its tokens come. Pushes and `flush` together give `Tokenizer.decode` of all tokens.

    The first bytes of a character wait for the rest of it; bytes that can no longer become one turn into U+FFFD.
    `is_continuation`: the text goes on after another one (an answer after its prompt), so a leading space is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, include_special: bool = False, is_continuation: bool = False) -> None:
        self._tokenizer = tokenizer
        self._include_special = include_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.strips_leading_space and not is_continuation

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        data = self._tokenizer.token_bytes(token, include_special=self._include_special)
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left of a character that never became complete: U+FFFD, or nothing."""
        return self._utf8.decode(b"", final=True)
