"""A whole step of a model by itself, and what its time goes to: `python -m bench.step [--model FILE] [--threads 2]
[--kv-type auto]`.

Decode steps of 1, 4, 8 and 16 rows, one row at 4096 tokens of context, prompts of 512 and 2048 tokens in chunks of 512.
Each row is the best of several: the step's time, and in a run of its own the milliseconds that a thread spent in each
kind of kernel, and waiting. Beside them the rate at which weights and KV were read, and that of the products, as
shares of what the machine can do, measured on the spot.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.limits import int8_gmac_s, memory_read_gb_s
from pyserve.app import model_path
from pyserve.kv_store import KV_TYPES, resolve_kv_type
from pyserve.models.load import build_program
from pyserve.models.source import open_model
from pyserve.models.spec import ModelSpec
from pyserve.ops import CpuDevice
from pyserve.ops.kv import allocate_pool
from pyserve.ops.program import Program, StepBatch
from pyserve.settings import Settings

PAGE_SIZE, MAX_POSITIONS, CHUNK = 16, 8192, 512
SHORT = {"rms_norm": "norm", "rope_kv_write": "rope", "gated_activation": "act"}


@dataclass(frozen=True)
class Case:
    name: str
    num_rows: int
    position: int | None  # of each row, one a sequence; None: a prompt from position 0
    repeats: int


CASES = (
    *(Case(f"decode, {rows} row{'s'[: rows > 1]}", rows, 40, 100) for rows in (1, 4, 8, 16)),
    Case("decode at 4096", 1, 4095, 60),
    Case("prompt of 512", 512, None, 8),
    Case("prompt of 2048", 2048, None, 3),
)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batches(case: Case) -> list[StepBatch]:
    num_pages = MAX_POSITIONS // PAGE_SIZE
    if case.position is not None:
        rows = list(range(case.num_rows))
        pages = torch.arange(num_pages, dtype=torch.int32).reshape(case.num_rows, -1).contiguous()
        tokens, positions = [5000 + row for row in rows], [case.position] * case.num_rows
        return [StepBatch(ints(tokens), ints(positions), ints(rows), pages, ints(rows))]
    pages = torch.arange(num_pages, dtype=torch.int32)[None]
    chunks = [list(range(start, min(start + CHUNK, case.num_rows))) for start in range(0, case.num_rows, CHUNK)]
    return [
        StepBatch(ints([1000 + i for i in chunk]), ints(chunk), ints([0] * len(chunk)), pages, ints([len(chunk) - 1]))
        for chunk in chunks
    ]


def run_all(program: Program, steps: list[StepBatch], kv: torch.Tensor) -> float:
    """Seconds."""
    started = time.perf_counter()
    for step in steps:
        program.run(step, kv)
    return time.perf_counter() - started


def profile_all(program: Program, steps: list[StepBatch], kv: torch.Tensor) -> dict[str, tuple[float, float]]:
    total: dict[str, tuple[float, float]] = {}
    for step in steps:
        for kind, (kernel_s, wait_s) in program.profile(step, kv).items():
            before = total.get(kind, (0.0, 0.0))
            total[kind] = (before[0] + kernel_s, before[1] + wait_s)
    return total


def products(spec: ModelSpec) -> tuple[int, int]:
    """Multiplications of one row in the layers, and in the head."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (heads + 3 * spec.intermediate_size)
    return layer * spec.num_layers, spec.vocab_size * spec.hidden_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: the demo model)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-type", choices=("auto", *KV_TYPES), default="auto")
    chosen = parser.parse_args()
    source, spec = open_model(chosen.model or model_path(Settings()))
    sizes = {"max_tokens": CHUNK, "max_samples": 16, "max_positions": MAX_POSITIONS, "num_threads": chosen.threads}
    program = build_program(source, spec, **sizes)
    shape = (MAX_POSITIONS // PAGE_SIZE, spec.num_layers, spec.num_kv_heads, PAGE_SIZE, spec.head_dim)
    kv_type = resolve_kv_type(chosen.kv_type, spec.head_dim, CpuDevice())
    kv = allocate_pool(*shape, KV_TYPES[kv_type])
    weight_bytes = sum(tensor.num_bytes for tensor in source.tensors.values() if len(tensor.shape) == 2)
    cell_bytes = kv[0].numel() * kv.element_size() // PAGE_SIZE
    layer_macs, head_macs = products(spec)
    gb_s, gmac_s = memory_read_gb_s(chosen.threads, 1 << 28), int8_gmac_s() * chosen.threads
    print(f"{chosen.threads} threads, KV in {kv_type}")
    print(f"limits: {gb_s:.1f} GB/s read, {gmac_s:.0f} G int8 multiplications/s")
    for case in CASES:
        steps = batches(case)
        run_all(program, steps, kv)
        seconds = min(run_all(program, steps, kv) for _ in range(case.repeats))
        profiles = [profile_all(program, steps, kv) for _ in range(max(2, case.repeats // 4))]
        profile = min(profiles, key=lambda each: sum(map(sum, each.values())))
        linear_s = profile["linear"][0] / chosen.threads
        num_samples = sum(step.sample_rows.numel() for step in steps)
        gmacs = (layer_macs * case.num_rows + head_macs * num_samples) / linear_s / 1e9
        line = f"{case.name:15s} {seconds * 1e3:8.2f} ms {case.num_rows / seconds:6.0f} tokens/s"
        line += f"; products {gmacs:4.0f} GMAC/s ({gmacs / gmac_s:.0%})"
        if case.position is not None:
            read = (weight_bytes + case.num_rows * (case.position + 1) * cell_bytes) / seconds / 1e9
            line += f"; read {read:4.1f} GB/s ({read / gb_s:.0%})"
        kinds = {SHORT.get(kind, kind): 1e3 * kernel_s / chosen.threads for kind, (kernel_s, _) in profile.items()}
        kinds["waiting"] = 1e3 * sum(wait_s for _, wait_s in profile.values()) / chosen.threads
        print(line)
        print("    ms: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.items() if ms >= 0.005))


if __name__ == "__main__":
    main()
