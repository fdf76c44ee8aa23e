"""The kernels under ASan with UBSan and under TSan, and each barrier taken away in turn: something must notice."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cuda.build import CSRC, POLICIES, PRIORITIES, REVERSE, build_emulated, run_child
from tests.cuda.children.kernels import ATTENTION, CASES, DEFINES, attention_library, row_library, run
from tests.cuda.row_cases import SOURCES

CHILD = Path(__file__).parent / "children" / "kernels.py"
HEADERS = ("rows.cuh", "best.cuh", "packed.cuh", "product.cuh", "record.cuh", "half.cuh")
BARRIER = re.compile(r"__syncthreads\(|__syncwarp\(|cp_async_wait<")
USERS = {  # file of a barrier: the cases that pass it
    "attention.cuh": ("decode", "prefill"),
    "attention_decode.cu": ("decode",),
    "attention_f32.cu": ("full",),
    "norm.cu": ("norm",),
    "best.cuh": ("argmax", "draw_by_id"),
    "draw.cu": ("draw_listed", "draw_by_id"),
    "kv_write.cu": ("rope",),
    "product.cuh": ("q8_0", "bf16"),
    "linear_tiled.cu": ("tiled_q8_0", "tiled_q5_1"),
    "linear_half_tiled.cu": ("tiled_bf16",),
}


def barriers() -> list[str]:
    """case:file:line of each barrier and of a case that passes it"""
    found = []
    sources = [*ATTENTION, *SOURCES, "attention.cuh", *HEADERS]
    for name in sources:
        for number, line in enumerate((CSRC / name).read_text().splitlines(), 1):
            code = line.partition("//")[0]
            if not BARRIER.search(code):
                continue
            cases = USERS[name]
            if name == "draw.cu":
                cases = ("draw_by_id",) if "stretches" in line else ("draw_listed",)
            if name == "attention.cuh" and "__syncwarp" in code:
                cases = ("decode",)
            if name == "attention.cuh" and "__syncthreads" in code:
                cases = ("prefill",)
            found += [f"{case}:{name}:{number}" for case in cases]
    return found


def build(sanitizer: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        attention = pool.submit(build_emulated, *ATTENTION, sanitizer=sanitizer, defines=DEFINES)
        build_emulated(*SOURCES, sanitizer=sanitizer, defines=DEFINES)
        attention.result()


def assert_clean(sanitizer: str) -> None:
    build(sanitizer)
    result = run_child(sanitizer, CHILD, str(PRIORITIES), *CASES)
    lines = [line for line in result.output.splitlines() if not line.startswith("case ")]
    assert lines == ["error 0.0"] * len(CASES) + ["done"], result.output[-3000:]
    assert result.code == 0


def is_clean(output: str) -> bool:
    return output.strip() == "error 0.0"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_right_without_a_sanitizer(name: str, policy: int) -> None:
    assert is_clean(run(name, {"attention": attention_library(), "rows": row_library()}, policy))


def test_no_bad_access_and_no_undefined_behaviour() -> None:
    assert_clean("asan")


def test_no_race() -> None:
    assert_clean("tsan")


def test_every_barrier_is_missed() -> None:
    """Without it the result is wrong in some schedule, the emulator sees a mistake, or TSan a race."""
    build("tsan")
    plain = {"attention": attention_library(), "rows": row_library()}
    assert len(barriers()) >= 10
    unseen = [name for name in barriers() if all(is_clean(run(name, plain, p)) for p in (REVERSE, PRIORITIES))]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda name: run_child("tsan", CHILD, str(PRIORITIES), "--first", name), unseen))
    for name, result in zip(unseen, results, strict=True):
        assert result.code == 66, f"{name} can go unnoticed"
        assert "data race" in result.output
