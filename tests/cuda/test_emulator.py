"""The emulator finds planted mistakes, accuses no good kernel, and lays registers out as the PTX ISA says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.build import (
    EVERY_RACE,
    IN_ORDER,
    POLICIES,
    PRIORITIES,
    EmulatorError,
    Library,
    build_emulated,
    run_child,
)
from tests.cuda.fragments import (
    a_byte_fragments,
    a_fragments,
    b_byte_fragments,
    b_fragments,
    bf16_bits,
    bf16_values,
    c_fragments,
    loaded_matrices,
)
from tests.cuda.mistakes import Mistakes

CHILD = Path(__file__).parent / "children" / "mistakes.py"

GOOD = {
    "good_warp_order": [2, 1, 4, 3],
    "good_split_masks": [17, 6, 19, 6],
    "good_counts": [55, 55, 55, 55],
    "good_async_copy": [61, 57, 53, 49],
    "good_block_atomic": [4, 8, 12, 16],
    "good_last_block": [None, 4, 8, 12],
}
SAYS = {  # in the plain build
    "bad_divergent_barrier": "divergent __syncthreads",
    "bad_missing_threads": "threads of the block have exited|thread exits while others wait",
    "bad_early_exit": "have exited|thread exits while others wait",
    "bad_shuffle_mask": "lane exits while __shfl_sync|lanes that have exited",
    "bad_mask_without_caller": "lacks the calling lane",
    "bad_two_collectives": "lanes of one mask in different collectives",
    "bad_deadlock": "deadlock in block .* waits in|exits while",
    "bad_async_copy_forgotten": "copies that nobody waited for",
    "bad_async_copy_alignment": "misaligned address",
    "bad_ldmatrix_alignment": "not 16-byte aligned",
    "bad_static_size": "static shared memory .* over the limit",
    "bad_dynamic_bounds": "wrote outside the dynamic shared memory",
}
GIVES_NAN = ["bad_shuffle_source", "bad_uninitialised", "bad_async_copy_wait", "bad_async_copy_group"]
ASAN = {
    "bad_misaligned": "misaligned address",
    "bad_global_bounds": "heap-buffer-overflow",
    "bad_two_arrays": "heap-buffer-overflow",
    "bad_dynamic_bounds": "heap-buffer-overflow",
    "bad_local_bounds": "stack-buffer-overflow|out of bounds|insufficient space",
}
RACES = ["bad_warp_order", "bad_missing_barrier", "bad_block_race", "bad_last_block"]
NO_RACES = list(GOOD)


@pytest.fixture(scope="module")
def mistakes() -> Mistakes:
    return Mistakes()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("name", "start"), GOOD.items(), ids=GOOD.keys())
def test_good_kernels_are_not_accused(mistakes: Mistakes, name: str, start: list[float | None], policy: int) -> None:
    for seed in range(1, 4):
        outcome = mistakes.run(name, policy, seed)
        assert outcome.error == ""
        for found, wanted in zip(outcome.out, start, strict=False):
            assert wanted is None or found == wanted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("name", "text"), SAYS.items(), ids=SAYS.keys())
def test_errors_say_what_is_wrong_and_where(mistakes: Mistakes, name: str, text: str, policy: int) -> None:
    error = mistakes.run(name, policy).error
    assert re.search(text, error), error
    assert "block (0,0,0)" in error
    if "size" not in name and "bounds" not in name and "forgotten" not in name:
        assert "mistakes.cu:" in error


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", GIVES_NAN)
def test_undefined_values_are_nan(mistakes: Mistakes, name: str, policy: int) -> None:
    assert np.isnan(mistakes.run(name, policy).out).any()


def test_a_missing_barrier_shows_in_the_result_whatever_the_schedule(mistakes: Mistakes) -> None:
    """Threads that have not run yet left NaN behind."""
    for policy in POLICIES:
        assert np.isnan(mistakes.run("bad_missing_barrier", policy).out).any()


def test_an_error_does_not_outlive_its_launch(mistakes: Mistakes) -> None:
    assert mistakes.run("bad_deadlock").error
    assert mistakes.run("good_counts").error == ""


def test_every_planted_mistake_is_looked_for(mistakes: Mistakes) -> None:
    looked_for = {*GOOD, *SAYS, *GIVES_NAN, *ASAN, *RACES}
    assert set(mistakes.names) == looked_for


@pytest.mark.parametrize(
    ("grid_y", "num_threads", "shared_bytes"), [(65536, 64, 0), (1, 1025, 0), (1, 0, 0), (1, 64, 232449), (0, 64, 0)]
)
def test_bad_launches_are_refused(mistakes: Mistakes, grid_y: int, num_threads: int, shared_bytes: int) -> None:
    with pytest.raises(EmulatorError, match="bad launch") as refused:
        mistakes.library.call("mistake_shape", grid_y, num_threads, shared_bytes, None)
    assert refused.value.code == 9


@pytest.mark.parametrize(("name", "text"), ASAN.items(), ids=ASAN.keys())
def test_bounds_and_alignment_under_the_address_sanitizer(name: str, text: str) -> None:
    build_emulated("mistakes.cu", sanitizer="asan")
    result = run_child("asan", CHILD, name)
    assert result.code != 0
    assert re.search(text, result.output), result.output[-2000:]
    assert "mistakes.cu:" in result.output


def test_good_kernels_under_the_address_sanitizer() -> None:
    build_emulated("mistakes.cu", sanitizer="asan")
    result = run_child("asan", CHILD, *GOOD)
    assert result.code == 0, result.output[-2000:]
    assert "done" in result.output


@pytest.fixture(scope="module")
def races() -> dict[str, str]:
    build_emulated("mistakes.cu", sanitizer="tsan")
    result = run_child("tsan", CHILD, *RACES, *NO_RACES, tsan_options=EVERY_RACE)
    assert "done" in result.output, result.output[-3000:]
    parts = re.split(r"^case (.+)$", result.output, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.xdist_group("cuda_tsan_mistakes")
@pytest.mark.parametrize("name", RACES)
def test_races_are_found(races: dict[str, str], name: str) -> None:
    assert "data race" in races[name]
    assert "mistakes.cu:" in races[name]


@pytest.mark.xdist_group("cuda_tsan_mistakes")
@pytest.mark.parametrize("name", NO_RACES)
def test_what_is_ordered_is_no_race(races: dict[str, str], name: str) -> None:
    assert "WARNING" not in races[name], races[name][:2000]


# --- register layouts


@pytest.fixture(scope="module")
def probe() -> Library:
    return Library("probe.cu")


@pytest.mark.parametrize("policy", [IN_ORDER, PRIORITIES])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_of_floats(probe: Library, kind: str, policy: int) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 16), (8, 16), (16, 8)))
    if kind == "bf16":
        a_bits, b_bits = bf16_bits(a), bf16_bits(b)
        a, b = bf16_values(a_bits), bf16_values(b_bits)
    else:
        a[0, :3] = [2**-20, -(2**-24), 60000]  # subnormal, the smallest, near the largest
        a, b = a.astype(np.float16), b.astype(np.float16)
        a_bits, b_bits = a.view(np.uint16), b.view(np.uint16)
    d = np.zeros((32, 4), np.float32)
    probe.configure(policy)
    probe.call("probe_mma", kind == "f16", a_fragments(a_bits), b_fragments(b_bits), c_fragments(c), d, None)
    wanted = c_fragments(c.astype(np.float64) + a.astype(np.float64) @ b.T.astype(np.float64))
    assert (abs(d - wanted) <= 1e-5 * np.maximum(1, abs(wanted))).all()


def test_mma_of_bytes(probe: Library) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (16, 32), np.int8), rng.integers(-128, 128, (8, 32), np.int8)
    c = rng.integers(-1000, 1000, (16, 8)).astype(np.int32)
    d = np.zeros((32, 4), np.int32)
    probe.call("probe_mma_s8", a_byte_fragments(a), b_byte_fragments(b), c_fragments(c), d, None)
    assert (d == c_fragments(c + a.astype(np.int32) @ b.T.astype(np.int32))).all()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_ldmatrix(probe: Library, is_transposed: bool) -> None:
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    four, two = np.zeros((32, 4, 2), np.uint16), np.zeros((32, 2, 2), np.uint16)
    probe.call("probe_ldmatrix", is_transposed, matrices, four, two, None)
    wanted = loaded_matrices(matrices.transpose(0, 2, 1) if is_transposed else matrices)
    assert (four == wanted).all()
    assert (two == wanted[:, :2]).all()
