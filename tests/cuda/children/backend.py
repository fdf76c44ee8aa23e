"""Runs cases of kernels/backend.cpp in a child under a sanitizer: `backend.py library case...`."""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    library = ctypes.CDLL(sys.argv[1])
    library.emulator_configure(0, ctypes.c_uint64(1), 1)  # in order, the quickest
    for case in sys.argv[2:]:
        print(f"case {case}", flush=True)
        print(f"wrong {library.backend_run(case.encode())}", flush=True)
    print("case end\ndone", flush=True)
