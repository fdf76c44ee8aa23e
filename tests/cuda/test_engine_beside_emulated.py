"""What the engine does beside steps that take their time on the device: copies come and go, nobody waits (R13, R15)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyserve import ops
from pyserve.engine import Engine
from pyserve.models.load import Model, load
from pyserve.types import SamplingParams
from tests.cuda.conftest import DEVICE
from tests.engine.test_copies_beside import Watch
from tests.engine.workload import SEEDED, assert_clean, request, run
from tools.make_tiny_model import make_gguf

SIZES: dict[str, Any] = {"hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 64}
LIMITS: dict[str, Any] = {"max_tokens": 64, "max_samples": 64, "max_positions": 256, "num_threads": 1}
WEIGHED = SamplingParams(temperature=0.8, repeat_penalty=1.2, logit_bias=((5, 1.0), (9, -2.0)))


@pytest.fixture(scope="module")
def model(opened: ops.Device, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Loaded as the server does it, for a pool of 256 tokens."""
    path: Path = make_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", type="Q8_0", seed=5, **SIZES)
    device = ops.open_device(DEVICE)
    shape = ops.PoolShape(num_pages=16, page_size=16, page_bytes=1 << 13, num_slots=4)
    return load(path, device=device, on_spec=lambda spec: device.expect(shape), **LIMITS)


class Steps:
    """The steps that an engine starts, and what comes too near to them."""

    def __init__(self) -> None:
        self.watch = Watch(page_size=16)
        self.ids: list[list[int]] = []  # the sequences that each samples for
        self.num_behind = 0  # that were started behind another
        self.at_start: Callable[[], None] = lambda: None

    def set(self, engine: Engine) -> None:
        self.watch.set(engine)
        runner: Any = engine._runner
        start = runner.start

        def noted(step: Any) -> None:
            self.at_start()
            self.num_behind += step.sources is not None
            self.ids.append(list(step.ids))
            start(step)

        runner.start = noted

    def num_missed(self, sequence_id: int) -> int:
        """Steps that it was not in, between its first and its last."""
        was_in = [sequence_id in ids for ids in self.ids]
        last = len(was_in) - was_in[::-1].index(True)
        return was_in[was_in.index(True) : last].count(False)


def test_a_park_whose_copies_are_quick_costs_one_step(model: Model, emulator: ctypes.CDLL) -> None:
    """Steps take hundredths of a second, copies a tenth: whoever is brought back beside a step is in the next."""
    emulator.emulator_slow_launches(700)
    emulator.emulator_slow_copies(2000)
    steps = Steps()
    chats = [request(seed, 20, 30, sampling=SEEDED) for seed in range(3)]
    settings: dict[str, Any] = {"ctx_size": 256, "parallel": 3, "kv_type": "f16", "preempt_every": 8, "batch_size": 8}
    result = run(model, [[chat] for chat in chats], prepare=steps.set, **settings)
    num_parks = [outcome.notices.count("Preempted") for outcome in result.outcomes]
    assert num_parks == [3] * 3
    assert steps.watch.num_beside > 0 and not steps.watch.faults
    num_missed = sum(steps.num_missed(sequence_id) for sequence_id in range(3))
    assert num_missed < 1.5 * sum(num_parks), "one a park, but for the odd one when the machine is busy"
    assert_clean(result)


@pytest.mark.parametrize("is_async", [True, False])
def test_forced_parks_change_no_token(model: Model, is_async: bool) -> None:
    chats = [request(seed, 9 + 20 * seed, 20, sampling=SEEDED) for seed in range(2)]
    settings: dict[str, Any] = {
        "ctx_size": 256,
        "parallel": 2,
        "kv_type": "f16",
        "batch_size": 32,
        "verify_parks": "all",
    }
    wanted, parked = (
        run(model, [[chat] for chat in chats], preempt_every=every, preempt_async=is_async, **settings)
        for every in (0, 4)
    )
    assert [outcome.tokens for outcome in parked.outcomes] == [outcome.tokens for outcome in wanted.outcomes]
    assert all(len(outcome.tokens) == 20 for outcome in parked.outcomes)
    assert wanted.preempts == 0 and parked.preempts == parked.resumes >= 8
    assert parked.counters.hash_mismatches == parked.counters.copies_failed == 0


def test_steps_and_parks_make_no_thread_wait(model: Model, emulator: ctypes.CDLL) -> None:
    """From the second step on, through prompts and decode steps, tokens picked in every way, a full pool, its parks
    and restores: no thread waits for the device, and no copy goes through memory that is not pinned.
    """
    emulator.emulator_num_blocking_copies.restype = ctypes.c_int64
    steps, seen = Steps(), []
    steps.at_start = lambda: seen.append((emulator.emulator_num_waits(), emulator.emulator_num_blocking_copies()))
    samplings = (SamplingParams(temperature=0.0), SEEDED, WEIGHED, SamplingParams(temperature=0.7, top_k=20))
    chats = [request(seed, 14 + 7 * seed, 30, sampling=sampling) for seed, sampling in enumerate(samplings)]
    settings: dict[str, Any] = {"ctx_size": 128, "parallel": 4, "kv_type": "f16", "verify_parks": "all"}
    together = run(model, [[chat] for chat in chats], prepare=steps.set, **settings)
    assert together.preempts == together.resumes > 0
    assert together.counters.parked_bytes > 0
    assert len(seen) > 40
    assert seen[1] == seen[-1]
    assert steps.num_behind > 20, "steps are started before the tokens of the step before are delivered"
    assert not steps.watch.faults
    assert_clean(together)
