"""What ptxas made of the kernels: tensor cores and 16-byte loads where they are meant to be, registers for the blocks
that are launched. Skipped only where nvcc or nvdisasm is missing.
"""

from __future__ import annotations

import pytest

from tests.cuda.build import ARCHITECTURES, build_cubin, nvcc
from tests.cuda.sass import count, disassembler, instructions

REGISTERS = 65536  # of a multiprocessor
ROW_KERNELS = ("norm.cu", "activation.cu", "sample.cu", "kv_write.cu", "embed.cu", "linear_float.cu")

pytestmark = pytest.mark.skipif(
    nvcc() is None or disassembler() is None, reason="nvcc or nvdisasm (pip install nvidia-cuda-nvdisasm) is missing"
)


def code_of(source: str, arch: str, part: str, expected: int) -> list[list[str]]:
    found = [code for name, code in instructions(build_cubin(source, arch).path).items() if part in name]
    assert len(found) == expected
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("source", "part"), [("attention_decode.cu", "walk_kernel"), ("attention_prefill.cu", "pref")])
def test_attention_is_made_of_tensor_core_products_and_16_byte_copies(source: str, part: str, arch: str) -> None:
    for code in code_of(source, arch, part, 10):
        assert count(code, "HMMA.16816.F32") >= 64  # D / 16 steps of scores or 4 of values, unrolled
        assert count(code, "LDSM.16.M88.4") > 0
        assert count(code, "LDSM.16.MT88.4") > 0
        assert count(code, "LDGSTS") == count(code, "LDGSTS", ".128") > 0
        assert count(code, "LDL") + count(code, "STL") == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("source", "part"), [("linear.cu", "linear_kernel"), ("linear_tiled.cu", "tiled_kernel")])
def test_products_are_int8_tensor_core_products_of_16_byte_loads(source: str, part: str, arch: str) -> None:
    for code in code_of(source, arch, part, 16):  # eight types, two shapes
        assert count(code, "IMMA.16832.S8.S8") >= 2
        assert count(code, "LDL") + count(code, "STL") == 0
        if part == "linear_kernel":
            assert count(code, "LDG", ".128") > 0
        else:
            assert count(code, "LDSM.16.M88.4") > 0
            assert count(code, "LDS.128") > 0
            assert count(code, "LDGSTS") == count(code, "LDGSTS", ".128") > 0
            assert count(code, "I2F") < 4 * count(code, "IMMA")  # only scales are converted: dot products need none


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("source", "part"), [("linear_half.cu", "half_kernel"), ("linear_half_tiled.cu", "half_tiled")]
)
def test_half_products_are_tensor_core_products_of_16_byte_loads(source: str, part: str, arch: str) -> None:
    for code in code_of(source, arch, part, 4):  # two types, two shapes
        assert count(code, "HMMA.16816.F32.BF16") >= 4
        assert count(code, "LDL") + count(code, "STL") == 0
        if part == "half_kernel":
            assert count(code, "LDG", ".128") >= 3
        else:
            assert count(code, "LDS.128") > 0
            assert count(code, "LDGSTS") == count(code, "LDGSTS", ".128") > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cells_are_written_16_bytes_at_a_time(arch: str) -> None:
    (code,) = code_of("kv_write.cu", arch, "rope_kv_write", 1)
    assert count(code, "STG", ".128") >= 3  # f32 takes two of them
    assert count(code, "STG") == count(code, "STG", ".128")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_registers_fit_the_blocks(arch: str) -> None:
    for kernel in build_cubin("attention_prefill.cu", arch).kernels:
        assert kernel.registers * 256 <= REGISTERS
    for kernel in build_cubin("attention_decode.cu", arch).kernel("combine"):
        assert kernel.registers <= 128
    for kernel in build_cubin("draw.cu", arch).kernels:
        assert kernel.registers * 512 <= REGISTERS
    for source in ROW_KERNELS:
        for kernel in build_cubin(source, arch).kernels:
            assert kernel.registers <= 64
    for source in ("linear.cu", "linear_half.cu"):
        for kernel in build_cubin(source, arch).kernel("Li1EE"):  # up to eight rows: four blocks of 256 threads
            assert kernel.registers <= 64
    for source in ("linear_tiled.cu", "linear_half_tiled.cu"):
        for kernel in build_cubin(source, arch).kernel("Li2ELi2EE"):  # tiles of 64 x 64: two blocks of 256 threads
            assert kernel.registers <= 128
