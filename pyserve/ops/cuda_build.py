"""Finds or builds the CUDA extension and loads it. Nothing here runs unless a CUDA device is asked for, or `pip
install` builds ahead of time.

nvcc compiles the kernels of csrc/cuda, without any header of torch; the host compiler the rest. The CUDA runtime is
linked in, so the result loads on a machine without CUDA, where it finds no device. Objects are cached by the content of
what they are made of, beside the CPU extension's builds and under the same lock.

Whether to build is decided by `is_wanted`: PYSERVE_CUDA=0 never, PYSERVE_CUDA=1 always, with an error where it is not
possible; otherwise where there are a CUDA toolkit and a torch with CUDA. No GPU need be visible.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pyserve.ops import flags
from pyserve.ops.build import BuildError, build_folder, compiler, installed, locked, source_folder
from pyserve.ops.build_progress import num_objects, told

EMULATED = "cuda-emulated"
NAMESPACE = "pyserve_cuda"


def is_wanted(environment: Mapping[str, str], torch_cuda: str | None) -> bool:
    """Whether the CUDA half is to be built and used where nobody names a device. `torch_cuda`: torch.version.cuda.
    Raises BuildError when PYSERVE_CUDA asks for what cannot be.
    """
    chosen = environment.get("PYSERVE_CUDA", "")
    if chosen == "0":
        return False
    if chosen == "1":
        check_possible(environment, torch_cuda)
        return True
    if chosen:
        raise BuildError(f"PYSERVE_CUDA must be 0 or 1, not {chosen}")
    return find_nvcc(environment) is not None and torch_cuda is not None


def check_possible(environment: Mapping[str, str], torch_cuda: str | None) -> str:
    """The nvcc that will build. Raises BuildError, one line that says what is missing."""
    nvcc = find_nvcc(environment)
    if nvcc is None:
        raise BuildError("the CUDA kernels are not built and there is no nvcc: install a CUDA toolkit or set CUDA_HOME")
    if torch_cuda is None:
        raise BuildError(f"torch {torch.__version__} is a build without CUDA: install torch's build for your CUDA")
    return nvcc


def find_nvcc(environment: Mapping[str, str] = os.environ) -> str | None:
    """CUDA_HOME's compiler, or the one on PATH."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc", path=environment.get("PATH"))


def load(*, is_emulated: bool = False) -> None:
    """Makes `torch.ops.pyserve_cuda` and `torch.classes.pyserve_cuda` work, once in a process; builds first where there
    is no build of these sources. Raises BuildError.
    """
    loaded = _loaded()
    if loaded is None:
        torch.ops.load_library(str(emulated() if is_emulated else installed("cuda") or built()))
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


def built(torch_cuda: str | None = torch.version.cuda) -> Path:
    """The extension for real GPUs, in the cache; built now if it is not there. Raises BuildError."""
    csrc = source_folder()
    if not flags.cuda_kernels(csrc):
        raise BuildError(f"no CUDA sources in {csrc}")
    folder = build_folder(csrc)
    path = folder / f"{NAMESPACE}_{_fingerprint(csrc)}.so"
    if path.is_file():
        return path
    nvcc = check_possible(os.environ, torch_cuda)
    with locked(folder):
        if not path.is_file():
            compile_extension(csrc, folder / "cuda_objects", path, nvcc)
    return path


def compile_extension(csrc: Path, folder: Path, path: Path, nvcc: str) -> None:
    """Compiles what `folder` does not hold yet and links `path`. Raises BuildError with what the compiler said."""
    archs = _architectures()
    commands, started_s = _commands(csrc, nvcc, archs), time.time()
    folder.mkdir(parents=True, exist_ok=True)
    what = f"{len(commands)} files for {', '.join(archs)}, some minutes the first time"
    with told("CUDA extension", what, lambda: num_objects(folder, started_s)):
        _compile_and_link(csrc, commands, folder, path, nvcc)


def _compile_and_link(csrc: Path, commands: Sequence[Sequence[str]], folder: Path, path: Path, nvcc: str) -> None:
    headers = b"".join(each.read_bytes() for each in flags.cuda_headers(csrc))
    with ThreadPoolExecutor(max(1, min(4, len(os.sched_getaffinity(0))))) as pool:
        objects = list(pool.map(lambda command: _object(folder, command, headers), commands))
    from torch.utils import cpp_extension  # here, since it takes longer to import than a cached build takes to load

    libraries = [f"-L{each}" for each in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
    unfinished = path.with_suffix(".tmp.so")  # nvcc looks at the name
    link = [nvcc, "-shared", "-cudart", "static", "-ccbin", compiler()]  # it knows where its runtime is
    _run([*link, *map(str, objects), *libraries, "-Xcompiler", "-pthread", "-o", str(unfinished)])
    unfinished.replace(path)


def _commands(csrc: Path, nvcc: str, archs: Sequence[str]) -> list[list[str]]:
    """One for each source, which comes last; `-o` is to be added."""
    from torch.utils import cpp_extension

    torch_folders = [part for each in cpp_extension.include_paths() for part in ("-isystem", each)]
    for_kernels = [nvcc, *flags.NVCC_FLAGS, *flags.architecture_flags(archs), "-c"]
    for_hosts = [compiler(), *flags.CUDA_HOST_FLAGS, "-fPIC", *torch_folders, "-c"]
    kernels, hosts = flags.cuda_kernels(csrc), flags.cuda_hosts(csrc)
    return [[*for_kernels, str(each)] for each in kernels] + [[*for_hosts, str(each)] for each in hosts]


def _architectures() -> list[str]:
    try:
        return flags.cuda_architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    except ValueError as error:
        raise BuildError(str(error)) from None


def _fingerprint(csrc: Path) -> str:
    made_with = (torch.__version__, flags.NVCC_FLAGS, flags.CUDA_HOST_FLAGS, _architectures())
    digest = hashlib.sha256(repr(made_with).encode())
    for path in [*flags.cuda_kernels(csrc), *flags.cuda_hosts(csrc), *flags.cuda_headers(csrc)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


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
    print(built(torch_cuda="any: the extension calls none of torch's CUDA"))
