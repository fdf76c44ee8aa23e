"""A model's tensors on their way from the file into the program: packed, and let go."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops.weights import PackedWeight, pack
from .files import FileTensor
from .spec import ROPE_FACTORS


class Weights:
    """Hands out packed weights by GGUF name. Each is read once; its part of the mapping is released straight away, so
    that the weights are held once. `on_progress` hears the share of the bytes that are packed."""

    def __init__(self, tensors: Mapping[str, FileTensor], on_progress: Callable[[float], None]) -> None:
        self._tensors = tensors
        self._on_progress = on_progress
        self._total_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        self._done_bytes = 0

    def packed(self, name: str) -> PackedWeight:
        """A matrix [outputs, inputs] in the kernels' layout."""
        tensor = self._tensors[name]
        weight = pack(tensor.type, tensor.raw, *tensor.shape)
        self._finish(tensor)
        return weight

    def vector(self, name: str) -> torch.Tensor:
        """A norm or a bias: f32 [values]."""
        tensor = self._tensors[name]
        values = torch.from_numpy(tensor.floats())
        self._finish(tensor)
        return values

    def vector_if_there(self, name: str) -> torch.Tensor | None:
        return self.vector(name) if name in self._tensors else None

    def rope_factors(self) -> NDArray[np.float64] | None:
        """What the file divides the rope frequencies by: f64 [rotary_dim / 2], or None."""
        tensor = self._tensors.get(ROPE_FACTORS)
        return None if tensor is None else tensor.floats().astype(np.float64)

    def _finish(self, tensor: FileTensor) -> None:
        tensor.release()
        self._done_bytes += tensor.num_bytes
        self._on_progress(self._done_bytes / self._total_bytes)
