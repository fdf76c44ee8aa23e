"""Compiles kernel sources for the tests: with the host compiler against the emulator, and with nvcc to a cubin.

    library = Library("norm.cu")                       # csrc/cuda/norm.cu, emulated, plain
    library.configure(policy=REVERSE, seed=3)
    library.call("pyserve_cuda_rms_norm", x, weight, out, num_rows, width, 1e-5, None)

    cubin = build_cubin("norm.cu", "sm_90")            # -Werror all-warnings
    assert all(kernel.spill_bytes == 0 for kernel in cubin.kernels)

Everything is cached under build/cuda_tests by the content of the source, of the headers that it includes, of the flags
and of the compiler, and guarded by file locks, so that pytest's workers share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc" / "cuda"
EMULATOR = Path(__file__).resolve().parent / "emulator"
KERNELS = Path(__file__).resolve().parent / "kernels"  # the tests' own
BUILD = Path(os.environ.get("PYSERVE_CUDA_TEST_BUILD", ROOT / "build" / "cuda_tests"))

IN_ORDER, REVERSE, RANDOM, PRIORITIES = range(4)
POLICIES = (IN_ORDER, REVERSE, RANDOM, PRIORITIES)
# Half a minute of CPU each. All that are built: PYSERVE_TEST_ARCHITECTURES="sm_80 sm_86 sm_89 sm_90 sm_100 sm_120".
ARCHITECTURES = tuple(os.environ.get("PYSERVE_TEST_ARCHITECTURES", "sm_90").split())

CXX = os.environ.get("CXX", "g++")
HOST_FLAGS = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-pthread",
    "-fno-strict-aliasing",  # kernels load vectors through reinterpret_cast
    "-fno-gnu-unique",  # else inline variables of two loaded libraries become one
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
]
SANITIZER_FLAGS = {
    "": [],
    "asan": [
        "-O1",
        "-DEMULATOR_ASAN",
        "-fsanitize=address,undefined",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=undefined",
        "-fno-omit-frame-pointer",
    ],
    "tsan": [
        "-O1",
        "-DEMULATOR_TSAN",
        "-fsanitize=thread",
        "-fno-omit-frame-pointer",
        "-fno-tree-loop-distribute-patterns",
    ],
}
# TSan must not see the emulator itself: not instrumented, and no loop turned into a memcpy, which is intercepted.
EMULATOR_TSAN_FLAGS = ["-DEMULATOR_TSAN", "-fno-omit-frame-pointer", "-fno-tree-loop-distribute-patterns"]
NVCC_FLAGS = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v"]


def cuda_home() -> Path:
    """Where CUDA's headers are: a toolkit, or PyPI's packages. Raises FileNotFoundError when there are none."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.append(str(Path(nvcc).resolve().parents[1]))
    candidates.append(str(Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"))
    for candidate in candidates:
        if candidate and (Path(candidate) / "include" / "cuda_fp16.h").is_file():
            return Path(candidate)
    raise FileNotFoundError(
        "no CUDA headers: install nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl, or set CUDA_HOME"
    )


def nvcc() -> str | None:
    """The compiler, or None where there is none: compile checks are skipped then."""
    found = shutil.which("nvcc")
    if found:
        return found
    with contextlib.suppress(FileNotFoundError):
        path = cuda_home() / "bin" / "nvcc"
        if path.is_file():
            return str(path)
    return None


def locate(source: str | Path) -> Path:
    """A source by its name: of csrc/cuda or of the tests' own kernels; before both, one with a planted mistake."""
    path = Path(source)
    if path.is_absolute():
        return path
    planted = os.environ.get("PYSERVE_PLANTED_SOURCES")
    for folder in [*([Path(planted)] if planted else []), CSRC, KERNELS]:
        if (folder / path).is_file():
            return folder / path
    raise FileNotFoundError(f"{source} is neither in {CSRC} nor in {KERNELS}")


# --- emulated


def build_emulated(*sources: str | Path, sanitizer: str = "", defines: Sequence[str] = ()) -> Path:
    """One shared library of these sources and the emulator. `sanitizer`: "", "asan" (with UBSan) or "tsan". `defines`
    leave out instantiations, where nobody else shares what is built: under sanitizers and of sources with a mistake.
    """
    flags = [*HOST_FLAGS, *SANITIZER_FLAGS[sanitizer]]
    emulator_flags = [*HOST_FLAGS, *(EMULATOR_TSAN_FLAGS if sanitizer == "tsan" else SANITIZER_FLAGS[sanitizer])]
    paths = [locate(source) for source in sources]
    fewer = [f"-D{define}" for define in defines]
    objects = [_object(p, [*flags, *(fewer if sanitizer or p.parent not in (CSRC, KERNELS) else [])]) for p in paths]
    objects.append(_object(EMULATOR / "all.cc", emulator_flags))
    command = [CXX, "-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,-z,defs", *flags, *map(str, objects), "-ldl"]
    names = [path.stem for path in paths]
    if len(names) > 8:  # file names have a limit
        names[8:] = [f"{len(names) - 8}_more"]
    stem = "-".join([*names, sanitizer or "plain"])
    return _made(f"{stem}-{_digest(command)}.so", command)


def _object(source: Path, flags: Sequence[str]) -> Path:
    folders = [source.parent, CSRC, CSRC.parent, EMULATOR]
    includes = [f"-I{folder}" for folder in folders] + ["-isystem", str(cuda_home() / "include")]
    command = [CXX, "-x", "c++", *flags, *includes, "-c", str(source)]
    content = [path.read_bytes() for path in _with_headers(source, folders)]
    return _made(f"{source.stem}-{_digest(command, content)}.o", command)


class EmulatorError(RuntimeError):
    """A launcher returned an error; `code` is a cudaError_t, the text is what the emulator says."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function} returned {code}: {text}")
        self.code = code


class Library:
    """An emulated build, loaded. In a child that `run_child` started, the build of that sanitizer."""

    def __init__(self, *sources: str | Path, sanitizer: str | None = None, defines: Sequence[str] = ()) -> None:
        chosen = os.environ.get("PYSERVE_EMULATOR_SANITIZER", "") if sanitizer is None else sanitizer
        self.so = ctypes.CDLL(str(build_emulated(*sources, sanitizer=chosen, defines=defines)))
        self.so.emulator_error.restype = ctypes.c_char_p
        self.so.emulator_num_switches.restype = ctypes.c_uint64
        self.so.emulator_num_threads_run.restype = ctypes.c_uint64

    def configure(self, policy: int = RANDOM, seed: int = 1, *, is_strict: bool = True) -> None:
        """The order in which ready threads and blocks run."""
        self.so.emulator_configure(policy, ctypes.c_uint64(seed), int(is_strict))

    def skip(self, file_name: str, line: int) -> None:
        """Barriers and cp.async waits on this line do nothing from now on; line 0 ends that."""
        self.so.emulator_skip(file_name.encode(), line)

    def error(self) -> str:
        """What the last failed launch said."""
        return str(self.so.emulator_error().decode())

    def call(self, function: str, *arguments: Any) -> None:
        """Calls an extern "C" launcher. Arrays and tensors go as pointers, int as 64 bits (which serves 32-bit
        parameters too), float as C float, None as a null pointer. Raises EmulatorError unless it returns 0.
        """
        code = getattr(self.so, function)(*map(as_argument, arguments))
        if code:
            raise EmulatorError(function, code, self.error())


def as_argument(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, (bool, int)):
        return ctypes.c_int64(int(value))
    if isinstance(value, float):
        return ctypes.c_float(value)
    if hasattr(value, "data_ptr"):
        return ctypes.c_void_p(value.data_ptr())
    if hasattr(value, "ctypes") and hasattr(value, "dtype"):
        return ctypes.c_void_p(value.ctypes.data)
    return value


# --- nvcc


@dataclass(frozen=True)
class KernelReport:
    """What ptxas says of one kernel."""

    name: str  # mangled
    registers: int
    stack_bytes: int
    spill_bytes: int  # stores and loads
    shared_bytes: int  # static


@dataclass(frozen=True)
class Cubin:
    path: Path
    kernels: tuple[KernelReport, ...]

    def kernel(self, part: str) -> list[KernelReport]:
        """Those whose mangled name contains `part`."""
        return [kernel for kernel in self.kernels if part in kernel.name]


def build_cubin(source: str | Path, arch: str, defines: Sequence[str] = ()) -> Cubin:
    """Compiles for one architecture with warnings as errors. Raises CompileError with what nvcc said."""
    path = locate(source)
    compiler = nvcc()
    if compiler is None:
        raise FileNotFoundError("nvcc is not installed")
    includes = [f"-I{folder}" for folder in (CSRC, CSRC.parent)]
    command = [compiler, f"-arch={arch}", *NVCC_FLAGS, *includes, *(f"-D{d}" for d in defines), "-cubin", str(path)]
    content = [header.read_bytes() for header in _with_headers(path, [path.parent, CSRC, CSRC.parent])]
    output = _made(f"{path.stem}-{arch}-{_digest(command, content)}.cubin", command)
    return Cubin(output, tuple(parse_ptxas(output.with_suffix(".log").read_text())))


def parse_ptxas(log: str) -> Iterator[KernelReport]:
    """The report of `-Xptxas -v`, one entry for each kernel."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill"
        r" stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    for found in pattern.finditer(log):
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        yield KernelReport(
            name=found["name"],
            registers=int(found["registers"]),
            stack_bytes=int(found["stack"]),
            spill_bytes=int(found["stores"]) + int(found["loads"]),
            shared_bytes=int(shared[1]) if shared else 0,
        )


# --- sanitizers run in a child: their runtime must be there before Python starts

EVERY_RACE = "suppress_equal_stacks=0:suppress_equal_addresses=0"  # for several cases in one child: report each anew


@dataclass(frozen=True)
class ChildResult:
    code: int
    output: str


def run_child(
    sanitizer: str, script: Path, *arguments: str, timeout_s: float = 120, tsan_options: str = ""
) -> ChildResult:
    """Runs a Python script with the sanitizer's runtime loaded and PYSERVE_EMULATOR_SANITIZER set. Build first what it
    will load. TSan's reports give exit code 66, ASan's and UBSan's 1.
    """
    environment = {
        **os.environ,
        "PYSERVE_EMULATOR_SANITIZER": sanitizer,
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(ROOT),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": f"exitcode=66:report_signal_unsafe=0:{tsan_options}",
    }
    if sanitizer:
        names = {"asan": ["libasan.so", "libubsan.so"], "tsan": ["libtsan.so"]}[sanitizer]
        environment["LD_PRELOAD"] = ":".join(_compiler_file(name) for name in names)
    command = [sys.executable, str(script), *arguments]
    if sanitizer == "tsan" and _address_random_bits() > 28 and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # the TSan of g++ 12 cannot place its shadow otherwise
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    return ChildResult(done.returncode, done.stdout)


@functools.cache
def _compiler_file(name: str) -> str:
    return str(Path(_output([CXX, f"-print-file-name={name}"]).strip()).resolve())


def _address_random_bits() -> int:
    path = Path("/proc/sys/vm/mmap_rnd_bits")
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 28


# --- the cache


class CompileError(RuntimeError):
    """The compiler's command and what it said."""


def _made(name: str, command: Sequence[str]) -> Path:
    """build/cuda_tests/<name>, made by the command (to which -o is added) unless it is there already."""
    output = BUILD / name
    if not output.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with Path(f"{output}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not output.exists():
                _compile(output, command)
        _drop_old(output)
    os.utime(output)
    return output


def _compile(output: Path, command: Sequence[str]) -> None:
    unfinished = output.with_suffix(".unfinished" + output.suffix)
    full = [*command, "-o", str(unfinished)]
    done = subprocess.run(full, env=_clean_environment(), capture_output=True, text=True)
    if done.returncode:
        raise CompileError(" ".join(full) + "\n" + done.stdout + done.stderr)
    output.with_suffix(".log").write_text(done.stdout + done.stderr)
    unfinished.rename(output)


def _drop_old(output: Path, days: float = 2.0) -> None:
    """Earlier builds of the same source that nobody used lately."""
    stem = output.name.rsplit("-", 1)[0]
    for path in BUILD.glob(f"{stem}-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - days * 86400:
                path.unlink()


def _digest(command: Sequence[str], content: Sequence[bytes] = ()) -> str:
    digest = hashlib.sha256(_machine())
    for part in [*(text.encode() for text in command), *content]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


@functools.cache
def _machine() -> bytes:
    """What a build depends on besides its source: the compilers, and the CPU's instructions (-march=native)."""
    flags = re.search(r"^flags\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = [_output([CXX, "--version"])] + ([_output([compiler, "--version"])] if (compiler := nvcc()) else [])
    return "\n".join([*versions, flags[0] if flags else ""]).encode()


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, env=_clean_environment(), capture_output=True, text=True, check=True).stdout


def _clean_environment() -> dict[str, str]:
    """Compilers need no sanitizer."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def _with_headers(source: Path, folders: Sequence[Path]) -> list[Path]:
    """The source and all that it includes in quotes, found in these folders."""
    found: list[Path] = []
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        for name in _INCLUDE.findall(path.read_text()):
            hits = [folder / name for folder in (path.parent, *folders) if (folder / name).is_file()]
            waiting.extend(hits[:1])
    return found
