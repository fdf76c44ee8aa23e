"""Token ids to text, token by token, in complete characters."""

from __future__ import annotations

import codecs

from pyserve.text.tokenizer import Tokenizer, WholeTexts


class Detokenizer:
    """The text of one sequence as its tokens come. Pushes and `flush` together give `Tokenizer.decode` of all tokens.

    The first bytes of a character wait for the rest of it; bytes that can no longer become one turn into U+FFFD.
    `is_continuation`: the text goes on after another one (an answer after its prompt), so a leading space is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, include_special: bool = False, is_continuation: bool = False) -> None:
        self._tokenizer = tokenizer
        self._include_special = include_special
        self._whole_texts = WholeTexts(tokenizer, include_special=True) if include_special else tokenizer.whole_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.strips_leading_space and not is_continuation
        self._is_between = not self._strips_space  # the next token's text does not depend on what came before

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        if self._is_between:
            text = self._whole_texts[token]
            if text is not None:
                return text
        return self._push_bytes(token)

    def _push_bytes(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token, include_special=self._include_special)
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        text = self._utf8.decode(data)
        self._is_between = not self._strips_space and not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        """What is left of a character that never became complete: U+FFFD, or nothing."""
        self._is_between = not self._strips_space
        return self._utf8.decode(b"", final=True)
