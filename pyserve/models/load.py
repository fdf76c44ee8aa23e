"""Opening a model: a GGUF file or a Hugging Face folder becomes a spec, a program and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelFileError
from ..ops.device import CpuDevice, Device
from ..ops.program import Program
from .files import fail, shown
from .folder import Folder, read_chat_template
from .gguf import GgufFile
from .llama import build
from .source import inspect, open_model
from .spec import ROPE_FACTORS, ModelSpec
from .weights import Weights

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

__all__ = ["Model", "build_program", "inspect", "load"]
Progress = Callable[[str, float], None]  # stage, fraction of it


@dataclass(slots=True)
class Model:
    """Everything that serving a model needs. `program` is not to be run by two callers at once."""

    spec: ModelSpec
    program: Program
    tokenizer: Tokenizer
    chat_template: str | None
    path: Path
    device: Device = field(default_factory=CpuDevice)


def load(
    path: Path,
    *,
    max_tokens: int,
    max_samples: int,
    max_positions: int,
    num_threads: int,
    on_progress: Progress = lambda stage, fraction: None,
    device: Device | None = None,
    on_spec: Callable[[ModelSpec], None] = lambda spec: None,
) -> Model:
    """Read, check and pack a model for steps of up to `max_tokens` rows, `max_samples` of which sample, at positions
    below `max_positions`, on `device` or the CPU. `on_progress` is called from this thread, and `on_spec` once it is
    known what the model is. Raises ModelFileError as `inspect` does, ValueError for a shape that the device has no
    kernel for, and SettingsError when it has not the memory."""
    on_progress("reading", 0.0)
    source, spec = open_model(Path(path))
    on_spec(spec)
    tokenizer = _tokenizer(source)
    chat_template = _chat_template(source)
    on_progress("reading", 1.0)
    program = build_program(
        source,
        spec,
        max_tokens=max_tokens,
        max_samples=max_samples,
        max_positions=max_positions,
        num_threads=num_threads,
        on_progress=lambda fraction: on_progress("packing weights", fraction),
        device=device,
    )
    return Model(spec, program, tokenizer, chat_template, Path(path), device or CpuDevice())


def build_program(
    source: GgufFile | Folder,
    spec: ModelSpec,
    *,
    max_tokens: int,
    max_samples: int,
    max_positions: int,
    num_threads: int,
    on_progress: Callable[[float], None] = lambda fraction: None,
    device: Device | None = None,
) -> Program:
    """The model's step, without tokenizer: what `load` calls, and what compares logits."""
    device = device or CpuDevice()
    program = device.program(max_tokens=max_tokens, max_samples=max_samples, num_threads=num_threads)
    used = [name for name in (*spec.tensor_shapes(), ROPE_FACTORS) if name in source.tensors]
    weights = Weights({name: source.tensors[name] for name in used}, num_threads, on_progress, device)
    build(spec, weights, program, max_positions)
    return program


def _tokenizer(source: GgufFile | Folder) -> Tokenizer:
    from ..text import tokenizer  # not needed, and not loaded, to inspect a model

    if isinstance(source, Folder):
        return tokenizer.from_folder(source.path)
    try:
        return tokenizer.from_gguf(source.metadata)
    except ModelFileError as error:
        fail(source.path, error.message)


def _chat_template(source: GgufFile | Folder) -> str | None:
    if isinstance(source, Folder):
        return read_chat_template(source.path)
    template = source.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        fail(source.path, f"tokenizer.chat_template must be a string, not {shown(template)}")
    return template
