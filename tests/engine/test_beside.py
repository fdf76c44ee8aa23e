"""What a park costs in steps, on a clock that ticks in steps: copies land as many steps after they were posted as the
test says; with none, every step takes until the engine has nothing left to do beside it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pyserve.engine import Engine
from pyserve.models.load import Model
from tests.engine.faults import GatedStream
from tests.engine.workload import SEEDED, alone, assert_clean, request, run


class Pace:
    """Lets copies through when `copy_steps` steps have been started since they were posted, and notes every step."""

    def __init__(self, copy_steps: int) -> None:
        self.copy_steps = copy_steps
        self.stream = GatedStream()
        self.num_steps_held = 0
        self.steps: list[list[int]] = []  # the sequences of each
        self.give_up_s = time.process_time() + 20  # one that takes no note of copies while a step runs would wait
        self.num_alone = 0  # steps that were not started behind another

    def set(self, engine: Engine) -> None:
        runner: Any = engine._runner
        num_done, start, finish_step = runner.num_done, runner.start, engine._finish_step
        is_waited_for = False

        async def noted_finish_step(begun: Any) -> None:
            nonlocal is_waited_for
            is_waited_for = not begun.done.done()
            await finish_step(begun)

        def num_done_after_copies() -> int:
            """Whoever gets a 0 asks again, for the descriptor stays readable."""
            nonlocal is_waited_for
            if self.copy_steps:
                return 0 if self.stream.real.num_outstanding() else num_done()
            is_due = engine._parking.is_busy and time.process_time() < self.give_up_s
            if is_due or not is_waited_for:
                return 0
            is_waited_for = False
            return len(os.read(runner.fileno(), 1))

        def noted(step: Any) -> None:
            self.steps.append(step.ids)
            self.num_alone += step.sources is None
            self.num_steps_held += bool(self.stream.held)
            if self.num_steps_held == self.copy_steps:
                self.num_steps_held = 0
                self.stream.let_through()
            start(step)

        runner.num_done, runner.start = num_done_after_copies, noted
        engine._finish_step = noted_finish_step  # type: ignore[method-assign]
        if self.copy_steps:
            engine._parking.tiers.stream.close()
            engine._parking.tiers.stream = self.stream  # type: ignore[assignment]

    def missed(self) -> Counter[int]:
        """By sequence: the steps that it was not in, between its first and its last."""
        counts: Counter[int] = Counter()
        for id in {id for step in self.steps for id in step}:
            was_in = [id in step for step in self.steps]
            last = len(was_in) - was_in[::-1].index(True)
            counts[id] = was_in[was_in.index(True) : last].count(False)
        return counts


def test_a_park_whose_copies_are_quick_costs_one_step(tiny_model: Model) -> None:
    """The one that runs while they are made, though it was parked and brought back in it (R12b)."""
    pace = Pace(copy_steps=0)
    chats = [request(seed, 20, 60, sampling=SEEDED) for seed in range(4)]
    result = run(
        tiny_model,
        [[chat] for chat in chats],
        ctx_size=512,
        parallel=4,
        batch_size=8,
        preempt_every=8,
        prepare=pace.set,
    )
    num_parks = [outcome.notices.count("Preempted") for outcome in result.outcomes]
    assert num_parks == [7] * 4
    assert max(pace.missed().values()) <= 7
    assert pace.num_alone <= 4 * 20 // 8 + 4  # those with prompts: neither parks nor restores stop the looking ahead
    assert [outcome.tokens for outcome in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    assert_clean(result)


def test_a_park_whose_copies_are_slow_costs_them_and_three_steps(tiny_model: Model) -> None:
    """Meanwhile the others' steps start one behind the other."""
    pace = Pace(copy_steps=10)
    chats = [request(1, 10, 120), request(2, 250, 70)]  # parked at different times, and once each
    result = run(
        tiny_model, [[chat] for chat in chats], ctx_size=512, parallel=2, batch_size=8, preempt_every=64,
        prepare=pace.set,
    )  # fmt: skip
    assert [outcome.notices for outcome in result.outcomes] == [["Preempted", "Resumed"]] * 2
    assert max(pace.missed().values()) <= 2 * 10 + 3
    num_prompt_steps = (10 + 250) // 8 + 1
    assert pace.num_alone <= num_prompt_steps + 2 * 5
    assert [outcome.tokens for outcome in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    assert_clean(result)


@pytest.mark.parametrize("preempt_every", [0, 8])
def test_who_wants_log_probabilities_comes_back_to_chats_that_do_not(tiny_model: Model, preempt_every: int) -> None:
    """A step with it takes another way than those that can be started behind one that runs (R36)."""
    chats = [
        request(seed, 40, 60, sampling=replace(SEEDED, num_logprobs=2 if seed == 1 else None)) for seed in range(4)
    ]
    for _ in range(3):
        result = run(
            tiny_model, [[chat] for chat in chats], ctx_size=512 if preempt_every else 256, parallel=4, page_size=4,
            preempt_every=preempt_every,
        )  # fmt: skip
        assert result.preempts > 0
        for chat, outcome in zip(chats, result.outcomes, strict=True):
            (wanted,) = run(tiny_model, [[chat]], ctx_size=512, parallel=1).outcomes
            assert outcome.error is None
            assert (outcome.tokens, outcome.logprobs) == (wanted.tokens, wanted.logprobs)
        assert_clean(result)
