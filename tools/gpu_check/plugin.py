"""pytest plugin: tests written for the emulator run on the device. Tests of the emulator's own means (sanitizers,
barriers taken away) are skipped.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from tests.cuda import build
from tools.gpu_check import machine
from tools.gpu_check.managed_numpy import use_managed_memory

_KEPT: list[object] = []  # numpy calls back until the process ends


class DeviceLibrary(build.Library):
    """All kernels in one; done when a call returns, since the tests look at the result at once."""

    def __init__(self, *sources: Any, **options: Any) -> None:
        own = [source for source in sources if build.locate(source) not in machine.sources()]
        if own:
            pytest.skip(f"{own[0]} is a test's own, for the emulator")
        self.so = ctypes.CDLL(os.environ["PYSERVE_GPU_CHECK_LIBRARY"])

    def configure(self, policy: int = build.RANDOM, seed: int = 1, *, is_strict: bool = True) -> None:
        """The device has a schedule of its own."""

    def skip(self, file_name: str, line: int) -> None:
        pytest.skip("barriers cannot be taken out of a compiled kernel")

    def error(self) -> str:
        return ""

    def call(self, function: str, *arguments: Any) -> None:
        super().call(function, *arguments)
        super().call("gpu_check_synchronize")


def only_emulated(*_: Any, **__: Any) -> Any:
    pytest.skip("sanitizers need the emulator")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["PYSERVE_GPU_CHECK_LIBRARY"] == "emulated":
        return
    build.Library = DeviceLibrary  # type: ignore[misc]
    build.run_child = build.build_emulated = only_emulated
    _KEPT.append(use_managed_memory(ctypes.CDLL(os.environ["PYSERVE_GPU_CHECK_LIBRARY"])))
