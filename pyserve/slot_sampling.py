"""How every slot samples, kept as tables, so that a step looks up its rows instead of walking them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pyserve.ops import Weighing
from pyserve.sampler import SampleRequest

_ONE_TOKEN = torch.tensor([0, 0, 1])  # more, in a row of `whole`
_NO_BANS = torch.empty((0, 2), dtype=torch.int64)


@dataclass(slots=True)
class Sampling:
    """How the rows of one step sample.

    `real` f32 [rows, 3]: temperature, top_p, min_p. `whole` int64 [rows, 3]: top_k, seed, and the number of tokens
    that the sequence has when it is sampled, which is the place of the new one.
    """

    requests: list[SampleRequest]  # empty where the step is plain and nothing is banned
    real: torch.Tensor
    whole: torch.Tensor
    is_plain: bool

    def next(self) -> Sampling:
        """Of the same rows, each with a token more."""
        return Sampling(self.requests, self.real, self.whole + _ONE_TOKEN, self.is_plain)

    def bans(self, vocab_size: int) -> torch.Tensor:
        """(row, token id) of what cannot be picked, int64 [n, 2]."""
        if not self.requests:
            return _NO_BANS
        lens = self.whole[:, 2].tolist()
        bans = [
            (row, token)
            for row, (request, num_tokens) in enumerate(zip(self.requests, lens, strict=True))
            if request.is_adjusted
            for token in request.bans(vocab_size, num_tokens).tolist()
        ]
        return torch.from_numpy(np.array(bans, dtype=np.int64).reshape(-1, 2))

    def weighing(self, vocab_size: int, *, follows: bool) -> Weighing | None:
        """What else changes logits; None: nothing. `follows`: the last token of each row is not known yet."""
        if not any(request.is_weighed for request in self.requests):
            return None
        weights = [
            request.weights(vocab_size, num_tokens, num_tokens - follows) if request.is_weighed else None
            for request, num_tokens in zip(self.requests, self.whole[:, 2].tolist(), strict=True)
        ]
        num_places = sum(len(each[0]) for each in weights if each is not None)
        places, values = np.empty((num_places, 2), np.int64), np.empty((num_places, 2), np.float32)
        last = 0
        for row, each in enumerate(weights):
            if each is not None:
                first, last = last, last + len(each[0])
                places[first:last, 0], places[first:last, 1], values[first:last] = row, *each
        penalties = np.array([request.penalties for request in self.requests], dtype=np.float32)
        return Weighing(torch.from_numpy(penalties), torch.from_numpy(places), torch.from_numpy(values))


class SlotSampling:
    """The tables of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self._requests: list[SampleRequest | None] = [None] * num_slots
        self._real = np.zeros((num_slots, 3), dtype=np.float32)
        self._whole = np.zeros((num_slots, 3), dtype=np.int64)
        self._is_plain = np.zeros(num_slots, dtype=np.bool_)
        self._is_free = np.zeros(num_slots, dtype=np.bool_)  # neither adjusted nor banned

    def set(self, slot: int, request: SampleRequest) -> None:
        """Another sequence has the slot."""
        self._requests[slot] = request
        self._real[slot] = request.real
        self._whole[slot, :2] = request.whole
        self._is_plain[slot] = request.is_plain
        self._is_free[slot] = request.is_plain and not request.is_adjusted

    def take(self, slots: list[int], lens: Items[int] | npt.NDArray[np.int32], *, is_scored: bool = False) -> Sampling:
        """Of these slots, in this order; `lens`: tokens that each has when it samples. `is_scored`: the step is not
        plain for another reason, so that the requests are wanted.
        """
        at = np.array(slots, dtype=np.intp)
        whole = self._whole[at]
        whole[:, 2] = lens
        is_free = bool(self._is_free[at].all())
        requests = [] if is_free and not is_scored else [self._requests[slot] for slot in slots]
        return Sampling(
            requests,  # type: ignore[arg-type]  # a slot that runs was set
            torch.from_numpy(self._real[at]),
            torch.from_numpy(whole),
            bool(self._is_plain[at].all()),
        )
