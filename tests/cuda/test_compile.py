"""Every kernel source compiles with warnings as errors, without spills, and the copy kernels move 16 bytes at a time:
for sm_90, or for what PYSERVE_TEST_ARCHITECTURES names; what is near the limit of its registers on another one is
compiled for that one, too. Skipped only where there is no nvcc.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.cuda.build import ARCHITECTURES, CSRC, Cubin, build_cubin, nvcc, parse_ptxas
from tests.cuda.sass import count, disassembler, instructions

SOURCES = sorted(path.name for path in CSRC.glob("*.cu"))
NEAR_THE_LIMIT = {
    ("attention_prefill.cu", "sm_100"),
    ("attention_prefill.cu", "sm_120"),
    ("linear.cu", "sm_100"),
}
HOST_ONLY = {"calibrate.cu", "event.cu", "graph.cu", "memory.cu", "pack.cu", "pinned.cu"}
needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
needs_nvdisasm = pytest.mark.skipif(
    nvcc() is None or disassembler() is None, reason="nvcc or nvdisasm (pip install nvidia-cuda-nvdisasm) is missing"
)


@needs_nvcc
@pytest.mark.parametrize(("source", "arch"), sorted({*itertools.product(SOURCES, ARCHITECTURES), *NEAR_THE_LIMIT}))
def test_compiles_without_spills(source: str, arch: str) -> None:
    cubin = build_cubin(source, arch)
    assert bool(cubin.kernels) == (source not in HOST_ONLY)
    for kernel in cubin.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.registers <= 255, kernel
        assert kernel.shared_bytes <= 48 * 1024, kernel


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_copy_kernels_leave_room_for_others(arch: str) -> None:
    """256 threads of 64 registers: four blocks a multiprocessor, beside whatever the step runs."""
    for kernel in build_cubin("page_copy.cu", arch).kernels:
        assert kernel.registers <= 64
        assert kernel.stack_bytes == 0


def kernel_code(cubin: Cubin, part: str) -> list[str]:
    matching = [code for name, code in instructions(cubin.path).items() if part in name]
    assert len(matching) == 1
    return matching[0]


@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("move", "has_store"), [(0, True), (1, True), (2, False)], ids=["gather", "scatter", "hash"])
def test_pages_move_16_bytes_at_a_time(arch: str, move: int, has_store: bool) -> None:
    cubin = build_cubin("page_copy.cu", arch)
    for has_hash in [0, 1] if has_store else [1]:
        code = kernel_code(cubin, f"page_move_kernelILNS0_4MoveE{move}ELb{has_hash}")
        assert count(code, "LDG", ".128") >= 5  # four in flight, and the rest of a page
        assert count(code, "LDG") == count(code, "LDG", ".128")
        assert count(code, "STG", ".128") >= (5 if has_store else 0)
        assert count(code, "LDL") + count(code, "STL") == 0


@needs_nvdisasm
def test_four_loads_are_in_flight_before_the_first_store() -> None:
    code = kernel_code(build_cubin("page_copy.cu", ARCHITECTURES[-1]), "page_move_kernelILNS0_4MoveE0ELb0")
    moves = ["L" if "LDG" in line else "S" for line in code if "LDG" in line or "STG" in line]
    assert "LLLLSSSS" in "".join(moves)


def test_the_ptxas_report_is_read() -> None:
    log = """ptxas info    : Compiling entry function '_Z1aPf' for 'sm_90'
ptxas info    : Function properties for _Z1aPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 64 bytes smem, 544 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bPf' for 'sm_90'
ptxas info    : Function properties for _Z1bPf
    16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
    first, second = parse_ptxas(log)
    assert (first.name, first.registers, first.spill_bytes, first.shared_bytes) == ("_Z1aPf", 40, 0, 64)
    assert (second.name, second.registers, second.spill_bytes, second.stack_bytes) == ("_Z1bPf", 255, 32, 16)


FORBIDDEN = {
    r"__CUDA_ARCH__": {"ptx.cuh"},
    r"<<<": set(),
    r"(?<!extern )__shared__": {"portable.cuh"},
    r"\basm\b": {"ptx.cuh"},
    r"#include\s*[<\"](torch|ATen|c10)/": {"binding.cpp"},
    r"cooperative_groups|<mma\.h>|wgmma|cp\.async\.bulk|mbarrier": set(),
}


@pytest.mark.parametrize("path", sorted(CSRC.iterdir()), ids=lambda path: path.name)
def test_sources_keep_to_what_the_emulator_knows(path: Path) -> None:
    code = re.sub(r"//.*", "", path.read_text())
    for pattern, allowed in FORBIDDEN.items():
        assert path.name in allowed or not re.search(pattern, code), pattern
