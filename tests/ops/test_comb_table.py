"""The table that a copy reads has the combs that page_runs.py defines (R16)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyserve.ops import comb_table
from pyserve.page_runs import combs, runs
from tests.pure.test_page_runs import page_lists


@given(page_lists)
def test_the_table_of_a_copy_has_the_same_combs(pages: list[int]) -> None:
    table = comb_table(pages)
    expected = [(c.start, c.run_pages, c.stride_pages, c.count, c.list_offset) for c in combs(runs(pages))]
    assert [tuple(row) for row in table.tolist()] == expected
    assert table.dtype == torch.int32 and table.shape == (len(expected), 5)


@given(st.lists(st.integers(0, 2), max_size=14))
def test_zigzags_are_split_alike(pages: list[int]) -> None:
    expected = [[c.start, c.run_pages, c.stride_pages, c.count, c.list_offset] for c in combs(runs(pages))]
    assert comb_table(torch.tensor(pages, dtype=torch.int32)).tolist() == expected


def test_combs_of_a_stretch_stand_where_its_host_pages_are() -> None:
    assert comb_table([4, 5, 9, 10, 3], 7).tolist() == [[4, 2, 5, 2, 7], [3, 1, 1, 1, 11]]


@given(page_lists)
def test_a_row_of_the_page_table_has_the_combs_of_the_list(pages: list[int]) -> None:
    row = np.array([*pages, 7, 8, 9], dtype=np.int32)[: len(pages)]
    assert torch.equal(comb_table(row, 3), comb_table(pages, 3))


def test_what_is_no_page_list_is_named() -> None:
    with pytest.raises(ValueError, match=r"pages must be int32 \[n\] or combs int32 \[m, 5\], not torch.int64 \[2\]"):
        comb_table(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"not torch.int64 \[2\]"):
        comb_table(np.array([1, 2]))  # type: ignore[arg-type]
    with pytest.raises((ValueError, RuntimeError), match="first_offset must not be negative"):
        comb_table([1], -1)
