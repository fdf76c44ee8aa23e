"""A model's tensors on their way from the file into the program: packed, and let go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops.device import Device, Pack
from ..ops.weights import PackedWeight, broken_row, pack
from .files import FileTensor, fail, shown
from .spec import ROPE_FACTORS


class Weights:
    """All weights of a model under their GGUF names, packed by `num_threads` threads as this is built.

    Each tensor is read once and its part of the mapping is released straight away, so that the weights are held once.
    `on_progress` hears the share of the bytes that are done, in the thread that builds. Raises ModelFileError naming a
    tensor with values that are no numbers: nothing that is computed with them would be one.
    """

    def __init__(
        self,
        tensors: Mapping[str, FileTensor],
        num_threads: int,
        on_progress: Callable[[float], None],
        device: Device | None = None,
    ) -> None:
        self._vectors = {name: _vector(name, tensor) for name, tensor in tensors.items() if len(tensor.shape) == 1}
        matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 2}
        self._packed: dict[str, PackedWeight] = {}
        total_bytes, done_bytes = sum(tensor.num_bytes for tensor in matrices.values()), 0
        packed = partial(_packed, pack=pack if device is None else device.pack)
        with ThreadPoolExecutor(num_threads) as pool:
            for name, weight in zip(matrices, pool.map(packed, matrices, matrices.values()), strict=True):
                self._packed[name] = weight
                done_bytes += matrices[name].num_bytes
                on_progress(done_bytes / total_bytes)

    def packed(self, name: str) -> PackedWeight:
        """A matrix [outputs, inputs] in the kernels' layout."""
        return self._packed[name]

    def vector(self, name: str) -> torch.Tensor:
        """A norm or a bias: f32 [values]."""
        return self._vectors[name]

    def vector_if_there(self, name: str) -> torch.Tensor | None:
        return self._vectors.get(name)

    def rope_factors(self) -> NDArray[np.float64] | None:
        """What the file divides the rope frequencies by: f64 [rotary_dim / 2], or None."""
        factors = self._vectors.get(ROPE_FACTORS)
        return None if factors is None else factors.numpy().astype(np.float64)


def _packed(name: str, tensor: FileTensor, pack: Pack) -> PackedWeight:
    rows, columns = tensor.shape
    row = broken_row(tensor.type, tensor.raw, rows, columns)
    if row is not None:
        fail(tensor.file.path, f"tensor {shown(name)}: row {row} has a value that is NaN or infinite")
    weight = pack(tensor.type, tensor.raw, rows, columns)
    tensor.release()
    return weight


def _vector(name: str, tensor: FileTensor) -> torch.Tensor:
    values = torch.from_numpy(tensor.floats())
    if not values.isfinite().all():
        fail(tensor.file.path, f"tensor {shown(name)}: a value is NaN or infinite")
    tensor.release()
    return values
