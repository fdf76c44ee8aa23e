"""The CUDA backend of pyserve with the emulator in place of CUDA: what `PYSERVE_DEVICE=cuda-emulated` loads.

The kernels, the copy engine, the device program and the binding are the files that nvcc's build is made of. Memory of
the device is the host's, so its tensors are CPU tensors.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

from pyserve.ops import flags
from tests.cuda.build import CSRC, CXX, EMULATOR, HOST_FLAGS, _digest, _made, _object

OPTIMISED = ("-O2", "-g1")  # host code takes its time in torch's headers, not in the tests
HOST_ONLY = [flag.replace("c++17", "c++20") for flag in HOST_FLAGS if flag not in OPTIMISED]


def build_extension() -> Path:
    """The shared library that torch loads."""
    csrc = CSRC.parent
    folders = cpp_extension.include_paths()
    torch_flags = [*HOST_ONLY, *(part for folder in folders for part in ("-isystem", folder))]
    sources = [(path, HOST_FLAGS) for path in [*flags.cuda_kernels(csrc), EMULATOR / "all.cc"]]
    sources += [(path, torch_flags if path.name == "binding.cpp" else HOST_ONLY) for path in flags.cuda_hosts(csrc)]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: _object(*source), sources))
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
    command = [CXX, "-shared", "-pthread", "-Wl,-Bsymbolic", *map(str, objects), *libraries, "-ldl"]
    version = torch.__version__.split("+")[0].replace(".", "_")
    return _made(f"pyserve_cuda_emulated-{version}-{_digest(command)}.so", command)
