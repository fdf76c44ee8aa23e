"""Builds the extensions ahead of time: the CPU's always, CUDA's where `cuda_build.is_wanted` says so. Everything else
about the package is in pyproject.toml; flags and sources are in pyserve/ops/flags.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from setuptools import Extension, find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")

# The package's own __init__ would load the extension that is built here.
ops = ModuleType("pyserve.ops")
ops.__path__ = [str(ROOT / "pyserve" / "ops")]
sys.modules["pyserve.ops"] = ops
sys.path.insert(0, str(ROOT))
from pyserve.ops import build, cuda_build, flags  # noqa: E402

CUDA_NAME = "pyserve." + flags.extension_name(torch.__version__, "cuda")


class Build(BuildExtension):
    """CUDA's extension is not one for torch to build: its kernels see no header of torch."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name != CUDA_NAME:
            super().build_extension(ext)
            return
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            nvcc = cuda_build.check_possible(os.environ, torch.version.cuda)
            cuda_build.compile_extension(CSRC, Path(self.build_temp) / "cuda", path, nvcc)
        except build.BuildError as error:
            raise SystemExit(error.message) from None


def extensions() -> list[Extension]:
    try:
        wants_cuda = cuda_build.is_wanted(os.environ, torch.version.cuda)
    except build.BuildError as error:
        raise SystemExit(error.message) from None
    cpu = CppExtension(
        name="pyserve." + flags.extension_name(torch.__version__),
        sources=[str(path) for path in flags.sources(CSRC)],
        depends=[str(path) for path in flags.headers(CSRC)],
        extra_compile_args=flags.COMPILE_FLAGS,
        extra_link_args=flags.LINK_FLAGS,
    )
    return [cpu, Extension(CUDA_NAME, sources=[])] if wants_cuda else [cpu]


setup(
    # The sources go into the wheel as pyserve/csrc too: a wheel that meets another torch version builds again at
    # first import.
    packages=[
        *find_packages(include=["pyserve", "pyserve.*"]),
        "pyserve.web",
        "pyserve.csrc",
        "pyserve.csrc.cpu",
        "pyserve.csrc.cuda",
    ],
    package_dir={"pyserve.csrc": "csrc", "pyserve.csrc.cpu": "csrc/cpu", "pyserve.csrc.cuda": "csrc/cuda"},
    package_data={
        "pyserve.web": ["*"],
        "pyserve.csrc": ["*.h", "*.cpp"],
        "pyserve.csrc.cpu": ["*.h", "*.cpp"],
        "pyserve.csrc.cuda": ["*.h", "*.cpp", "*.cu", "*.cuh"],  # built when a CUDA device is first asked for
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": Build},
)
