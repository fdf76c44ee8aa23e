"""The kernels and the step program. Importing this package loads the extension, and builds it first where there is no
build of these sources.
"""

from __future__ import annotations

import torch

from pyserve.ops import build, fakes

build.load()
fakes.register()

from pyserve.ops.device import CpuDevice, Device, PoolShape, open_device  # noqa: E402  what follows needs the extension
from pyserve.ops.kv import allocate_pool, map_memory, page_bytes  # noqa: E402
from pyserve.ops.program import (  # noqa: E402
    BROKEN_ROW,
    AttentionShape,
    Program,
    Register,
    RopeTable,
    StepBatch,
    Weighing,
    sample_rows,
)
from pyserve.ops.stream import (  # noqa: E402
    CopyEvent,
    CopyFailed,
    CopyStream,
    Fence,
    PageMismatch,
    PageRow,
    comb_table,
    copy_pages,
    page_row,
)
from pyserve.ops.weights import PackedWeight, pack  # noqa: E402

__all__ = [
    "BROKEN_ROW",
    "AttentionShape",
    "CopyEvent",
    "CopyFailed",
    "CopyStream",
    "CpuDevice",
    "Device",
    "Fence",
    "PackedWeight",
    "PageMismatch",
    "PageRow",
    "PoolShape",
    "Program",
    "Register",
    "RopeTable",
    "StepBatch",
    "Weighing",
    "allocate_pool",
    "comb_table",
    "copy_pages",
    "isa",
    "map_memory",
    "open_device",
    "pack",
    "page_bytes",
    "page_row",
    "sample_rows",
]


def isa() -> str:
    """The instruction set that the CPU kernels use: avx512_bf16, avx512, avx2 or generic. PYSERVE_CPU_ISA lowers it."""
    name: str = torch.ops.pyserve.isa()
    return name
