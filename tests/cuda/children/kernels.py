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

from tests.cuda.attention_case import BF16, F16, F32, Array, Case, Device, pointer, to_bits
from tests.cuda.build import EmulatorError, Library
from tests.cuda.row_cases import (
    Q4_K,
    Q5_1,
    Q6_K,
    Q8_0,
    SILU,
    SOURCES,
    PackedWeight,
    RopeCase,
    Weight,
    columns,
    embed,
    float_product,
    gated_activation,
    linear,
    normal,
    quantise,
    rms_norm,
    take_rows,
    untouched,
)
from tests.cuda.sample_cases import Draw, LogitChange, argmax, change_logits, draw, follow, wanted_token

ATTENTION = ("attention_decode.cu", "attention_prefill.cu", "attention_f32.cu")
DEFINES = ("PYSERVE_FEW_HEAD_DIMS", "PYSERVE_FEW_TYPES")
Outcome = tuple[Array, Array, float]  # found, wanted, tolerance


def attention_library() -> Library:
    return Library(*ATTENTION, defines=DEFINES)


def row_library() -> Library:
    return Library(*SOURCES, defines=DEFINES)


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


def full(library: Library) -> float:
    case = Case([71, 600], [(0, 70), (1, 590)], head_dim=80, num_heads=3, num_kv_heads=1, page_size=8, pool_type=F32)
    return max(0.0, case.excess(case.full(library)))


def rope(library: Library) -> float:
    case = RopeCase(head_dim=80, rotary_dim=32, has_norm=True, pool_type=BF16)
    qkv, _ = case.run(library)
    return difference(qkv[:, : case.num_heads], case.wanted()[0], 3e-6)


def plain_rope(library: Library) -> float:
    case = RopeCase()
    qkv, pool = case.run(library)
    q, kv = case.wanted()
    return max(difference(qkv[:, : case.num_heads], q, 3e-6), difference(case.cells(pool), kv, 3e-6))


def padding(library: Library) -> float:
    """A row of position -1 and the pool stay as they are."""
    padded, real = (RopeCase(page_size=1, rows=rows) for rows in ([(0, 0), (1, -1), (1, 33)], [(0, 0), (1, 33)]))
    qkv, pool = padded.run(library)
    if not untouched(pool, real) or (qkv[1] != padded.qkv[1]).any():
        return float("inf")
    return difference(qkv[[0, 2], : real.num_heads], real.wanted()[0], 3e-6)


def product(library: Library, weight_type: int, num_rows: int = 9, tile: int | None = None) -> float:
    """Columns to the edge of a step only; in tiles, over the edges of both sides, and more steps than slots."""
    cols = columns(weight_type, 19 if tile is None else 9)
    weight = Weight(library, weight_type, 18, cols)
    out, wanted = linear(library, weight, quantise(library, normal(1, num_rows, cols)), normal(2, 18), tile=tile)
    return difference(out[:, :18], wanted, 2e-5)


def floats(library: Library, weight_type: int, cols: int, num_rows: int = 9, tile: int | None = None) -> float:
    bits = to_bits(normal(5, 19, cols), weight_type)
    out, wanted = float_product(library, weight_type, bits, normal(6, num_rows, cols), normal(7, 19), tile=tile)
    return difference(out[:, :19], wanted, 2e-5)


def embedding(library: Library, weight_type: int) -> float:
    weight, tokens = Weight(library, weight_type, 19, columns(weight_type, 3)), [18, 0, 7]
    return difference(embed(library, weight.structure, tokens), weight.values[tokens], 1e-6)


def float_embedding(library: Library) -> float:
    table, tokens = normal(3, 5, 150), [4, 0]
    return difference(embed(library, PackedWeight(F32, 5, 150, pointer(table)), tokens), table[tokens], 0.0)


def norm(library: Library) -> float:
    out, wanted = rms_norm(library, normal(1, 2, 320), normal(2, 2, 320), has_q8=True)
    return difference(out.f32, wanted, 3e-6)


def activation(library: Library) -> float:
    out, wanted = gated_activation(library, normal(1, 3, 128), SILU, has_q8=True)
    return difference(out.f32, wanted, 3e-6)


def greedy(library: Library) -> float:
    logits = normal(1, 2, 700)
    return float(np.abs(argmax(library, logits) - logits.argmax(1)).max())


