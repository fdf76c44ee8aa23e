"""Mapped model files: tensors as views of the file's bytes, given back to the system once they are packed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ..errors import ModelFileError

# GGML type name -> (values in a block, bytes of a block)
BLOCKS: dict[str, tuple[int, int]] = {
    name: GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
}
FLOAT_TYPES = ("F32", "F16", "BF16")


def fail(path: Path, message: str) -> NoReturn:
    """Raise the one-line ModelFileError about `path`."""
    raise ModelFileError(f"{path}: {' '.join(message.split())}")


def shown(value: object) -> str:
    """A value out of a file as it may stand in a message: quoted, short, on one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Around the mapping of `path`: what cannot be mapped ends in a ModelFileError."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            fail(path, "is neither a file nor a folder")
        if size == 0:
            fail(path, "the file is empty")
        yield
    except OSError as error:
        fail(path, f"cannot be read: {error.strerror or error}")


class MappedFile:
    """A whole file mapped for reading. Pages that were read count as resident until they are released."""

    def __init__(self, path: Path, mapping: np.memmap[Any, np.dtype[np.uint8]]) -> None:
        self.path = path
        self.data: NDArray[np.uint8] = np.asarray(mapping)  # [size], a plain array: cheap to slice
        self.size = self.data.size
        base: object = mapping.base
        assert isinstance(base, mmap.mmap), base
        self._map = base

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Raises ModelFileError for what is no file, is empty or cannot be read."""
        with opening(path):
            return cls(path, np.memmap(path, mode="c"))

    def release(self, start: int, length: int) -> None:
        """Give back the whole pages inside [start, start + length); they are read again from the file when needed."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor as it lies in its file. `shape` has the rows (outputs) first and the columns last, as numpy has them."""

    type: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    num_bytes: int

    @property
    def raw(self) -> NDArray[np.uint8]:
        """The bytes, a view of the mapped file: [num_bytes]."""
        return self.file.data[self.offset : self.offset + self.num_bytes]

    @property
    def num_values(self) -> int:
        return int(np.prod(self.shape, dtype=object))

    def release(self) -> None:
        """Let the pages of the mapping go; `raw` stays valid."""
        self.file.release(self.offset, self.num_bytes)

    def floats(self) -> NDArray[np.float32]:
        """The values of an F32, F16 or BF16 tensor, copied: f32 [shape]."""
        raw = self.raw.tobytes()
        if self.type == "F32":
            values = np.frombuffer(raw, "<f4")
        elif self.type == "F16":
            values = np.frombuffer(raw, "<f2").astype(np.float32)
        else:
            assert self.type == "BF16", self.type
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        return values.reshape(self.shape).astype(np.float32)
