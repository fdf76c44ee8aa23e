"""Opening a model without its weights: a file or folder becomes a source of tensors and a spec that fits them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .config_spec import config_spec
from .files import FLOAT_TYPES, FileTensor, fail, shown
from .folder import Folder, read_folder
from .gguf import GgufFile, read_gguf
from .gguf_spec import gguf_spec
from .spec import ROPE_FACTORS, ModelSpec

IGNORED_ENDINGS = ("rotary_emb.inv_freq", "attn_rot_embd.weight")  # old files store what the spec says already


def inspect(path: Path) -> ModelSpec:
    """What the model is, from headers alone; every tensor's place, type and shape is checked.

    Raises ModelFileError, one line that names the file and what is wrong.
    """
    return open_model(Path(path))[1]


def open_model(path: Path) -> tuple[GgufFile | Folder, ModelSpec]:
    """The opened file or folder with its spec, both checked."""
    source: GgufFile | Folder
    if path.is_dir():
        source = read_folder(path)
        spec = config_spec(source)
    elif path.exists():
        source = read_gguf(path)
        spec = gguf_spec(source)
    else:
        fail(path, "no such file or folder")
    _check_spec(path, spec)
    check_tensors(path, spec, source.tensors)
    return source, spec


def _check_spec(path: Path, spec: ModelSpec) -> None:
    """What the kernels rely on, whatever file the spec came from."""
    if spec.num_heads % spec.num_kv_heads:
        fail(path, f"{spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads")
    if spec.head_dim % 8 or not 8 <= spec.head_dim <= 256:
        fail(path, f"a head dimension of {spec.head_dim} is not supported (multiples of 8 up to 256 are)")
    if spec.rope.base <= 1:
        fail(path, f"a rope base of {spec.rope.base} is not supported: it must be above 1")


def check_tensors(path: Path, spec: ModelSpec, tensors: Mapping[str, FileTensor]) -> None:
    """The file must hold the tensors of the spec in their shapes, and no others: a tensor that is not understood means
    a model that would answer wrongly. Raises ModelFileError."""
    shapes = spec.tensor_shapes()
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            fail(path, f"tensor {shown(name)} is missing")
        if tensor.shape != shape:
            fail(path, f"tensor {shown(name)} has shape {list(tensor.shape)}, not {list(shape)}")
        if len(shape) == 1 and tensor.type not in FLOAT_TYPES:
            fail(path, f"tensor {shown(name)} has type {tensor.type}, not one of {', '.join(FLOAT_TYPES)}")
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            _check_rope_factors(path, spec, tensor)
        elif name not in shapes and not _is_ignored(name, spec):
            fail(path, f"tensor {shown(name)} is not one that a {spec.architecture} model has")


def _check_rope_factors(path: Path, spec: ModelSpec, tensor: FileTensor) -> None:
    if tensor.shape != (spec.rope.rotary_dim // 2,) or tensor.type != "F32":
        fail(path, f"tensor {shown(ROPE_FACTORS)} must be F32 of {spec.rope.rotary_dim // 2} values")
    if not (tensor.floats() > 0).all():
        fail(path, f"tensor {shown(ROPE_FACTORS)} must hold numbers above 0")


def _is_ignored(name: str, spec: ModelSpec) -> bool:
    return name.endswith(IGNORED_ENDINGS) or (spec.is_tied and name == "output.weight")
