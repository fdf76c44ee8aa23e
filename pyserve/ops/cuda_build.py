"""Finds or builds the CUDA extension and loads it. Nothing here runs unless a CUDA device is asked for.

nvcc compiles the kernels of csrc/cuda, without any header of torch; the host compiler the rest. The CUDA runtime is
linked in, so the result loads on a machine without CUDA, where it finds no device. Objects are cached by the content of
what they are made of, beside the CPU extension's builds and under the same lock.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pyserve.ops import flags
from pyserve.ops.build import BuildError, build_folder, compiler, locked, source_folder

EMULATED = "cuda-emulated"
NAMESPACE = "pyserve_cuda"


def load(*, is_emulated: bool = False) -> None:
    """Makes `torch.ops.pyserve_cuda` and `torch.classes.pyserve_cuda` work, once in a process; builds first where there
    is no build of these sources. Raises BuildError.
    """
    loaded = _loaded()
    if loaded is None:
        torch.ops.load_library(str(emulated() if is_emulated else built()))
    elif loaded != is_emulated:
        raise BuildError("this process has the other kind of CUDA extension loaded already")


def _loaded() -> bool | None:
    """Whether the extension that is loaded is the emulated one; None: there is none."""
    try:
        return bool(torch.ops.pyserve_cuda.is_emulated())
    except AttributeError:
        return None


def emulated() -> Path:
    """The extension with the tests' emulator in place of CUDA."""
    try:
        extension = importlib.import_module("tests.cuda.extension")
    except ImportError as error:
        raise BuildError(f"{EMULATED} is for tests and needs a checkout: {error}") from None
    path: Path = extension.build_extension()
    return path


def built() -> Path:
    """The extension for real GPUs, in the cache; built now if it is not there."""
    csrc = source_folder()
    if not flags.cuda_kernels(csrc):
        raise BuildError(f"no CUDA sources in {csrc}")
    folder = build_folder(csrc)
    path = folder / f"{NAMESPACE}_{_fingerprint(csrc)}.so"
    if path.is_file():
        return path
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("the CUDA kernels are not built and there is no nvcc: install a CUDA toolkit or set CUDA_HOME")
    with locked(folder):
        if not path.is_file():
            _build(csrc, folder / "cuda_objects", path, nvcc)
    return path


def find_nvcc() -> str | None:
    """CUDA_HOME's compiler, or the one on PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def _fingerprint(csrc: Path) -> str:
    digest = hashlib.sha256(repr((torch.__version__, flags.NVCC_FLAGS, flags.COMPILE_FLAGS, _architectures())).encode())
    for path in [*flags.cuda_kernels(csrc), *flags.cuda_hosts(csrc), *flags.cuda_headers(csrc)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _architectures() -> list[str]:
    """PYSERVE_CUDA_ARCHS, as in 8.0,9.0, or all that are supported."""
    chosen = os.environ.get("PYSERVE_CUDA_ARCHS", "")
    return [part.strip() for part in chosen.split(",") if part.strip()] or list(flags.CUDA_ARCHITECTURES)


def _build(csrc: Path, folder: Path, path: Path, nvcc: str) -> None:
    from torch.utils import cpp_extension  # here, since it takes longer to import than a cached build takes to load

    started = time.monotonic()
    kernels, hosts = flags.cuda_kernels(csrc), flags.cuda_hosts(csrc)
    archs = _architectures()
    what = f"{len(kernels)} kernel files for {', '.join(archs)}, some minutes the first time"
    print(f"building CUDA extension ({what}) ...", file=sys.stderr, flush=True)
    folder.mkdir(exist_ok=True)
    torch_folders = [part for each in cpp_extension.include_paths() for part in ("-isystem", each)]
    commands = [
        *([nvcc, *flags.NVCC_FLAGS, *flags.architecture_flags(archs), "-c", str(each)] for each in kernels),
        *([compiler(), *flags.COMPILE_FLAGS, "-fPIC", *torch_folders, "-c", str(each)] for each in hosts),
    ]
    headers = b"".join(each.read_bytes() for each in flags.cuda_headers(csrc))
    with ThreadPoolExecutor(max(1, min(4, len(os.sched_getaffinity(0))))) as pool:
        objects = list(pool.map(lambda command: _object(folder, command, headers), commands))
    libraries = [f"-L{each}" for each in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
    unfinished = path.with_suffix(".tmp.so")  # nvcc looks at the name
    link = [nvcc, "-shared", "-cudart", "static", "-ccbin", compiler()]  # it knows where its runtime is
    _run([*link, *map(str, objects), *libraries, "-Xcompiler", "-pthread", "-o", str(unfinished)])
    unfinished.replace(path)
    print(f"building CUDA extension: done in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _object(folder: Path, command: Sequence[str], headers: bytes) -> Path:
    source = Path(command[-1])
    digest = hashlib.sha256(repr(list(command)).encode() + headers + source.read_bytes()).hexdigest()[:16]
    path = folder / f"{source.stem}-{digest}.o"
    if not path.is_file():
        unfinished = path.with_suffix(".tmp")
        _run([*command, "-o", str(unfinished)])
        unfinished.replace(path)
    return path


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise BuildError(f"building the CUDA extension failed: {' '.join(command)}\n{done.stdout}")


if __name__ == "__main__":  # python -m pyserve.ops.cuda_build: ahead of the first start, also where no GPU is
    print(built())