def drawn(library: Library, draws: list[Draw], vocab_size: int = 700, spread: float = 3.0) -> float:
    """0 when every row has the wanted token"""
    logits = normal(1, len(draws), vocab_size) * np.float32(spread)
    wanted = [wanted_token(row, each) for row, each in zip(logits, draws, strict=True)]
    return float(np.abs(draw(library, logits, draws) - wanted).max())


def changed(library: Library) -> float:
    """Row 0 comes after the token 7, which its last change is of."""
    logits = normal(1, 2, 40)
    penalties = 1.0, 0.25, 0.125
    changes = [
        LogitChange(0, -1, 0, 1, *penalties),
        LogitChange(0, 0, 0, 0, *penalties, False, -1),
        LogitChange(0, 7, 1.0, 1, *penalties, False, -1),
        LogitChange(1, 39, 0.5, 2, *penalties),
    ]
    wanted = logits.copy()
    wanted[0, 7] += 1.0 - 2 * 0.125 - 0.25
    wanted[1, 39] += 0.5 - 2 * 0.125 - 0.25
    return difference(change_logits(library, logits, changes, np.array([7], np.int32)), wanted, 1e-6)


def followed(library: Library) -> float:
    """Over the edge of a block, tokens known and unknown."""
    tokens = [at if at % 3 else -1 - at % 5 for at in range(130)]
    wanted = [at if at % 3 else 70 + at % 5 for at in range(130)]
    return float(follow(library, tokens, [70 + i for i in range(5)]) != wanted)


def taken(library: Library) -> float:
    x, rows = normal(4, 5, 300), [4, 0, 2]
    return difference(take_rows(library, x, rows), x[rows], 0.0)


ATTENTION_CASES: dict[str, Callable[[Library], float]] = {
    "decode": lambda library: decode(library, 64),
    "decode_80": lambda library: decode(library, 80),
    "decode_256": lambda library: decode(library, 256),
    "prefill": lambda library: prefill(library, 64),
    "prefill_256": lambda library: prefill(library, 256),
    "long_prefill": long_prefill,
    "full": full,
}
ROW_CASES: dict[str, Callable[[Library], float]] = {
    "rope": rope,
    "plain_rope": plain_rope,
    "padding": padding,
    "norm": norm,
    "activation": activation,
    "argmax": greedy,
    "draw_listed": lambda library: drawn(library, [Draw(5.0, top_k=40, top_p=0.9, min_p=0.01), Draw(top_p=0.7)]),
    "draw_everyone": lambda library: drawn(library, [Draw(top_p=0.7, seed=8)], 4500, 0.1),
    "draw_by_id": lambda library: drawn(library, [Draw(5.0, min_p=0.3, seed=4), Draw(position=5)]),
    "change_logits": changed,
    "follow": followed,
    "take_rows": taken,
    "q8_0": lambda library: product(library, Q8_0),
    "q5_1": lambda library: product(library, Q5_1),
    "q4_k": lambda library: product(library, Q4_K),
    "q6_k": lambda library: product(library, Q6_K),
    "tiled_q8_0": lambda library: product(library, Q8_0, 35, 64),
    "tiled_q5_1": lambda library: product(library, Q5_1, 35, 64),
    "tiled_q4_k": lambda library: product(library, Q4_K, 35, 64),
    "tiled_q6_k": lambda library: product(library, Q6_K, 35, 64),
    "large_tiled": lambda library: product(library, Q5_1, 35, 128),
    "f32": lambda library: floats(library, F32, 70),
    "f16": lambda library: floats(library, F16, 296),
    "bf16": lambda library: floats(library, BF16, 296),
    "tiled_f16": lambda library: floats(library, F16, 168, 35, 64),
    "tiled_bf16": lambda library: floats(library, BF16, 168, 35, 64),
    "embed_q8_0": lambda library: embedding(library, Q8_0),
    "embed_q5_1": lambda library: embedding(library, Q5_1),
    "embed_q4_k": lambda library: embedding(library, Q4_K),
    "embed_q6_k": lambda library: embedding(library, Q6_K),
    "embed_f32": float_embedding,
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
    loaded = {"attention": attention_library(), "rows": row_library()}
    for asked in sys.argv[2:]:
        print(f"case {asked}", flush=True)
        print(run(asked, loaded, int(sys.argv[1])), flush=True)
    print("case end\ndone", flush=True)
