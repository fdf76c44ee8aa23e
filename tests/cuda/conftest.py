"""The emulated device: one for each test of the copy engine, and as `--device` opens it, one for all tests of steps."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.cuda.build import IN_ORDER, cuda_home
from tests.cuda.device import Device

if TYPE_CHECKING:
    from pyserve import ops

DEVICE = os.environ.get("PYSERVE_DEVICE", "cuda-emulated")  # tools/gpu_check runs tests of steps on a GPU
IS_EMULATED = DEVICE == "cuda-emulated"


def finish_torch() -> None:
    """On a GPU, torch writes the pool on a stream of its own."""
    if not IS_EMULATED:
        import torch

        torch.cuda.synchronize()


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


@pytest.fixture(scope="session")
def opened() -> ops.Device:
    """The device that steps run on."""
    from pyserve import ops  # not where only kernels are tested: it needs torch
    from tests.cuda.extension import build_extension

    try:
        cuda_home()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    made = ops.open_device(DEVICE)
    if IS_EMULATED:
        ctypes.CDLL(str(build_extension())).emulator_configure(IN_ORDER, ctypes.c_uint64(1), 1)  # the quickest
    return made


@pytest.fixture
def emulator(opened: ops.Device) -> Iterator[ctypes.CDLL]:
    """Its knobs and counters; the knobs are at rest again afterwards."""
    from tests.cuda.extension import build_extension

    if not IS_EMULATED:
        pytest.skip("the emulator's knobs")
    knobs = ctypes.CDLL(str(build_extension()))
    for name in ("num_blocks", "num_waits", "num_launches", "num_graph_launches", "num_outstanding"):
        getattr(knobs, f"emulator_{name}").restype = ctypes.c_int64
    yield knobs
    knobs.emulator_reset()
