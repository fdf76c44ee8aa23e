"""GGUF files: the contents that the gguf package reads, and one clear line for every broken file (R39)."""

from __future__ import annotations

import os
import struct
import time
from inspect import signature
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyserve.errors import ModelFileError
from pyserve.models.files import BLOCKS
from pyserve.models.gguf import BoundedReader, read_gguf
from pyserve.models.source import inspect
from tools.make_tiny_model import make_gguf, random_blocks


def error_of(path: Path) -> str:
    """The message about a file that cannot be opened: one line that names the file."""
    with pytest.raises(ModelFileError) as caught:
        inspect(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def write_typed(path: Path, type_name: str, columns: int = 512) -> np.ndarray:
    """One matrix [3, columns] of a type; returns its values by the gguf package's dequantisation."""
    rng = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name.endswith("_K"):
        raw = random_blocks(type_name, 3, columns, rng)
    else:
        raw = quants.quantize(rng.normal(0, 1, (3, columns)).astype(np.float32), kind)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("matrix", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return quants.dequantize(raw, kind)


def header(*, num_tensors: int = 0, num_fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(key: bytes, kind: int, layout: str = "", *values: int | bytes) -> bytes:
    """A file with one metadata field, whose value is packed by hand."""
    return header(num_fields=1) + text(key) + struct.pack(f"<I{layout}", kind, *values)


def tensor(name: bytes = b"tensor", dims: tuple[int, ...] = (64,), type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def tensors(*entries: bytes, num_bytes: int = 512) -> bytes:
    """A file with these tensor entries and `num_bytes` of data."""
    start = header(num_tensors=len(entries)) + b"".join(entries)
    return start + bytes(-len(start) % 32 + num_bytes)


@pytest.mark.parametrize("type_name", BLOCKS)
def test_bytes_of_every_type_are_what_the_gguf_package_reads(tmp_path: Path, type_name: str) -> None:
    expected = write_typed(tmp_path / "typed.gguf", type_name)
    found = read_gguf(tmp_path / "typed.gguf").tensors["matrix"]
    assert (found.type, found.shape) == (type_name, (3, 512))
    values = quants.dequantize(found.raw.reshape(3, -1), gguf.GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_floats_are_the_dequantised_values(tmp_path: Path, type_name: str) -> None:
    expected = write_typed(tmp_path / "typed.gguf", type_name)
    np.testing.assert_array_equal(read_gguf(tmp_path / "typed.gguf").tensors["matrix"].floats(), expected)


def test_metadata_and_tensors_agree_with_the_gguf_package(tmp_path: Path) -> None:
    tags = ["a", "\u00e9\n", ""]
    extra = {"general.tags": tags, "general.ratio": 0.5, "general.is_merge": True, "general.many": [1, -2, 3]}
    path = make_gguf(tmp_path / "model.gguf", type="Q8_0", metadata=extra)
    reader, file = gguf.GGUFReader(path), read_gguf(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert file.metadata["general.tags"] == tags and file.metadata["general.is_merge"] is True
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(file.tensors[tensor.name].raw, tensor.data.reshape(-1).view(np.uint8))


def test_bounds_and_speed_change_nothing_of_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "model.gguf", metadata={"general.tags": ["a", "\u00e9\n", ""], "general.many": [1, -2]})
    expected, found = gguf.GGUFReader(path), BoundedReader(path)
    assert list(found.fields) == list(expected.fields)
    for key, field in expected.fields.items():
        assert found.fields[key].contents() == field.contents() and found.fields[key].types == field.types
    assert (found.data_offset, found.alignment) == (expected.data_offset, expected.alignment)


def test_the_gguf_package_reads_through_the_methods_that_check(tmp_path: Path) -> None:
    class Sealed(gguf.GGUFReader):
        """Has the file's bytes in no other place than where `_get` finds them."""

        data = property(lambda self: None, lambda self, mapped: setattr(self, "sealed", np.asarray(mapped)))

        def _get(self, offset: int, dtype: type, count: int = 1, override_order: str | None = None) -> np.ndarray:
            return self.sealed[offset : offset + np.dtype(dtype).itemsize * int(count)].view(dtype)

    path = make_gguf(tmp_path / "model.gguf")
    assert len(Sealed(path).tensors) == len(read_gguf(path).tensors)
    for name, method in vars(BoundedReader).items():
        if callable(method) and hasattr(gguf.GGUFReader, name) and name != "__init__":
            theirs = signature(getattr(gguf.GGUFReader, name))
            assert list(signature(method).parameters) == list(theirs.parameters), name


def test_strings_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(field(b"tokens", 9, "IQQ1sQ2s", 8, 2, 1, b"\xff", 2, b"ab"))
    assert read_gguf(tmp_path / "old.gguf").metadata == {"tokens": ["\ufffd", "ab"]}


def test_a_large_vocabulary_is_read_within_a_second(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "large.gguf", vocab=50_000, hidden=8, head_dim=8, intermediate=8)
    started = time.perf_counter()
    file = read_gguf(path)
    assert time.perf_counter() - started < 1.0
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 50_000


BROKEN = [
    (b"", "the file is empty"),
    (b"GG", "truncated"),
    (b"PK\x03\x04 a zip archive", "not a GGUF file"),
    (b"GGUF", "truncated"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (header(version=1), "not a GGUF file that can be read: Sorry, file appears to be version 1"),
    (header(num_tensors=1 << 60), "the number of tensors is 1152921504606846976"),
    (header(num_fields=1 << 60), "the number of metadata fields is 1152921504606846976"),
    (field(b"key", 8, "Q", 1 << 62), "ends inside metadata field 'key'"),
    (field(b"key", 99), "99 is not a valid GGUFValueType (in metadata field 'key')"),
    (field(b"key", 9, "IQ", 8, 1 << 40), "the length of metadata field 'key' is"),
    (field(b"key", 9, "IQ", 6, 1 << 61), "the length of metadata field 'key' is"),
    (header(num_tensors=1 << 15) + bytes(1 << 20), "the number of tensors is 32768, more than the limit of 16384"),
    (field(b"key", 9, "IQ", 0, 1 << 23) + bytes(1 << 23), "is 8388608, more than the limit of 4194304"),
    (field(b"key", 9, "IQ", 77, 1), "77 is not a valid GGUFValueType (in metadata field 'key')"),
    (field(b"key", 9, "IQIQIQIQIQIQIQ", *(9, 1) * 7), "nests arrays"),
    (header(num_fields=2) + 2 * field(b"key", 0, "B", 7)[24:], "'key' stands there twice"),
    (field(b"\xff\xfe", 0, "B", 7), "'utf-8' codec can't decode byte 0xff"),
    (field(b"k" * 65536, 0, "B", 7), "the name of a metadata field has 65536 bytes"),
    (field(b"general.alignment", 10, "Q", 32), "Bad type for general.alignment field"),
    (field(b"general.alignment", 4, "I", 0), "Invalid alignment: must be a non-zero power of two"),
    (field(b"general.alignment", 4, "I", 48), "Invalid alignment: must be a non-zero power of two"),
    (tensors(tensor(), num_bytes=255), "tensor 'tensor' ends at byte 320 of 319"),
    (tensors(tensor(dims=(1 << 62, 1 << 62))), "tensor 'tensor' ends at byte"),
    (tensors(tensor(offset=1 << 63)), "tensor 'tensor' ends at byte"),
    (tensors(tensor(offset=(1 << 64) - 64)), "tensor 'tensor' ends at byte"),
    (tensors(tensor(offset=8)), "not a multiple of the alignment"),
    (tensors(tensor(dims=(0,))), "rows are not whole F32 blocks"),
    (tensors(tensor(dims=(48,), type_id=8)), "not whole Q8_0 blocks of 32"),
    (tensors(tensor(dims=(1,) * 5)), "has 5 dimensions"),
    (tensors(tensor(type_id=16)), "has type IQ2_XXS, not one of F32, F16"),
    (tensors(tensor(type_id=4242)), "has the unknown type 4242"),
    (tensors(tensor(), tensor()), "'tensor' stands there twice"),
    (tensors(tensor(), tensor(b"b")), "'tensor' and 'b' overlap"),
    (header(), "general.architecture is missing"),
    (field(b"general.architecture", 8, "Q6s", 6, b"mamba\n"), r"'mamba\n' is not supported"),
]


@pytest.mark.parametrize(("content", "expected"), BROKEN, ids=[expected for _, expected in BROKEN])
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    assert expected in error_of(tmp_path / "broken.gguf")


def test_a_missing_file_and_a_folder_without_a_config(tmp_path: Path) -> None:
    assert "no such file or folder" in error_of(tmp_path / "nothing.gguf")
    assert "config.json: the file is missing" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"block_count": 3}, "'blk.2.attn_norm.weight' is missing"),
        ({"block_count": 1}, "'blk.1.attn_norm.weight' is not one that a llama model has"),
        ({"block_count": 4_000_000_000}, "llama.block_count is 4000000000"),
        ({"block_count": 1_000_000_000}, "llama.block_count is 1000000000, but the file holds"),
        ({"block_count": 0}, "llama.block_count is 0"),
        ({"block_count": "two"}, "llama.block_count must be an integer, not 'two'"),
        ({"embedding_length": 128}, "'token_embd.weight' has shape [299, 64], not [299, 128]"),
        ({"feed_forward_length": 64}, "'blk.0.ffn_gate.weight' has shape [96, 64], not [64, 64]"),
        ({"attention.head_count": 8}, "'blk.0.attn_q.weight' has shape [64, 64], not [128, 64]"),
        ({"attention.head_count_kv": 3}, "4 heads cannot share 3 KV heads"),
        ({"attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv differs between layers"),
        ({"attention.value_length": 32}, "llama.attention.value_length differs from the key length"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "llama.attention.layer_norm_rms_epsilon is nan"),
        (
            {"attention.key_length": 12, "attention.value_length": 12, "rope.dimension_count": 12},
            "a head dimension of 12 is not supported",
        ),
        ({"rope.freq_base": 0.0}, "llama.rope.freq_base is 0.0"),
        ({"rope.freq_base": 1.0}, "a rope base of 1.0 is not supported"),
        ({"rope.dimension_count": 15}, "llama.rope.dimension_count is 15"),
        ({"rope.dimension_count": 32}, "llama.rope.dimension_count is 32"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({"vocab_size": 300}, "llama.vocab_size is 300, but 'token_embd.weight' has 299 rows"),
        ({"expert_count": 8}, "llama.expert_count is 8: such models are not supported"),
        ({"attention.causal": False}, "embedding models are not supported"),
        ({"split.count": 3}, "one part of a split GGUF file"),
        ({"general.architecture": "gpt-neo"}, "architecture 'gpt-neo' is not supported (llama, qwen2, qwen3 are)"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokenizer.ggml.tokens has 2 entries for 299 rows"),
    ],
)
def test_metadata_that_contradicts_the_tensors(tmp_path: Path, metadata: dict[str, object], expected: str) -> None:
    make_gguf(tmp_path / "lying.gguf", metadata=metadata)
    assert expected in error_of(tmp_path / "lying.gguf")


JUNK = [-1, 0, 1, 2.5, float("inf"), "x", ["x"], [1, 2], True]


def test_junk_in_any_field_never_ends_in_another_error(tmp_path: Path) -> None:
    keys = [key.removeprefix("llama.") for key in read_gguf(make_gguf(tmp_path / "model.gguf")).metadata]
    optional = ["rope.scaling.type", "rope.scaling.factor", "attention.sliding_window", "attention.scale"]
    for key in [*keys, *optional]:
        if key.startswith("tokenizer."):
            continue
        for value in JUNK:
            make_gguf(tmp_path / "junk.gguf", metadata={key: value}, layers=1, hidden=32, head_dim=8, vocab=300)
            try:
                inspect(tmp_path / "junk.gguf")
            except ModelFileError as error:
                assert "\n" not in str(error)


def test_a_tensor_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    make_gguf(tmp_path / "extra.gguf", tensors={"blk.0.attn_sinks.weight": np.ones(64, np.float32)})
    assert "'blk.0.attn_sinks.weight' is not one that a llama model has" in error_of(tmp_path / "extra.gguf")


def test_every_truncation_of_a_file_is_noticed(tmp_path: Path) -> None:
    content = make_gguf(tmp_path / "whole.gguf", type="Q4_0").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), *range(400, len(content) - 1, 1009), len(content) - 40]:
        path.write_bytes(content[:length])
        assert length < 400 or "truncated" in error_of(path) or "more than the file holds" in error_of(path)
        error_of(path)


@given(changes=st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_never_end_in_another_error(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    whole = tmp_path / "whole.gguf"
    content = bytearray((whole if whole.exists() else make_gguf(whole)).read_bytes())
    for at, value in changes:
        content[at] = value
    (tmp_path / "changed.gguf").write_bytes(content)
    try:
        spec = inspect(tmp_path / "changed.gguf")
    except ModelFileError as error:
        assert "\n" not in str(error)
    else:
        assert spec.num_layers == 2 and spec.hidden_size == 64


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelFileError, match="neither a file nor a folder"):
        inspect(pipe)
