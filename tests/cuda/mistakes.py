"""Runs one of the kernels of kernels/mistakes.cu, here or in a child under a sanitizer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.cuda.build import RANDOM, EmulatorError, Library


@dataclass(frozen=True)
class Outcome:
    error: str  # "" when the launch went well
    out: NDArray[np.float32]


class Mistakes:
    def __init__(self) -> None:
        self.library = Library("mistakes.cu")
        name_of = self.library.so.mistake_name
        name_of.restype = ctypes.c_char_p
        self.names: list[str] = []
        while (name := name_of(ctypes.c_int64(len(self.names)))) is not None:
            self.names.append(name.decode())

    def run(self, name: str, policy: int = RANDOM, seed: int = 1) -> Outcome:
        """in = 1..64; kernels about blocks get four of them."""
        self.library.configure(policy, seed)
        start = np.arange(1, 65, dtype=np.float32)
        is_about_blocks = "block" in name
        out = np.zeros(320, np.float32) if is_about_blocks else np.full(64, 7, np.float32)
        try:
            self.library.call("mistake_run", self.names.index(name), out, start, 64, 4 if is_about_blocks else 1, None)
        except EmulatorError as failed:
            return Outcome(str(failed), out)
        return Outcome("", out)
