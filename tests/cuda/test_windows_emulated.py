"""Layers that see everything and layers with a sliding window in one program: the decode kernel's plan is made anew
where the window changes, and only there.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from pyserve import ops
from pyserve.ops import Program, StepBatch

WINDOWS = (20, 0, 0, 33, 20)
SHAPE = ops.AttentionShape(0, 2, 1, 64)
TABLE = torch.arange(26, dtype=torch.int32).reshape(2, 13)
NUM_PROMPT = 190  # three units of keys, of which the windows see one or two


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def program_on(device: ops.Device) -> Program:
    """The sum over the layers of what each attends to, times a matrix."""
    program = device.program(max_tokens=192, max_samples=8, num_threads=1)
    angles = torch.arange(256.0)[:, None] / 10 ** torch.linspace(0, 4, 32)
    rope = ops.RopeTable(angles.cos(), angles.sin(), is_interleaved=False)
    table = device.pack("F32", normal(0, 96, SHAPE.qkv_width), 96, SHAPE.qkv_width)
    qkv, out, total, taken = (program.buffer(width) for width in (SHAPE.qkv_width, 128, 24, 24))
    for layer, window in enumerate(WINDOWS):
        shape = ops.AttentionShape(layer, SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim)
        program.embed(table, qkv)
        program.rope_kv_write(qkv, shape, rope)
        program.attention(qkv, out, shape, scale=1 / math.sqrt(64), window=window)
        program.linear(out, [device.pack("F32", normal(1 + layer, 24, 128) / 8, 24, 128)], total, accumulate=layer > 0)
    program.take_rows(total, taken)
    program.set_logits(taken)
    return program


STEPS = (
    StepBatch(
        ints([5 + at % 90 for at in range(NUM_PROMPT)]),
        ints([*range(NUM_PROMPT)]),
        ints([0] * NUM_PROMPT),
        TABLE,
        ints([0, 65, NUM_PROMPT - 1]),
    ),
    StepBatch(ints([7, 9]), ints([NUM_PROMPT, 0]), ints([0, 1]), TABLE, ints([0, 1])),
    StepBatch(ints([8, 11]), ints([NUM_PROMPT + 1, 1]), ints([0, 1]), TABLE, ints([0, 1])),
)


@pytest.mark.parametrize("has_graphs", [False, True], ids=["launches", "graphs"])
def test_windows_by_layer_give_what_the_cpu_gives(opened: ops.Device, has_graphs: bool) -> None:
    here, there = ops.open_device("cpu"), opened
    program, wanted_by = program_on(there), program_on(here)
    program.use_graphs(has_graphs)  # type: ignore[attr-defined]
    pools = [each.allocate_pool(26, len(WINDOWS), 1, 16, 64, torch.float16) for each in (there, here)]
    for step in STEPS:
        wanted = wanted_by.run(step, pools[1]).clone()
        for _ in range(2):  # writes what it has written; by then there may be a graph
            got = program.run(step, pools[0]).clone()
            time.sleep(0.2 if has_graphs else 0.0)
            assert (got - wanted).abs().max() < 4e-3 * wanted.abs().max()
    num_graphs, num_failed, _ = program.graph_counts()  # type: ignore[attr-defined]
    assert (num_graphs > 0, num_failed) == (has_graphs, 0)
