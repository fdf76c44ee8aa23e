"""Builds the extension ahead of time. Everything else about the package is in pyproject.toml; flags and sources are
in pyserve/ops/flags.py.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
CSRC = Path("csrc")
FLAGS = runpy.run_path(str(ROOT / "pyserve" / "ops" / "flags.py"))

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
    ext_modules=[
        CppExtension(
            name="pyserve." + FLAGS["extension_name"](torch.__version__),
            sources=[str(path) for path in FLAGS["sources"](CSRC)],
            depends=[str(path) for path in FLAGS["headers"](CSRC)],
            extra_compile_args=FLAGS["COMPILE_FLAGS"],
            extra_link_args=FLAGS["LINK_FLAGS"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
