"""Each op's schema and fake tell the truth: what it mutates, what it returns (torch's own opcheck)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyserve.ops import allocate_pool, pack
from tests.ops.paged import ints

POOL = (4, 2, 2, 4, 8, torch.float32)
ROWS = (ints([0, 1]), ints([0, 0]), ints([[2]]))


def cases() -> dict[str, tuple[Any, ...]]:
    """Arguments of one good call of each op."""
    weight = pack("Q8_0", torch.zeros(3 * 34 * 2, dtype=torch.uint8), 3, 64)
    matrix = (weight.data, weight.type_id, 3, 64)
    angles = torch.zeros(8, 4)
    return {
        "linear": (torch.ones(2, 64), *matrix, torch.ones(3)),
        "embed": (ints([0, 2]), *matrix, 1.5),
        "rms_norm": (torch.ones(2, 8), torch.ones(8), 1e-5),
        "gated_activation": (torch.ones(2, 8), 1),
        "attention": (torch.ones(2, 64), 4, allocate_pool(*POOL), 0, 1.0, 0.0, 0, *ROWS),
        "rope_kv_write": (torch.ones(2, 64), 4, angles, angles, True, None, None, 0.0, allocate_pool(*POOL), 1, *ROWS),
        "page_copy": (allocate_pool(*POOL), torch.zeros(4096, dtype=torch.uint8), ints([[1, 1, 1, 1, 0]]), True),
        "comb_table": (ints([4, 5, 8]), 2),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_schema_and_fake(name: str) -> None:
    op = getattr(torch.ops.pyserve, name).default
    torch.library.opcheck(op, cases()[name], test_utils=("test_schema", "test_faketensor"))
