"""Tokens in, pieces out: each token travels with the piece in which its text begins, stop strings or none."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve.http.choice import Choice
from pyserve.text.detokenizer import Detokenizer
from pyserve.text.pieces import Kind, Pieces, Vocabulary
from pyserve.text.tokenizer import Tokenizer
from pyserve.types import Finished, FinishReason, SamplingParams, SequenceRequest, SequenceStats, Token

DATA = [b"a", b"b", b"aa", b"ab", b"baa", b"abab", b"", *(bytes([byte]) for byte in "ä".encode()), b"\xff"]


class Mute:
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return []


TOKENIZER = Tokenizer(
    Vocabulary(
        pieces=Pieces([repr(data) for data in DATA], [Kind.NORMAL] * len(DATA), DATA),
        encoder=Mute(),
        bos_id=None,
        eos_id=None,
        eog_ids=frozenset(),
        adds_bos=False,
        adds_eos=False,
        strips_leading_space=False,
    )
)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(range(len(DATA))), max_size=12), st.lists(st.text("abä", max_size=5), max_size=2))
def test_tokens_travel_with_their_text(ids: list[int], stops: list[str]) -> None:
    choice = Choice(0, SequenceRequest((1,), SamplingParams()), TOKENIZER, stops, 0)
    plain = Detokenizer(TOKENIZER)
    begins: list[int] = []
    travelled: list[int] = []
    made = sent = ""
    for token in ids:
        begins.append(len(made))
        made += plain.push(token)
        piece = choice.push(Token(0, token))
        if piece is not None:
            assert piece.text
            sent += piece.text
            travelled += [each.token for each in piece.tokens]
        assert travelled == [each for each, begin in zip(ids, begins, strict=False) if begin < len(sent)]
        assert made.startswith(sent) and choice.is_over == any(stop in made for stop in stops if stop)
        if choice.is_over:
            assert not any(stop in sent for stop in stops if stop)
            return
    rest = choice.finish(Finished(0, FinishReason.LENGTH, SequenceStats()))
    if rest is not None:
        sent += rest.text
        travelled += [each.token for each in rest.tokens]
    assert sent == made + plain.flush() and travelled == ids
