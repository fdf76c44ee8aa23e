"""Sequences that come back together: one copies what they have in common into the pool, the others take its pages and
wait for it. Whatever becomes of that copy, each goes on as it would have alone (R11, R12a, R20, R23b).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pyserve.copy_watch import wait_any
from pyserve.engine import Engine
from pyserve.kv_store import KvStore
from pyserve.models.load import Model
from pyserve.ops import CopyStream
from pyserve.park import Ending, Landed, Parking
from pyserve.plan import Plan, Rows
from pyserve.sequence import Sequence, Tier
from pyserve.types import SamplingParams, SequenceRequest
from tests.engine.faults import FailedEvent, FaultyStream, GatedStream
from tests.engine.parked import (
    content,
    finish,
    flip,
    park,
    sequence_of,
    small_store,
)
from tests.engine.workload import alone, assert_clean, ignore_speed, request, run

MIB = 1 << 20
PAGES, MORE_PAGES = [0, 1, 2, 10], [0, 1, 2, 20, 21]  # of two sequences: the first three are common
BACK, MORE_BACK = [5, 6, 7, 8], [5, 6, 7, 11, 12]


def both_parked(stream: object, **options: object) -> tuple[KvStore, Parking, Sequence, Sequence]:
    kv = small_store()
    parking = Parking(kv, **{"budget_bytes": MIB, "stream": stream, "verify": "all", **options})  # type: ignore[arg-type]
    first, second = sequence_of(14, id=1), sequence_of(18, id=2)
    assert park(parking, first, PAGES).ending is Ending.DONE
    assert park(parking, second, MORE_PAGES).ending is Ending.DONE
    return kv, parking, first, second


def restore_both(parking: Parking, first: Sequence, second: Sequence) -> None:
    assert parking.restore(first, BACK, cached_pages=0)
    assert parking.restore(second, MORE_BACK, cached_pages=3)


def landed(parking: Parking, count: int) -> list[Landed]:
    endings: list[Landed] = []
    while len(endings) < count:
        wait_any(parking, 1.0)
        endings += parking.landed()
    return endings


def test_the_second_copies_its_own_and_lands_after_the_first() -> None:
    stream = GatedStream()
    stream.is_open = True
    kv, parking, first, second = both_parked(stream)
    wanted, more_wanted = content(kv, PAGES), content(kv, MORE_PAGES)
    kv.tensor.view(torch.uint8)[:] = 0xEE
    stream.is_open = False
    restore_both(parking, first, second)
    own = stream.held.pop()
    own.begin()
    while not own.query():
        pass
    assert parking.landed() == [], "its own copy is done, what it shares is not there"
    stream.open()
    endings = landed(parking, 2)
    assert [(each.sequence, each.ending) for each in endings] == [(first, Ending.DONE), (second, Ending.DONE)]
    assert [each.num_bytes // kv.page_bytes for each in endings] == [4, 2]
    assert torch.equal(content(kv, BACK), wanted) and torch.equal(content(kv, MORE_BACK), more_wanted)
    finish(parking)


def test_one_with_nothing_of_its_own_waits_all_the_same() -> None:
    stream = GatedStream()
    stream.is_open = True
    _, parking, first, _ = both_parked(stream)
    third = sequence_of(12, id=3)
    park(parking, third, PAGES[:3])
    stream.is_open = False
    assert parking.restore(first, BACK, cached_pages=0)
    assert parking.restore(third, BACK[:3], cached_pages=3), "it is not resident yet"
    assert parking.landed() == []
    stream.open()
    assert [each.sequence for each in landed(parking, 2)] == [first, third]
    finish(parking)


@pytest.mark.parametrize("fault", ["fail", "refuse", "flip"])
def test_when_the_first_fails_the_second_is_called_off_and_comes_back_alone(fault: str) -> None:
    num_restored = 0

    def first_restore(number: int, to_host: bool) -> str | None:
        nonlocal num_restored
        num_restored += not to_host
        return fault if not to_host and num_restored == 1 else None

    kv, parking, first, second = both_parked(FaultyStream(first_restore))
    wanted = content(kv, MORE_PAGES)
    restore_both(parking, first, second)
    endings = landed(parking, 2)
    assert [each.sequence for each in endings] == [first, second]
    assert endings[0].ending is (Ending.MISMATCH if fault == "flip" else Ending.FAILED)
    assert endings[1].ending is Ending.CALLED_OFF and "that of sequence 1" in endings[1].error
    assert parking.parked_bytes(second) == len(MORE_PAGES) * kv.page_bytes
    assert parking.restore(second, MORE_BACK, cached_pages=0)
    assert [each.ending for each in landed(parking, 1)] == [Ending.DONE]
    assert torch.equal(content(kv, MORE_BACK), wanted)
    finish(parking)


@pytest.mark.parametrize(("page", "ending"), [(1, Ending.FAILED), (3, Ending.CALLED_OFF)])
def test_the_second_fails_only_if_the_fault_is_in_what_both_have_parked_together(page: int, ending: Ending) -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=MIB, verify="all")
    first, second = sequence_of(14, id=1), sequence_of(18, id=2)
    for sequence, pages in ((first, PAGES), (second, MORE_PAGES)):
        parking.park(sequence, pages, chain=("a", "b", "c"), num_common=3)
        assert [each.ending for each in landed(parking, 1)] == [Ending.DONE]
    state = parking._parked[first.id]
    place, number = (state.shares[0].block, page) if page < 3 else (state, page - 3)
    assert place.host is not None
    ((extent, _),) = place.host.stretches(number, number + 1)
    extent.slab.data[extent.first * kv.page_bytes + 17] ^= 4
    restore_both(parking, first, second)
    assert [each.ending for each in landed(parking, 2)] == [Ending.MISMATCH, ending]
    finish(parking)


def test_a_state_that_is_not_there_calls_off_those_who_wait_for_it() -> None:
    _, parking, first, second = both_parked(CopyStream())
    parking.discard([first])
    restore_both(parking, first, second)
    assert [each.ending for each in landed(parking, 2)] == [Ending.FAILED, Ending.CALLED_OFF]
    finish(parking)


def test_when_the_second_fails_the_first_is_none_the_worse() -> None:
    kv, parking, first, second = both_parked(CopyStream())
    wanted = content(kv, PAGES)
    flip(parking, second.id, 4)
    restore_both(parking, first, second)
    assert [each.ending for each in landed(parking, 2)] == [Ending.DONE, Ending.MISMATCH]
    assert torch.equal(content(kv, BACK), wanted)
    finish(parking)


def test_when_the_first_ends_meanwhile_its_copy_goes_on_for_the_second() -> None:
    stream = GatedStream()
    stream.is_open = True
    kv, parking, first, second = both_parked(stream)
    more_wanted = content(kv, MORE_PAGES)
    stream.is_open = False
    restore_both(parking, first, second)
    parking.discard([first])
    stream.open()
    assert [each.ending for each in landed(parking, 2)] == [Ending.DONE, Ending.DONE]
    assert torch.equal(content(kv, MORE_BACK), more_wanted)
    finish(parking)


def test_when_the_first_is_overdue_the_second_fails() -> None:
    num_restored = 0

    def first_restore(number: int, to_host: bool) -> str | None:
        nonlocal num_restored
        num_restored += not to_host
        return "hang" if not to_host and num_restored == 1 else None

    stream = FaultyStream(first_restore)
    _, parking, first, second = both_parked(stream)
    parking.deadline_s = 0.02
    restore_both(parking, first, second)
    assert landed(parking, 2)[0].ending is Ending.OVERDUE
    assert not parking.is_busy and parking.has_overdue
    stream.release()
    late = [each for each in landed(parking, 1) if each.sequence is first]
    assert [each.ending for each in late] == [Ending.LATE]
    finish(parking)


def test_closing_waits_for_both() -> None:
    _, parking, first, second = both_parked(CopyStream())
    parking.tiers.stream.pause()
    restore_both(parking, first, second)
    parking.tiers.stream.resume()
    parking.close()
    assert parking.held_bytes == 0


# The engine


def group_of(count: int, prompt_len: int) -> list[SequenceRequest]:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(count)]
    prompt = request(7, prompt_len, 1).prompt
    return [SequenceRequest(prompt, each, max_tokens=40) for each in params]


def together(counts: list[bool], fault: Callable[[int, bool], str | None] | None = None) -> Callable[[Engine], None]:
    """All are parked at once, every few tokens, and others want the room of cached prompts. `counts`: for each restore,
    whether it shares pages that another one fills.
    """

    def prepare(engine: Engine) -> None:
        ignore_speed(engine)
        ledger, parking = engine._ledger, engine._parking
        plan, may_repeat, restore = ledger.plan, ledger.may_repeat, parking.restore

        def make_due() -> None:
            if ledger.cached_pages:
                ledger._view.cache.evict(ledger.cached_pages)
            running = ledger.running()
            is_due = all(each.num_generated >= 6 * (each.num_parks + 1) for each in running)
            is_due = is_due and len(running) == len(ledger.live())
            for each in running:
                each.num_forced_parks = -1 if is_due else 1 << 30
            ledger._view.forced = {each.id: each for each in running} if is_due else {}

        def plan_parks(*args: Any) -> Plan:
            while ledger.preempting() and not ledger.running():
                engine._transfers.collect()
            make_due()
            return plan(*args)

        def may_repeat_unparked(rows: Rows, now_ms: float) -> bool:
            make_due()
            return may_repeat(rows, now_ms)

        def counted(sequence: Sequence, pages: list[int], *, cached_pages: int) -> bool:
            is_copied = restore(sequence, pages, cached_pages=cached_pages)
            counts.append(is_copied and bool(parking._copies[sequence.id].behind))
            return is_copied

        ledger.plan = plan_parks  # type: ignore[method-assign]
        ledger.may_repeat = may_repeat_unparked  # type: ignore[method-assign]
        parking.restore = counted  # type: ignore[method-assign]
        if fault is not None and parking.disk is not None:
            read = parking.disk.read
            parking.disk.read = lambda *args: FailedEvent(read(*args)) if fault(0, False) else read(*args)  # type: ignore
        elif fault is not None:
            parking.tiers.stream.close()
            parking.tiers.stream = FaultyStream(fault)  # type: ignore[assignment]

    return prepare


@pytest.mark.parametrize("preempt_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_four_answers_to_one_prompt_are_what_each_would_be_alone(
    tiny_model: Model, page_size: int, preempt_async: bool
) -> None:
    group = group_of(4, 70)
    sharing: list[bool] = []
    result = run(
        tiny_model, [group], prepare=together(sharing), ctx_size=320 if page_size < 64 else 512, parallel=4,
        page_size=page_size, preempt_every=1, preempt_async=preempt_async, verify_parks="all",
    )  # fmt: skip
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, each) for each in group]
    assert sum(sharing) >= 6, "they came back one by one"
    assert all(o.notices == ["Preempted", "Resumed"] * (len(o.notices) // 2) for o in result.outcomes)
    assert_clean(result)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("tier", [Tier.RAM, Tier.DISK])
@pytest.mark.parametrize("seed", range(2))
def test_faults_change_no_bytes(tiny_model: Model, tmp_path: Path, page_size: int, tier: Tier, seed: int) -> None:
    dice = random.Random(seed)
    group = group_of(4, 70)
    stranger = replace(request(3, 20, 40), sampling=SamplingParams(temperature=1.0, seed=9))
    sharing: list[bool] = []
    prepare = together(
        sharing, lambda number, to_host: dice.choice([None, None, "fail", "refuse", "flip"]) if not to_host else None
    )
    where = {"preempt_disk": str(tmp_path)} if tier is Tier.DISK else {}

    def on_tier(engine: Engine) -> None:
        prepare(engine)
        if tier is Tier.DISK:
            engine._parking.arena.budget_bytes = 0

    result = run(
        tiny_model, [group, [stranger]], prepare=on_tier, ctx_size=256, parallel=5, page_size=page_size,
        preempt_every=1, verify_parks="all", **where,
    )  # fmt: skip
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, each) for each in (*group, stranger)]
    assert all(o.notices == ["Preempted", "Resumed"] * (len(o.notices) // 2) for o in result.outcomes)
    assert sum(sharing) > 0
    assert_clean(result)
