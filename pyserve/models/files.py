"""Mapped model files: tensors as views of the file's bytes, given back to the system once they are packed."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError

# GGML type name -> (values in a block, bytes of a block); https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
FLOAT_TYPES = ("F32", "F16", "BF16")


def fail(path: Path, message: str) -> NoReturn:
    """Raise the one-line ModelFileError about `path`."""
    raise ModelFileError(f"{path}: {' '.join(message.split())}")


def shown(value: object) -> str:
    """A value out of a file as it may stand in a message: quoted, short, on one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class MappedFile:
    """A whole file mapped for reading. Pages that were read count as resident until they are released."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            fail(path, "is neither a file nor a folder")
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else None
        except OSError as error:
            fail(path, f"cannot be read: {error.strerror or error}")
        if self._map is None:
            fail(path, "the file is empty")
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)  # [size]

    def release(self, start: int, length: int) -> None:
        """Give back the whole pages inside [start, start + length); they are read again from the file when needed."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and end > first and hasattr(self._map, "madvise"):
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
