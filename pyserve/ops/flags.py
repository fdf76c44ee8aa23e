"""The one list of compile flags and sources. setup.py and the build at first import both read it, so this file
imports nothing but the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

# No -ffast-math and no contraction: a product and a sum are fused only where a kernel says so, so a row's bits do not
# depend on how a loop was compiled. No -march: kernels name their instruction set themselves (csrc/cpu/isa.h) and one
# build runs everywhere.
COMPILE_FLAGS = [
    "-std=c++20",  # what the headers of torch ask for
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",  # g++ 12 warns about its own intrinsics headers
]
# Warnings are errors. fmad is on: kernels say themselves where a product and a sum must not be fused.
NVCC_FLAGS = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
# What g++ 12 says of reference counts that it inlines out of torch's headers is wrong.
CUDA_HOST_FLAGS = [*COMPILE_FLAGS, "-Werror", "-Wno-stringop-overflow"]
CUDA_ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX")  # the PTX is for what comes after
LINK_FLAGS = ["-pthread", "-Wl,--strip-debug"]  # Python's own flags ask for debug information: 12 MB of it


def sources(csrc: Path) -> list[Path]:
    """Every file to compile, in a fixed order. Raises FileNotFoundError when `csrc` does not hold the kernels."""
    found = [*sorted(csrc.glob("*.cpp")), *sorted((csrc / "cpu").glob("*.cpp"))]
    if not (csrc / "registration.cpp").is_file():
        raise FileNotFoundError(f"no kernel sources in {csrc}")
    return found


def cuda_kernels(csrc: Path) -> list[Path]:
    """What nvcc compiles."""
    return sorted((csrc / "cuda").glob("*.cu"))


def cuda_architectures(chosen: str) -> list[str]:
    """TORCH_CUDA_ARCH_LIST's compute capabilities, as in "8.0 9.0a;12.0+PTX"; all that are supported where it is empty.
    Raises ValueError.
    """
    parts = chosen.replace(";", " ").split() or list(CUDA_ARCHITECTURES)
    for part in parts:
        if not re.fullmatch(r"\d+\.\d[a-z]?(\+PTX)?", part):
            raise ValueError(f"TORCH_CUDA_ARCH_LIST: {part} is no compute capability like 9.0 or 9.0+PTX")
    return parts


def architecture_flags(architectures: Sequence[str]) -> list[str]:
    """nvcc's flags for compute capabilities like 9.0: machine code for each, and PTX of those that end in +PTX."""
    codes = []
    for each in architectures:
        number = each.removesuffix("+PTX").replace(".", "")
        codes += [f"arch=compute_{number},code={kind}_{number}" for kind in ("sm", "compute")[: 1 + ("+PTX" in each)]]
    return [part for code in codes for part in ("-gencode", code)]


def cuda_hosts(csrc: Path) -> list[Path]:
    """What the host compiler compiles for the CUDA backend, beside the kernels. It needs no CUDA header."""
    return [*sorted((csrc / "cuda").glob("*.cpp")), csrc / "recorder.cpp", csrc / "cpu" / "page_copy.cpp"]


def cuda_headers(csrc: Path) -> list[Path]:
    """Every header that the CUDA backend may include."""
    return [*headers(csrc), *sorted((csrc / "cuda").glob("*.h")), *sorted((csrc / "cuda").glob("*.cuh"))]


def headers(csrc: Path) -> list[Path]:
    """Every header that the sources may include."""
    return sorted(csrc.glob("*.h")) + sorted((csrc / "cpu").glob("*.h"))


def extension_name(torch_version: str, backend: str = "C") -> str:
    """Name of an extension that `setup.py` builds, "C" or "cuda": a binary is good for the torch version that it was
    compiled against and for no other.
    """
    digits = torch_version.split("+")[0].split(".")
    return f"_{backend}_torch" + "_".join(digits)
