"""Mistakes planted in the kernels' own sources: a case of the sanitizers' list must notice each of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.cuda.build import BUILD, CSRC, PRIORITIES, REVERSE, Library, build_emulated, run_child
from tests.cuda.children.kernels import ATTENTION, ATTENTION_CASES, DEFINES, run
from tests.cuda.row_cases import SOURCES

CHILD = Path(__file__).parent / "children" / "kernels.py"

WRONG = {  # what it does: file, text, what stands there instead, the case that must notice
    "the wrong high bits": ("embed.cu", ">> 2 * word & 3", ">> word & 3", "embed_q6_k"),
    "the wrong half of the nibbles": ("pack.cu", "quarter < 2 ?", "quarter < 1 ?", "embed_q6_k"),
    "columns added twice": ("linear_float.cu", "column += 32", "column += 31", "f32"),
    "columns dealt wrongly": ("linear_half.cu", "column) + step", "column) + 1 - step", "bf16"),
    "a chunk used before it landed": (
        "linear_half_tiled.cu", "cp_async_wait<kAhead - 1>", "cp_async_wait<kAhead>", "tiled_bf16",
    ),
    "rows of a tile mixed up": ("linear_half_tiled.cu", "group + 8 * r)", "group + 7 * r)", "tiled_f16"),
    "scales of the wrong block": ("linear_tiled.cu", "item % 2 * S::rows + item / 2", "item / 2", "tiled_q8_0"),
    "a span that is never ended": ("linear_tiled.cu", "sums.after_step(span, at + 1, count)", "span", "tiled_q8_0"),
    "no temperature": ("draw.cu", "Weigh::tempered, turn", "Weigh::probability, turn", "draw_listed"),
    "the floor of min_p forgotten": ("draw.cu", "|| row.logits[id] < floor", "", "draw_by_id"),
    "padding written": ("kv_write.cu", "num_rows || a.rows.positions[row] < 0)", "num_rows)", "padding"),
    "the token before forgotten": ("sample.cu", "change.count += 1.f", "change.count += 0.f", "change_logits"),
    "presence added": ("sample.cu", ")), change.presence", ")), -change.presence", "change_logits"),
    "heads of a group mixed up": (
        "attention_decode.cu", "(heads.first + head) * D + word", "heads.first * D + word", "decode",
    ),
    "a unit of another worker's forgotten": (
        "attention_decode.cu", "place < end; ++place", "place < end - 1; ++place", "decode",
    ),
    "a prompt's key behind the row's own": (
        "attention_prefill.cu", "[queries.row(query)] : -1", "[queries.row(query)] + 1 : -1", "prefill",
    ),
    "a prompt's groups forgotten": (
        "attention_prefill.cu", "total.is_begun ? values[0]", "false ? values[0]", "long_prefill",
    ),
    "a key behind the row's own": ("attention_f32.cu", "position > seen.last)", "position > seen.last + 1)", "full"),
}  # fmt: skip
OUT_OF_BOUNDS = {
    "a column too many": (
        "embed.cu", "column < cols; column += kThreads) to[column] = __fmul_rn(value_at",
        "column <= cols; column += kThreads) to[column] = __fmul_rn(value_at", "embed_q8_0",
    ),
    "rows that are not there": ("linear_float.cu", "if (first + m < num_rows) sums[m]", "sums[m]", "f32"),
}  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, file: str, text: str, instead: str) -> None:
    source = (CSRC / file).read_text()
    assert source.count(text) == 1, f"{text!r} is not once in {file}"
    folder = BUILD / "planted" / hashlib.sha256(f"{file} {text} {instead}".encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(source.replace(text, instead))
    monkeypatch.setenv("PYSERVE_PLANTED_SOURCES", str(folder))


@pytest.mark.parametrize(("file", "text", "instead", "case"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_result_is_noticed(
    monkeypatch: pytest.MonkeyPatch, file: str, text: str, instead: str, case: str
) -> None:
    plant(monkeypatch, file, text, instead)
    kind, sources = ("attention", ATTENTION) if case in ATTENTION_CASES else ("rows", SOURCES)
    library = Library(*sources, defines=DEFINES)
    assert any(run(case, {kind: library}, policy) != "error 0.0" for policy in (REVERSE, PRIORITIES))


@pytest.mark.parametrize(("file", "text", "instead", "case"), OUT_OF_BOUNDS.values(), ids=OUT_OF_BOUNDS.keys())
def test_an_access_out_of_bounds_is_noticed(
    monkeypatch: pytest.MonkeyPatch, file: str, text: str, instead: str, case: str
) -> None:
    build_emulated(*ATTENTION, sanitizer="asan", defines=DEFINES)
    plant(monkeypatch, file, text, instead)
    build_emulated(*SOURCES, sanitizer="asan", defines=DEFINES)
    result = run_child("asan", CHILD, str(REVERSE), case)
    assert result.code != 0
    assert "heap-buffer-overflow" in result.output
