"""A model's step as a fixed list of kernel calls, run by one call into C++ (csrc/cpu/program.h says how)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pyserve.ops.weights import PackedWeight

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # as in ops.h

_KINDS = (  # as in cpu/program.h
    "embed",
    "rms_norm",
    "linear",
    "quantise",
    "rope_kv_write",
    "attention",
    "gated_activation",
    "take_rows",
)


@dataclass(frozen=True, slots=True)
class Register:
    """A buffer of the program: float32 rows of `width`, one row a token, or a sample after `take_rows`."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's heads. `head_dim`: a multiple of 8, at most 256."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def _values(self) -> list[int]:
        return [self.layer, self.num_heads, self.num_kv_heads, self.head_dim]


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotation by position. Pairs are (2i, 2i + 1) when interleaved, as in GGUF's llama files, else (i, i +
    rotary_dim / 2).
    """

    cos: torch.Tensor  # float32 [max_positions, rotary_dim / 2]
    sin: torch.Tensor  # float32 [max_positions, rotary_dim / 2]
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's rows, int32 CPU tensors. Rows of one sequence are neighbours in ascending position."""

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    sequences: torch.Tensor  # [T]: row of the page table
    page_table: torch.Tensor  # [S, width]: page of each page_size positions; read up to the sequence's last position
    sample_rows: torch.Tensor  # [R]: rows whose logits are wanted; R may be 0


@dataclass(frozen=True, slots=True)
class Weighing:
    """How the logits of a step change before its tokens are picked, apart from bans, which come after this.

    The bias of a place is added to its logit. Where its count is above 0, the logit is then divided by `repeat` if
    positive, else multiplied by it, and count * frequency and `presence` are taken away.
    """

    penalties: torch.Tensor  # float32 [R, 3]: repeat, presence, frequency of each sample row; 1, 0, 0 where it has none
    places: torch.Tensor  # int64 [n, 2]: sample row, token id; each once, rows ascend
    values: torch.Tensor  # float32 [n, 2]: bias, and how often the token is in the window of the row's penalties


BROKEN_ROW = -1  # in place of a token: its row of logits is none to pick from (kBrokenRow in csrc/ops.h)


