"""Makes numpy allocate every array in managed memory, so that tests written for the emulator can hand their arrays to
kernels on a GPU as they are. Through numpy's allocator hook (NEP 49).
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy._core import _multiarray_umath  # type: ignore[attr-defined]

_SET_HANDLER = 304  # its place in numpy's C interface, the same since 1.22


class _Allocator(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free"))


class _Handler(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", _Allocator))


def use_managed_memory(library: ctypes.CDLL) -> list[object]:
    """From now on, for arrays made from now on, until the process ends: keep what it returns until then."""

    def address(name: str) -> int | None:
        return ctypes.cast(getattr(library, f"gpu_check_numpy_{name}"), ctypes.c_void_p).value

    functions = [address(name) for name in ("malloc", "calloc", "realloc", "free")]
    handler = _Handler(b"pyserve_managed", 1, _Allocator(None, *functions))
    name = ctypes.c_char_p(b"mem_handler")
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make(ctypes.addressof(handler), name, None)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(get(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET_HANDLER])
    return [handler, name, capsule, set_handler(capsule)]


def handler_name() -> str:
    """Of the arrays that are made now."""
    return str(_multiarray_umath.get_handler_name(np.zeros(1)))
