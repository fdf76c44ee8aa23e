"""A row's logits and tokens are the same bits alone and beside others, whatever kernels their number calls for (R37).

There is nothing to switch on for it: these are the only products, attention and sampling that the CUDA backend has.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
import torch

from pyserve import ops
from pyserve.models.load import Model, load
from pyserve.ops import StepBatch
from pyserve.ops.cuda import CudaProgram
from pyserve.types import SamplingParams
from tests.cuda.conftest import IS_EMULATED, finish_torch
from tests.cuda.extension import build_extension
from tests.engine.workload import Outcome, request, run
from tools.make_tiny_model import make_gguf

NUM_SEQUENCES, PAGE_SIZE, WIDTH = 64, 16, 3
COMPANIES = (2, 9, 33, 64)  # beyond 1, 8 and 32 rows other kernels and tiles take over
PICKING = (9, 64)  # of these tokens are picked as well
PROBE = 37  # the sequence that is looked at
PAGES = torch.randperm(NUM_SEQUENCES * WIDTH, generator=torch.Generator().manual_seed(1))
TABLE = PAGES.to(torch.int32).reshape(NUM_SEQUENCES, WIDTH)
POSITIONS = [(11 * slot + 5) % 44 for slot in range(NUM_SEQUENCES)]
GREEDY, DRAWN = (0.0, 1.0, 0.0), (1.3, 0.9, 0.01)


@pytest.fixture(scope="module", params=["Q8_0", "BF16"])
def model(request: pytest.FixtureRequest, opened: ops.Device, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Of products with int8 and with bf16; those with f32 have one kernel for all numbers of rows."""
    path: Path = make_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        type=request.param, seed=3, hidden=64, heads=2, kv_heads=1, head_dim=64, intermediate=64,
    )  # fmt: skip
    return load(path, device=opened, max_tokens=64, max_samples=64, max_positions=256, num_threads=1)


@pytest.fixture
def program(model: Model) -> CudaProgram:
    assert isinstance(model.program, CudaProgram)
    return model.program


@pytest.fixture
def pool(opened: ops.Device) -> torch.Tensor:
    """What every sequence has said so far"""
    made = opened.allocate_pool(NUM_SEQUENCES * WIDTH, 2, 1, PAGE_SIZE, 64, torch.float16)
    made.copy_(torch.randn(made.shape, generator=torch.Generator().manual_seed(2)))
    finish_torch()
    return made


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def company(count: int) -> tuple[StepBatch, int]:
    """A decode step of so many sequences, and the place of PROBE among them."""
    place = count * 2 // 3
    others = [slot for slot in range(NUM_SEQUENCES) if slot != PROBE][: count - 1]
    slots = [*others[:place], PROBE, *others[place:]]
    tokens = [20 + slot for slot in slots]
    batch = StepBatch(ints(tokens), ints([POSITIONS[s] for s in slots]), ints(slots), TABLE, ints(range(count)))
    return batch, place


def run_as_graph(program: CudaProgram, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
    """Once there is a graph for it. On a GPU nothing counts: its recording is given time."""
    if not IS_EMULATED:
        program.run(batch, pool)
        time.sleep(0.2)
        return program.run(batch, pool)
    count = ctypes.CDLL(str(build_extension())).emulator_num_graph_launches
    count.restype = ctypes.c_int64
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        before = count()
        logits = program.run(batch, pool)
        if count() > before:
            return logits
        time.sleep(0.002)
    raise AssertionError(f"no graph was made: {program.graph_counts()}")


def picked(program: CudaProgram, batch: StepBatch, pool: torch.Tensor, place: int, real: tuple[float, ...]) -> int:
    """The probe's token in a step that is started; the others are drawn as well, each in another way."""
    count = len(batch.tokens)
    rows = [[1.0 + 0.1 * (i % 3), 0.8, 0.0] if real is DRAWN else [*GREEDY] for i in range(count)]
    whole = [[i % 5 * 10, i, 1] for i in range(count)]
    rows[place], whole[place] = [*real], [40, 12345, 6]
    program.start(batch, pool, torch.tensor(rows), torch.tensor(whole), torch.zeros((0, 2), dtype=torch.int64))
    return int(program.collect()[place])


@pytest.mark.parametrize("has_graphs", [False, True], ids=["launches", "graphs"])
def test_a_row_has_the_same_bits_in_any_company(program: CudaProgram, pool: torch.Tensor, has_graphs: bool) -> None:
    program.use_graphs(False)
    batch, place = company(1)
    wanted = program.run(batch, pool)[place].clone()
    tokens = [picked(program, batch, pool, place, real) for real in (GREEDY, DRAWN)]
    assert wanted.isfinite().all()
    program.use_graphs(has_graphs)
    for count in COMPANIES:
        batch, place = company(count)
        logits = run_as_graph(program, batch, pool) if has_graphs else program.run(batch, pool)
        assert torch.equal(logits[place], wanted), count
        if count in PICKING:
            assert [picked(program, batch, pool, place, real) for real in (GREEDY, DRAWN)] == tokens, count
    program.use_graphs(True)


# --- through the engine


def seen(outcome: Outcome) -> object:
    assert outcome.error is None
    assert outcome.finished is not None
    return outcome.tokens, outcome.logprobs


def test_a_chat_says_the_same_among_forty(program: CudaProgram, model: Model) -> None:
    """Alone by plain launches, in company by graphs where there are some; prompts pass through the same steps as the
    chats' decode rows.
    """
    chats = [
        request(1, 13, 4, sampling=SamplingParams(temperature=0.0, num_logprobs=2)),
        request(2, 9, 4, sampling=SamplingParams(temperature=1.2, num_logprobs=1)),
        request(3, 5, 4, sampling=SamplingParams(temperature=1.2, top_k=0)),
    ]
    settings = {"ctx_size": 40 * 32, "kv_type": "f16", "batch_size": 24}
    program.use_graphs(False)
    alone = [seen(run(model, [[chat]], parallel=1, **settings).outcomes[0]) for chat in chats]
    program.use_graphs(True)
    others = [[request(10 + number, 3 + number % 5, 3, sampling=chats[2].sampling)] for number in range(37)]
    together = run(model, [*others, *([chat] for chat in chats)], parallel=40, **settings)
    assert [seen(outcome) for outcome in together.outcomes[37:]] == alone
