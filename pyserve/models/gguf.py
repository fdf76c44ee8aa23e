"""GGUF files: metadata as plain Python values and tensors as views of the mapped file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names of types come from the `gguf` package. Its
GGUFReader is not used to read: it keeps every string of a vocabulary as numpy arrays (2.2 s for 49,152 tokens where
this takes 0.1 s) and follows counts and offsets wherever they lead. tests/models/test_gguf.py compares the two.

A file comes from a stranger, so no number in it is believed:
- every read is checked against the end of the file, so a truncated file ends in an error that says where;
- every count is checked against the bytes that are left before anything is allocated or looped over;
- a tensor's bytes are computed from its type and shape, must lie inside the file and must not overlap another tensor's.
What the tensors mean, and whether they fit the metadata, is not checked here but in spec.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from .files import BLOCKS, FileTensor, MappedFile, fail, shown

MAX_ENTRIES = 1 << 23  # of one array: far above any vocabulary, and read in seconds
MAX_DEPTH = 4  # of arrays in arrays
STRING, ARRAY, BOOL = 8, 9, 7
INTEGERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8"}
NUMBERS = INTEGERS | {6: "<f4", BOOL: "|b1", 12: "<f8"}


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, object]  # str, int, float, bool or a list of these
    tensors: dict[str, FileTensor]
    size_bytes: int


class Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.at = 0

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self.file.size - self.at:
            fail(self.file.path, f"truncated: the file ends inside {what} (at byte {self.file.size})")
        start, self.at = self.at, self.at + num_bytes
        return self.file.data[start : self.at].data

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, entry_bytes: int, limit: int = MAX_ENTRIES) -> int:
        """A count of entries of at least `entry_bytes` each: no more than the rest of the file can hold."""
        count = self.u64(what)
        if count > limit or count * entry_bytes > self.file.size - self.at:
            fail(self.file.path, f"{what} is {count}, more than the file holds")
        return count

    def text(self, what: str, errors: str = "strict") -> str:
        length = self.u64(what)
        try:
            return str(self.take(length, what), "utf-8", errors)
        except UnicodeDecodeError:
            fail(self.file.path, f"{what} is not UTF-8")

    def texts(self, count: int, what: str) -> list[str]:
        """Many strings: the hot loop of a vocabulary, hence without a call per string."""
        data, size, at = self.file.data.data, self.file.size, self.at
        unpack, found = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            end = at + 8
            if end <= size:
                end += unpack(data, at)[0]
            if end > size:
                fail(self.file.path, f"truncated: the file ends inside {what} (at byte {size})")
            found.append(str(data[at + 8 : end], "utf-8", "replace"))
            at = end
        self.at = at
        return found

    def value(self, kind: int, what: str, depth: int = 0) -> object:
        if kind == STRING:
            return self.text(what, "replace")
        if kind == ARRAY:
            return self.array(what, depth)
        if kind not in NUMBERS:
            fail(self.file.path, f"{what} has the unknown value type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def array(self, what: str, depth: int) -> list[object]:
        kind = self.u32(what)
        if depth >= MAX_DEPTH:
            fail(self.file.path, f"{what} nests arrays more than {MAX_DEPTH} deep")
        if kind == STRING:
            return list(self.texts(self.count(f"the length of {what}", 8), what))
        if kind == ARRAY:
            return [self.value(ARRAY, what, depth + 1) for _ in range(self.count(f"the length of {what}", 12))]
        if kind not in NUMBERS:
            fail(self.file.path, f"{what} has the unknown element type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        count = self.count(f"the length of {what}", dtype.itemsize)
        return list(np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist())


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file and map its tensors. Raises ModelFileError naming what is wrong."""
    file = MappedFile(path)
    cursor = Cursor(file)
    _read_magic(cursor)
    num_tensors = cursor.count("the number of tensors", 24)
    num_fields = cursor.count("the number of metadata fields", 13)
    metadata = _read_metadata(cursor, num_fields)
    tensors = _read_tensors(cursor, num_tensors, _alignment(path, metadata))
    file.release(0, cursor.at)
    return GgufFile(path, metadata, tensors, file.size)


def _read_magic(cursor: Cursor) -> None:
    path = cursor.file.path
    if cursor.file.size < 4 or bytes(cursor.take(4, "the magic")) != b"GGUF":
        fail(path, "not a GGUF file: it does not begin with the letters GGUF")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        fail(path, "a big-endian GGUF file; only little-endian ones can be read")
    if version not in (2, 3):
        fail(path, f"GGUF version {version} is not supported (2 and 3 are)")


def _read_metadata(cursor: Cursor, num_fields: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(num_fields):
        key = cursor.text(f"the name of metadata field {index}")
        if key in metadata:
            fail(cursor.file.path, f"metadata field {shown(key)} stands there twice")
        kind = cursor.u32(f"metadata field {shown(key)}")
        metadata[key] = cursor.value(kind, f"metadata field {shown(key)}")
    return metadata


def _alignment(path: Path, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        fail(path, f"general.alignment must be a power of two up to 1 MiB, not {shown(alignment)}")
    return alignment


def _read_tensors(cursor: Cursor, num_tensors: int, alignment: int) -> dict[str, FileTensor]:
    path = cursor.file.path
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}  # name -> shape, type, offset in the data part
    for index in range(num_tensors):
        name = cursor.text(f"the name of tensor {index}")
        num_dims = cursor.u32(f"tensor {shown(name)}")
        if name in entries:
            fail(path, f"tensor {shown(name)} stands there twice")
        if not 1 <= num_dims <= 4:
            fail(path, f"tensor {shown(name)} has {num_dims} dimensions")
        shape = tuple(cursor.u64(f"tensor {shown(name)}") for _ in range(num_dims))[::-1]
        entries[name] = (shape, cursor.u32(f"tensor {shown(name)}"), cursor.u64(f"tensor {shown(name)}"))
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, (shape, type_id, offset) in entries.items():
        if offset % alignment:
            fail(path, f"tensor {shown(name)} lies at offset {offset}, not a multiple of the alignment {alignment}")
        tensors[name] = _tensor(cursor.file, name, shape, type_id, data_start + offset)
    _check_overlap(path, tensors)
    return tensors


def _tensor(file: MappedFile, name: str, shape: tuple[int, ...], type_id: int, start: int) -> FileTensor:
    try:
        type_name = GGMLQuantizationType(type_id).name
    except ValueError:
        fail(file.path, f"tensor {shown(name)} has the unknown type {type_id}")
    if type_name not in BLOCKS:
        fail(file.path, f"tensor {shown(name)} has type {type_name}, not one of {', '.join(BLOCKS)}")
    block_len, block_bytes = BLOCKS[type_name]
    if 0 in shape or shape[-1] % block_len:
        fail(file.path, f"tensor {shown(name)} of {list(shape)}: rows are not whole {type_name} blocks of {block_len}")
    num_bytes = block_bytes
    for size in (*shape[:-1], shape[-1] // block_len):
        num_bytes *= size
    if start + num_bytes > file.size:
        fail(file.path, f"truncated: tensor {shown(name)} ends at byte {start + num_bytes} of {file.size}")
    return FileTensor(type_name, shape, file, start, num_bytes)


def _check_overlap(path: Path, tensors: dict[str, FileTensor]) -> None:
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            fail(path, f"tensors {shown(before)} and {shown(name)} overlap")
        end, before = tensor.offset + tensor.num_bytes, name
