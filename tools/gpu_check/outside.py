"""Parts that run in processes of their own: the kernels' tests and the engine's tests on the device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

from tools.gpu_check.machine import ROOT, Machine, ask_nvidia_smi, device_library
from tools.gpu_check.results import NotHere, Result, check

ENGINE_TOPICS = ("engine", "engine_beside", "steps", "windows", "company", "sampling")
ENGINE_TESTS = tuple(f"tests/cuda/test_{name}_emulated.py" for name in ENGINE_TOPICS)


def this_machine(machine: Machine) -> Result:
    """What the other numbers were measured on."""
    names = ("name", "driver_version", "memory.total", "clocks.max.sm", "pcie.link.gen.max", "pcie.link.width.max")
    data: dict[str, Any] = {} if machine.is_dry else {name: ask_nvidia_smi(name) for name in names}
    data |= {"num_sms": machine.num_sms, "capability": machine.capability, "torch": torch_version()}
    name = "the emulator" if machine.is_dry else data["name"]
    return Result(f"{name}, {machine.num_sms} SMs, sm_{machine.capability}, torch {data['torch']}", data=data)


def torch_version() -> str:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    code = "import torch; print(torch.__version__, 'with' if torch.cuda.is_available() else 'without', 'a GPU')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.stdout.strip() or "broken"


def kernel_tests(machine: Machine) -> Result:
    """tests/cuda/test_kernels_*.py on the device: numpy's arrays are managed memory, the library is nvcc's."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/cuda").glob("test_kernels_*.py"))
    check(bool(files), "there are no tests/cuda/test_kernels_*.py")
    environment = {"PYSERVE_GPU_CHECK_LIBRARY": "emulated" if machine.is_dry else str(device_library())}
    arguments = ["-p", "tools.gpu_check.plugin", *files]
    return pytest(arguments + (["--collect-only"] if machine.is_dry else []), environment, timeout_s=200)


def engine_tests(machine: Machine) -> Result:
    """The engine on the GPU: logits beside the CPU's, four chats on a full pool, copies and their hashes, graphs beside
    plain launches. The extension is built for this GPU alone first.
    """
    if "with a GPU" not in torch_version() and not (machine.is_dry and torch_version() != "not installed"):
        raise NotHere(f"torch: {torch_version()}")
    if machine.is_dry:
        return pytest([*ENGINE_TESTS, "--collect-only"], {"PYSERVE_DEVICE": "cuda-emulated"}, timeout_s=150)
    return pytest(
        [*ENGINE_TESTS], {"PYSERVE_DEVICE": "cuda", "TORCH_CUDA_ARCH_LIST": machine.capability}, timeout_s=150
    )


def pytest(arguments: list[str], environment: dict[str, str], timeout_s: float) -> Result:
    if importlib.util.find_spec("pytest") is None:
        raise NotHere("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=timeout_s,
    )  # fmt: skip
    counts = re.compile(r"\d+ (passed|failed|tests? collected|error)")
    lines = [line for line in done.stdout.splitlines() if counts.search(line)]
    last = re.sub(r"=+", "", lines[-1]).strip() if lines else done.stdout[-300:]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    check(done.returncode == 0, "; ".join([last, *failed[:5]]))
    return Result(last, data={"output": done.stdout[-4000:]})
