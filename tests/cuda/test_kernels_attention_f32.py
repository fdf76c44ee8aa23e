"""Attention over KV in f32: emulated, against float64, and exact in any company (R37). Cells that no sequence owns hold
NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cuda.attention_case import BF16, F16, F32, Case
from tests.cuda.build import IN_ORDER, POLICIES, EmulatorError, Library

MIXED: dict[str, Any] = {"lens": [70, 1, 131], "rows": [(0, 69), (1, 0), *((2, p) for p in range(126, 131))]}
LONG: dict[str, Any] = {"lens": [600, 40], "rows": [(0, 0), (0, 512), (0, 599), (1, 39)]}  # more units than warps


@pytest.fixture(scope="module")
def library() -> Library:
    return Library("attention_f32.cu")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 100, 256])
def test_every_head_size_under_every_schedule(library: Library, head_dim: int, policy: int) -> None:
    library.configure(policy)
    case = Case(**MIXED, head_dim=head_dim, pool_type=F32)
    assert case.excess(case.full(library)) <= 0


@pytest.mark.parametrize("settings", [{"softcap": 5.0}, {"scale": 0.5}, {"window": 1}, {"window": 70}, {}], ids=str)
def test_scores_and_windows(library: Library, settings: dict[str, Any]) -> None:
    library.configure(IN_ORDER)
    case = Case(**LONG, **settings, pool_type=F32, num_heads=3, num_kv_heads=1)
    assert case.excess(case.full(library)) <= 0


@pytest.mark.parametrize("q_type", [F32, F16, BF16])
@pytest.mark.parametrize("out_type", [F32, F16, BF16])
def test_types_of_activations(library: Library, q_type: int, out_type: int) -> None:
    case = Case(**MIXED, q_type=q_type, pool_type=F32)
    assert case.excess(case.full(library, out_type), out_type) <= 0


def test_neither_page_size_nor_company_changes_a_bit(library: Library) -> None:
    together = Case(**LONG, pool_type=F32)
    wanted = together.full(library)
    for size in (1, 24, 1024):
        np.testing.assert_array_equal(Case(**LONG, pool_type=F32, page_size=size).full(library), wanted)
    for i, row in enumerate(together.rows):
        np.testing.assert_array_equal(replace(together, rows=[row]).full(library)[0], wanted[i])


@pytest.mark.parametrize(
    "settings", [{"pool_type": BF16}, {"head_dim": 66}, {"head_dim": 264}, {"scale": -1.0}], ids=str
)
def test_what_cannot_be_done_is_refused(library: Library, settings: dict[str, Any]) -> None:
    with pytest.raises(EmulatorError):
        Case(**{**MIXED, "pool_type": F32, **settings}).full(library)
