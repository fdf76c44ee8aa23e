"""Decode and prefill attention, emulated: against float64 under every schedule, and exact in any company (R37).

In every case all cells of the pool that no sequence owns hold NaN, and so does the scratch.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cuda.attention_case import BF16, F16, F32, Array, Case, Device
from tests.cuda.build import IN_ORDER, POLICIES, EmulatorError, Library

HEAD_DIMS = (64, 80, 96, 128, 256)
SMALL_DEVICES = (Device(1, 101376), Device(5, 166912), Device(132, 232448))  # sm_86, sm_80, sm_90


@functools.cache
def decode_library() -> Library:
    return Library("attention_decode.cu")


@functools.cache
def prefill_library() -> Library:
    return Library("attention_prefill.cu")


def run(case: Case, policy: int = IN_ORDER, out_type: int = F32, device: Device = SMALL_DEVICES[2]) -> Array:
    """By prefill and by decode; they must agree to the bit."""
    for library in (decode_library(), prefill_library()):
        library.configure(policy, seed=case.seed + 1)
    decoded = case.decode(decode_library(), out_type, device)
    np.testing.assert_array_equal(case.prefill(prefill_library(), out_type, device), decoded)
    return decoded


def chunk(sequence: int, first: int, count: int) -> list[tuple[int, int]]:
    return [(sequence, position) for position in range(first, first + count)]


MIXED = {"lens": [70, 1, 131], "rows": [(0, 69), (1, 0), *chunk(2, 126, 5)]}
LONG = {"lens": [600, 40, 1100], "rows": [*chunk(0, 509, 5), (1, 39), (2, 1099)]}  # up to three groups


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pool_type", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_under_every_schedule(head_dim: int, pool_type: int, policy: int) -> None:
    case = Case(**MIXED, head_dim=head_dim, pool_type=pool_type, num_heads=2, num_kv_heads=1)
    assert case.excess(run(case, policy)) <= 0


@pytest.mark.parametrize("policy", POLICIES)
def test_long_sequences_under_every_schedule(policy: int) -> None:
    case = Case(**LONG)
    assert case.excess(run(case, policy)) <= 0


def test_more_groups_than_the_combine_kernel_loads_at_once() -> None:
    case = Case([2700], [(0, 2047), (0, 2048), (0, 2699)], num_heads=1, num_kv_heads=1)
    assert case.excess(run(case)) <= 0


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (8, 1), (14, 2), (16, 1), (34, 2)])
def test_grouped_heads(num_heads: int, num_kv_heads: int) -> None:
    case = Case(**MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert case.excess(run(case)) <= 0


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 520])
def test_sliding_windows(window: int) -> None:
    case = Case(**LONG, window=window)
    assert case.excess(run(case)) <= 0


@pytest.mark.parametrize("settings", [{"softcap": 5.0}, {"scale": 1.7}, {"softcap": 2.0, "window": 70}], ids=str)
def test_scores(settings: dict[str, float]) -> None:
    case = Case(**MIXED, **settings)
    assert case.excess(run(case)) <= 0


@pytest.mark.parametrize("q_type", [F32, F16, BF16])
@pytest.mark.parametrize("out_type", [F32, F16, BF16])
def test_types_of_activations(q_type: int, out_type: int) -> None:
    case = Case(**MIXED, q_type=q_type)
    assert case.excess(run(case, out_type=out_type), out_type) <= 0


def test_a_page_size_changes_no_bit() -> None:
    results = [run(Case(**LONG, page_size=size)) for size in (1, 16, 24, 64, 1024)]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_number_of_workers_changes_no_bit(head_dim: int) -> None:
    """From one warp with all the work to one unit each: groups are then cut at every unit."""
    case = Case(**LONG, head_dim=head_dim, num_heads=2, num_kv_heads=1)
    wanted = run(case)
    assert case.excess(wanted) <= 0
    for device in SMALL_DEVICES:
        np.testing.assert_array_equal(run(case, device=device), wanted)
    for num_sms in (2, 3, 4):
        np.testing.assert_array_equal(case.decode(decode_library(), device=Device(num_sms, 232448)), wanted)


def test_layers_of_a_step_share_the_plan() -> None:
    case = Case(**LONG)
    np.testing.assert_array_equal(case.decode(decode_library(), repeats=1), case.decode(decode_library()))


def test_a_row_is_the_same_alone_and_in_company() -> None:
    together = Case(**LONG)
    out = run(together)
    for i, row in enumerate(together.rows):
        np.testing.assert_array_equal(run(replace(together, rows=[row]))[0], out[i])


def test_chunks_of_a_prompt_change_no_bit() -> None:
    whole = Case([150], chunk(0, 0, 150), num_heads=3, num_kv_heads=1)
    out = run(whole)
    assert whole.excess(out) <= 0
    for size in (1, 37, 64):
        for first in range(0, 150, size if size > 1 else 49):
            part = replace(whole, rows=chunk(0, first, min(size, 150 - first)))
            np.testing.assert_array_equal(run(part), out[first : first + size])


def test_chunks_of_a_long_prompt_with_a_window_change_no_bit() -> None:
    whole = Case([700], chunk(0, 560, 140), window=530, num_heads=2, num_kv_heads=2)
    out = whole.prefill(prefill_library())
    assert whole.excess(out) <= 0
    part = replace(whole, rows=chunk(0, 601, 3))
    np.testing.assert_array_equal(run(part), out[41:44])


def test_a_spoilt_query_spoils_its_own_row_only() -> None:
    case = Case([40], chunk(0, 20, 20))
    wanted = run(case)
    case.q[7, 1] = np.nan
    out = run_with_nan(case)
    assert np.isnan(out[7, 1]).all()
    out[7, 1] = wanted[7, 1]
    np.testing.assert_array_equal(out, wanted)


def run_with_nan(case: Case) -> Array:
    decoded, prefilled = case.decode(decode_library()), case.prefill(prefill_library())
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(prefilled))
    return decoded


def test_enormous_and_tiny_scores() -> None:
    """Weights underflow to zero over whole units, and single keys take all."""
    case = Case([300], [(0, 130), (0, 299)], scale=60.0)
    assert np.isfinite(run(case)).all()
    case = Case([300], [(0, 130), (0, 299)], scale=1e-30)
    assert case.excess(run(case)) <= 0


BAD: dict[str, dict[str, Any]] = {
    "pool in f32": {"pool_type": F32},
    "heads of 72": {"head_dim": 72},
    "heads that do not divide": {"num_heads": 5},
    "negative scale": {"scale": -1.0},
}


@pytest.mark.parametrize("settings", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_done_is_refused(settings: dict[str, Any]) -> None:
    case = Case(**MIXED, **settings)
    with pytest.raises(EmulatorError) as refused:
        case.decode(decode_library())
    assert refused.value.code == 1
    with pytest.raises(EmulatorError):
        case.prefill(prefill_library())


def test_a_device_without_the_shared_memory_is_refused() -> None:
    case = Case(**MIXED, head_dim=256)
    with pytest.raises(EmulatorError):
        case.decode(decode_library(), device=Device(40, 65536))
    with pytest.raises(ValueError):
        case.prefill(prefill_library(), device=Device(40, 65536))
