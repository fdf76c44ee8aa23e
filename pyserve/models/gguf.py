"""GGUF files: metadata as plain Python values and tensors as views of the mapped file.

The `gguf` package's GGUFReader maps the file and reads it: fields, tensor table and alignment are what it finds. It
believes what a file says about itself, though, and a file comes from a stranger. BoundedReader therefore overrides the
reader's primitives, through which all of its reading goes:
- `_get`: nothing is read past the end of the file, so a truncated file ends in an error that says where;
- `_push_field`, `_get_field_parts`: a count is compared with the bytes that are left before anything loops over it;
- `_build_tensors`: a tensor's bytes are computed from its type and shape, without the wrap-around of numpy's integers,
  must lie inside the file and must not overlap another tensor's.
Arrays are also read here in one go: the reader takes their entries one by one, 2 s for a vocabulary of 49,152 tokens.
Arrays in arrays, which the reader would flatten, are refused; no model has them.

These methods are the package's internals, so pyproject.toml names the versions in which they are known, and
tests/models/test_gguf.py notices when one is no longer called. What the tensors mean, and whether they fit the
metadata, is not checked here but in source.py and gguf_spec.py.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.gguf_reader import GGUFReader, ReaderField, ReaderTensor
from numpy.typing import DTypeLike, NDArray

from .files import BLOCKS, FileTensor, MappedFile, fail, opening, shown

MAX_ENTRIES = 1 << 22  # of all arrays together: several times the largest vocabulary with its merges
MAX_COUNT = 1 << 14  # of tensors, of metadata fields
MAX_NAME_BYTES = 65535
# The reader's name of a count -> ours, and the least bytes that one of what is counted has.
COUNTS = {"GGUF.tensor_count": ("the number of tensors", 24), "GGUF.kv_count": ("the number of metadata fields", 13)}
Order = Literal["I", "S", "<"] | None  # of bytes: the host's, swapped, little-endian; None: the file's


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, object]  # str, int, float, bool or a list of these
    tensors: dict[str, FileTensor]
    size_bytes: int


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file and map its tensors. Raises ModelFileError naming what is wrong."""
    reader = BoundedReader(path)
    file = MappedFile(path, reader.data)
    metadata = {key: _value(field) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {tensor.name: _file_tensor(file, tensor) for tensor in reader.tensors}
    file.release(0, int(reader.data_offset))
    return GgufFile(path, metadata, tensors, file.size)


def _value(field: ReaderField) -> object:
    """What the field holds. Strings are decoded here because old vocabularies have some that are not UTF-8."""
    if field.types[-1] != GGUFValueType.STRING:
        return field.contents()
    texts = [str(field.parts[index].data, "utf-8", "replace") for index in field.data]
    return texts if field.types[0] == GGUFValueType.ARRAY else texts[0]


def _file_tensor(file: MappedFile, tensor: ReaderTensor) -> FileTensor:
    shape = tuple(tensor.shape.tolist()[::-1])
    return FileTensor(tensor.tensor_type.name, shape, file, tensor.data_offset, tensor.n_bytes)


class BoundedReader(GGUFReader):
    """A GGUFReader that raises ModelFileError, one line that names the place, for whatever is wrong with a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kind = "metadata field"  # of the entries that are being read
        self._entry: str | None = None  # the entry that is being read, once its name is known
        self._num_entries = 0  # of arrays
        try:
            with opening(path):
                super().__init__(path, "c")
        except (ValueError, LookupError, ArithmeticError) as error:
            fail(path, f"not a GGUF file that can be read: {error} (in {self._place})")

    @property
    def _place(self) -> str:
        return self._entry or "the header"

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Order = None) -> NDArray[Any]:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > self.data.size:
            fail(self._path, f"truncated: the file ends inside {self._place} (at byte {self.data.size})")
        return super()._get(offset, dtype, count, override_order)

    def _get_str(self, offset: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        length, text = super()._get_str(offset)
        if self._entry is None:
            if text.size > MAX_NAME_BYTES:
                fail(self._path, f"the name of a {self._kind} has {text.size} bytes, more than {MAX_NAME_BYTES}")
            self._entry = f"{self._kind} {shown(str(text.data, 'utf-8'))}"
        return length, text

    def _push_field(self, field: ReaderField, skip_sum: bool = False) -> int:
        """Called with the version, both counts and each metadata field, as soon as it is read."""
        if self.byte_order != "I":
            fail(self._path, "a big-endian GGUF file; only little-endian ones can be read")
        if field.name in self.fields:
            fail(self._path, f"{self._place} stands there twice")
        if field.name in COUNTS:
            what, entry_bytes = COUNTS[field.name]
            self._check_count(what, int(field.parts[0][0]), MAX_COUNT, entry_bytes, field.offset)
        self._entry = None
        return super()._push_field(field, skip_sum)

    def _check_count(self, what: str, count: int, limit: int, entry_bytes: int, offset: int) -> None:
        """Whether `count` entries of at least `entry_bytes` each fit between `offset` and the end of the file."""
        if count * entry_bytes > self.data.size - offset:
            fail(self._path, f"{what} is {count}, more than the file holds")
        if count > limit:
            fail(self._path, f"{what} is {count}, more than the limit of {limit}")

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        """Size in bytes, parts, which parts are values, and types of the value at `orig_offs`."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, int(raw_type))
        head, start = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)], orig_offs + 12
        kind, count = GGUFValueType(int(head[0][0])), int(head[1][0])
        if kind == GGUFValueType.ARRAY:
            fail(self._path, f"{self._place} nests arrays, which is not supported")
        dtype = np.dtype(self.gguf_scalar_to_np.get(kind, np.uint64))  # a string begins with its length
        limit = MAX_ENTRIES - self._num_entries
        self._check_count(f"the length of {self._place}", count, limit, dtype.itemsize, start)
        self._num_entries += count
        if kind == GGUFValueType.STRING:
            values, end = self._texts(start, count)
        else:
            values, end = [self._get(start, dtype, count)], start + count * dtype.itemsize
        data = list(range(len(head), len(head) + len(values)))
        return end - orig_offs, [*head, *values], data, [GGUFValueType.ARRAY, kind]

    def _texts(self, offset: int, count: int) -> tuple[list[NDArray[Any]], int]:
        """Many strings and where they end: the hot loop of a vocabulary, hence without a call per string."""
        data, size = np.asarray(self.data), self.data.size
        view, unpack, found = data.data, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(view, offset)[0] if start <= size else start
            if offset > size:
                fail(self._path, f"truncated: the file ends inside {self._place} (at byte {size})")
            found.append(data[start:offset])
        return found, offset

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        self._kind = "tensor"
        field = super()._get_tensor_info_field(orig_offs)
        self._entry = None
        return field

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Called with where the data begins and the entries of the tensor table."""
        places: dict[str, tuple[int, int]] = {}  # name -> first byte and byte after the last
        for field in fields:
            if field.name in places:
                fail(self._path, f"tensor {shown(field.name)} stands there twice")
            places[field.name] = self._span(int(start_offs), field)
        for (before, (_, end)), (name, (start, _)) in pairwise(sorted(places.items(), key=lambda item: item[1])):
            if start < end:
                fail(self._path, f"tensors {shown(before)} and {shown(name)} overlap")
        super()._build_tensors(start_offs, fields)

    def _span(self, data_start: int, field: ReaderField) -> tuple[int, int]:
        """Where a tensor begins and ends, if it is one that can be."""
        path, name = self._path, f"tensor {shown(field.name)}"
        shape, type_id, offset = field.parts[3].tolist()[::-1], int(field.parts[4][0]), int(field.parts[5][0])
        if not 1 <= len(shape) <= 4:
            fail(path, f"{name} has {len(shape)} dimensions")
        if type_id not in set(GGMLQuantizationType):
            fail(path, f"{name} has the unknown type {type_id}")
        type_name = GGMLQuantizationType(type_id).name
        if type_name not in BLOCKS:
            fail(path, f"{name} has type {type_name}, not one of {', '.join(BLOCKS)}")
        block_len, block_bytes = BLOCKS[type_name]
        if 0 in shape or shape[-1] % block_len:
            fail(path, f"{name} of {shape}: rows are not whole {type_name} blocks of {block_len}")
        if offset % int(self.alignment):
            fail(path, f"{name} lies at offset {offset}, not a multiple of the alignment {self.alignment}")
        start = data_start + offset
        end = start + math.prod(shape) // block_len * block_bytes
        if end > self.data.size:
            fail(path, f"truncated: {name} ends at byte {end} of {self.data.size}")
        return start, end
