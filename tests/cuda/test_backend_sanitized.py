"""The backend's threads under TSan: steps, graphs, copies and their events, without torch.

This is also the proof that a copy need not wait on the device for a step that runs beside it: every step which touched
its pages has been collected, and has ended there.
"""

from __future__ import annotations

import re
from pathlib import Path

from pyserve.ops import flags
from tests.cuda.build import (
    CSRC,
    CXX,
    EMULATOR,
    EMULATOR_TSAN_FLAGS,
    EVERY_RACE,
    HOST_FLAGS,
    KERNELS,
    SANITIZER_FLAGS,
    _digest,
    _made,
    _object,
    run_child,
)
from tests.cuda.children.kernels import ATTENTION, DEFINES
from tests.cuda.row_cases import SOURCES

CHILD = Path(__file__).parent / "children" / "backend.py"
GOOD = ["beside", "free pages", "parked", "asked by many", "teardown"]
BAD = ["out of the step", "into the step"]
FEWER = {*ATTENTION, *SOURCES}  # kernels of which the sanitizers' builds have some instantiations only


def build_backend() -> Path:
    """Kernels, emulator and all that is written in C++ but the binding."""
    kernel_flags = [*HOST_FLAGS, *SANITIZER_FLAGS["tsan"]]
    host_flags = [flag.replace("c++17", "c++20") for flag in kernel_flags]
    objects = [
        _object(path, [*kernel_flags, *(f"-D{define}" for define in DEFINES if path.name in FEWER)])
        for path in flags.cuda_kernels(CSRC.parent)
    ]
    hosts = [path for path in flags.cuda_hosts(CSRC.parent) if path.name != "binding.cpp"]
    objects += [_object(path, host_flags) for path in [*hosts, KERNELS / "backend.cpp"]]
    objects.append(_object(EMULATOR / "all.cc", [*HOST_FLAGS, *EMULATOR_TSAN_FLAGS]))
    command = [CXX, "-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,-z,defs", *kernel_flags, *map(str, objects), "-ldl"]
    return _made(f"backend-tsan-{_digest(command)}.so", command)


def test_threads_of_the_backend_have_no_race() -> None:
    result = run_child("tsan", CHILD, str(build_backend()), *GOOD, *BAD, timeout_s=400, tsan_options=EVERY_RACE)
    assert "done" in result.output, result.output[-3000:]
    parts = re.split(r"^case (.+)$", result.output, flags=re.MULTILINE)[1:]
    said = dict(zip(parts[::2], parts[1::2], strict=True))  # what each case printed
    for name in GOOD:
        assert said[name].strip() == "wrong 0", f"{name}: {said[name][:3000]}"
    for name in BAD:
        assert "data race" in said[name], f"{name}: a copy of pages that the step beside it writes must be noticed"
