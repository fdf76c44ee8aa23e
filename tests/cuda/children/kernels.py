"""Runs in a child under a sanitizer: `kernels.py policy [--first] [case[:file:line]]...`.

Prints the name of each case, then how far the result is from float64 (`error 0.0` where it is right) or what the
emulator says. With file and line, the barrier there is off. --first: ends with TSan's first report; without a barrier
there are thousands, each slow to write.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np

from tests.cuda.attention_case import BF16, Array, Case, Device
from tests.cuda.build import EmulatorError, Library
from tests.cuda.row_cases import (
    Q4_0,
    Q4_1,
    Q8_0,
    SILU,
    SOURCES,
    RopeCase,
    Weight,
    argmax,
    gated_activation,
    linear,
    normal,
    quantise,
    rms_norm,
)

ATTENTION = ("attention_decode.cu", "attention_prefill.cu")
DEFINES = ("PYSERVE_FEW_HEAD_DIMS",)
Outcome = tuple[Array, Array, float]  # found, wanted, tolerance


def attention_library() -> Library:
    return Library(*ATTENTION, defines=DEFINES)


def difference(found: Array, wanted: Array, tolerance: float) -> float:
    worst = np.abs(np.asarray(found, np.float64) - wanted) - tolerance * (1 + np.abs(wanted))
    return float("inf") if np.isnan(worst).any() else max(0.0, float(worst.max()))


def decode(library: Library, head_dim: int) -> float:
    """Two workers, each with parts of two sequences, and one of them begins inside a group."""
    case = Case([130, 70], [(0, 129), (1, 69)], head_dim=head_dim, num_heads=3, num_kv_heads=1, page_size=8)
    return max(0.0, case.excess(case.decode(library, device=Device(1, 160000 if head_dim > 80 else 80000))))


def prefill(library: Library, head_dim: int) -> float:
    case = Case([71], [(0, p) for p in range(60, 71)], head_dim=head_dim, num_heads=3, num_kv_heads=1, page_size=8)
    return max(0.0, case.excess(case.prefill(library, device=Device(1, 101376))))


def long_prefill(library: Library) -> float:
    """Two groups: the total goes through scratch."""
    case = Case([515], [(0, p) for p in range(511, 515)], num_heads=1, num_kv_heads=1)
    return max(0.0, case.excess(case.prefill(library, device=Device(1, 101376))))


def rope(library: Library) -> float:
    case = RopeCase(head_dim=80, rotary_dim=32, has_norm=True, pool_type=BF16)
    qkv, _ = case.run(library)
    return difference(qkv[:, : case.num_heads], case.wanted()[0], 3e-6)


def plain_rope(library: Library) -> float:
    case = RopeCase()
    qkv, pool = case.run(library)
    q, kv = case.wanted()
    return max(difference(qkv[:, : case.num_heads], q, 3e-6), difference(case.cells(pool), kv, 3e-6))


def product(library: Library, weight_type: int) -> float:
    weight = Weight(library, weight_type, 18, 608)
    out, wanted = linear(library, weight, quantise(library, normal(1, 9, 608)), normal(2, 18))
    return difference(out[:, :18], wanted, 2e-5)


def norm(library: Library) -> float:
    out, wanted = rms_norm(library, normal(1, 2, 320), normal(2, 2, 320), has_q8=True)
    return difference(out.f32, wanted, 3e-6)


def activation(library: Library) -> float:
    out, wanted = gated_activation(library, normal(1, 3, 128), SILU, has_q8=True)
    return difference(out.f32, wanted, 3e-6)


def greedy(library: Library) -> float:
    logits = normal(1, 2, 700)
    return float(np.abs(argmax(library, logits) - logits.argmax(1)).max())


ATTENTION_CASES: dict[str, Callable[[Library], float]] = {
    "decode": lambda library: decode(library, 64),
    "decode_80": lambda library: decode(library, 80),
    "decode_256": lambda library: decode(library, 256),
    "prefill": lambda library: prefill(library, 64),
    "prefill_256": lambda library: prefill(library, 256),
    "long_prefill": long_prefill,
}
ROW_CASES: dict[str, Callable[[Library], float]] = {
    "rope": rope,
    "plain_rope": plain_rope,
    "norm": norm,
    "activation": activation,
    "argmax": greedy,
    "q8_0": lambda library: product(library, Q8_0),
    "q4_0": lambda library: product(library, Q4_0),
    "q4_1": lambda library: product(library, Q4_1),
}
CASES = {**ATTENTION_CASES, **ROW_CASES}


def run(name: str, libraries: dict[str, Library], policy: int) -> str:
    """`name` or `name:file:line`"""
    case, _, barrier = name.partition(":")
    file, _, line = barrier.partition(":")
    library = libraries["attention" if case in ATTENTION_CASES else "rows"]
    library.configure(policy, seed=3)
    library.skip(file, int(line or 0))
    try:
        return f"error {CASES[case](library)}"
    except EmulatorError as error:
        return f"emulator {error}"
    finally:
        library.skip("", 0)


def start_again() -> None:
    """TSan reads its options once, at start."""
    os.environ["TSAN_OPTIONS"] += ":halt_on_error=1"
    os.execv(sys.executable, [sys.executable, *(a for a in sys.argv if a != "--first")])


if __name__ == "__main__":
    if "--first" in sys.argv:
        start_again()
    loaded = {"attention": attention_library(), "rows": Library(*SOURCES)}
    for asked in sys.argv[2:]:
        print(f"case {asked}", flush=True)
        print(run(asked, loaded, int(sys.argv[1])), flush=True)
    print("case end\ndone", flush=True)