def sample_rows(logits: torch.Tensor, real: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """As `Program.sample`, without a program: one row after the other in the calling thread."""
    rows = zip(logits, real.tolist(), whole.tolist(), strict=True)
    picked = [
        torch.ops.pyserve.sample_row(row, temperature, top_k, top_p, min_p, seed, position)
        for row, (temperature, top_p, min_p), (top_k, seed, position) in rows
    ]
    return torch.tensor(picked, dtype=torch.int32)


class Program:
    """Built once: `buffer`, the instructions, `set_logits`. Then `run`, one at a time, from any thread.

    Instructions check shapes, widths and dtypes as they are added and raise ValueError naming the argument; tensors
    are kept, not copied. Results depend neither on `num_threads` nor on what else is in a batch, bit for bit.
    """

    can_follow = True  # a step can be started behind another

    def __init__(self, *, max_tokens: int, max_samples: int, num_threads: int) -> None:
        self.num_threads = num_threads
        self._use(torch.classes.pyserve.Program(max_tokens, max_samples, num_threads), max_tokens, max_samples)

    def _use(self, handle: Any, max_tokens: int, max_samples: int) -> None:
        self.max_tokens = max_tokens
        self.max_samples = max_samples
        self._handle: Any = handle
        self._run: Any = handle.run  # looking up a method of such an object takes longer than calling it
        self._start: Any = handle.start
        self._collect: Any = handle.collect
        self._fileno: int = handle.fileno()

    def buffer(self, width: int) -> Register:
        """A new register, zeros. Its memory is taken at `set_logits`."""
        return Register(self._handle.buffer(width), width)

    def embed(self, table: PackedWeight, out: Register, scale: float = 1.0) -> None:
        """out [T, cols] = scale * table[tokens]"""
        self._handle.embed(table.data, table.type_id, table.rows, table.cols, out.index, scale)

    def rms_norm(self, x: Register, weight: torch.Tensor, eps: float, out: Register) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight, by row; weight float32 [width]"""
        self._handle.rms_norm(x.index, weight, eps, out.index)

    def linear(
        self,
        x: Register,
        weights: Sequence[PackedWeight],
        out: Register,
        *,
        biases: Sequence[torch.Tensor | None] | None = None,
        accumulate: bool = False,
    ) -> None:
        """out (+)= x @ weight.T + bias for each weight, the outputs side by side; biases float32 [rows]"""
        shapes = [[weight.type_id, weight.rows, weight.cols] for weight in weights]
        added = [None] * len(weights) if biases is None else list(biases)
        self._handle.linear(x.index, [weight.data for weight in weights], shapes, added, out.index, accumulate)

    def rope_kv_write(
        self,
        qkv: Register,
        attention: AttentionShape,
        rope: RopeTable,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        """Rotates q in place; k, rotated, and v go to the pool. Norms, float32 [head_dim], are applied to each head
        before (Qwen3).
        """
        self._handle.rope_kv_write(
            qkv.index, attention._values(), rope.cos, rope.sin, rope.is_interleaved, q_norm, k_norm, norm_eps
        )

    def attention(
        self,
        qkv: Register,
        out: Register,
        attention: AttentionShape,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        """out [T, num_heads * head_dim]. `window`: positions seen, the row's own included, 0 for all. `softcap`: 0
        for none.
        """
        self._handle.attention(qkv.index, out.index, attention._values(), scale, window, softcap)

    def gated_activation(self, gate_up: Register, out: Register, kind: Literal["silu", "gelu_tanh"] = "silu") -> None:
        """out [rows, width] = kind(gate) * up; gate_up [rows, gate | up]"""
        if kind not in _ACTIVATIONS:
            raise ValueError(f"kind must be one of {', '.join(_ACTIVATIONS)}, not {kind!r}")
        self._handle.gated_activation(gate_up.index, out.index, _ACTIVATIONS[kind])

    def take_rows(self, x: Register, out: Register) -> None:
        """out [R, width] = x[sample_rows]. What follows works on these rows."""
        self._handle.take_rows(x.index, out.index)

    def set_logits(self, register: Register) -> None:
        """Completes the program: `run` returns this register. Takes the memory of all registers; raises MemoryError
        or RuntimeError when there is none.
        """
        self._handle.set_logits(register.index)
        self.vocab_size = register.width

    def run(self, batch: StepBatch, kv: torch.Tensor) -> torch.Tensor:
        """One step, without the GIL: logits float32 [R, vocab], a view that the next run overwrites.

        `kv`: the pool [pages, layers, 2, kv_heads, page_size, head_dim]. Raises ValueError naming what in the batch
        is out of range, before anything is written.
        """
        result: torch.Tensor = self._run(
            batch.tokens, batch.positions, batch.sequences, batch.page_table, batch.sample_rows, kv
        )
        return result

    def profile(self, batch: StepBatch, kv: torch.Tensor) -> dict[str, tuple[float, float]]:
        """Run one step and say what its time went to: for each kind of instruction, the seconds that all threads
        together spent in its kernels, and those that they waited for what these need. On the CPU only.
        """
        seconds = self._handle.profile(
            batch.tokens, batch.positions, batch.sequences, batch.page_table, batch.sample_rows, kv
        )
        return {kind: (kernel_s, wait_s) for kind, (kernel_s, wait_s) in zip(_KINDS, seconds.tolist(), strict=True)}

    def sample(self, logits: torch.Tensor, real: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The next token of each row, int32 [R], by the program's threads and without the GIL.

        `logits` float32 [R, vocab]; `real` float32 [R, 3]: temperature, top_p, min_p; `whole` int64 [R, 3]: top_k,
        seed, position. Every row is picked as `torch.ops.pyserve.sample_row` picks it alone. BROKEN_ROW where a logit
        is NaN, or the largest is not finite.
        """
        result: torch.Tensor = self._handle.sample(logits, real, whole)
        return result

    def start(
        self,
        batch: StepBatch,
        kv: torch.Tensor,
        real: torch.Tensor,
        whole: torch.Tensor,
        bans: torch.Tensor,
        sources: torch.Tensor | None = None,
        weighing: Weighing | None = None,
    ) -> None:
        """Begin a step and the sampling of its R sample rows in a thread of the program's, and return at once.

        `real` and `whole` are as in `sample`; `bans` int64 [n, 2]: (sample row, token id) that cannot be picked. When
        it is done, `fileno()` is readable, `num_done` counts it, and `collect` gives the result. The batch's tensors
        must not change until then, but for columns of the page table that the step does not reach. `weighing`: what
        else changes logits, before bans do.

        One step may be started behind another that is not collected yet. With `sources`, int32 [T], row i's token is
        the one that the step before picks for its sample row sources[i], or, where that is -1, the batch's. It fails if
        that fails. In a row with penalties this token counts too, beside what `weighing` says of the window before it.
        """
        self._start(
            batch.tokens, batch.positions, batch.sequences, batch.page_table, batch.sample_rows, kv, real, whole, bans,
            sources, [] if weighing is None else [weighing.penalties, weighing.places, weighing.values],
        )  # fmt: skip

    def fileno(self) -> int:
        """The file descriptor that becomes readable when a started step is done."""
        return self._fileno

    def num_done(self) -> int:
        """How many started steps were done since the last call. Call it when `fileno()` is readable."""
        return len(os.read(self.fileno(), 64))

    def collect(self) -> torch.Tensor:
        """What the oldest started step picked, as `sample`: int32 [R]. Waits for it; raises what it raised."""
        result: torch.Tensor = self._collect()
        return result
