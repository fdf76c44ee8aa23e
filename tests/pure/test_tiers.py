"""Which tier a park goes to (R23). Copies that never end (R20): their pages stay in transfer, their sequences go on."""

from __future__ import annotations

from pyserve.ledger import Ledger
from pyserve.plan import Limits, Park
from pyserve.sequence import Sequence, State, Tier
from pyserve.types import SamplingParams, SequenceRequest
from pyserve.view import Room
from tests.pure.pool_driver import Driver


def computed(num_tokens: int) -> Sequence:
    sequence = Sequence(0, SequenceRequest(tuple(range(num_tokens)), SamplingParams()), 0)
    sequence.num_computed = num_tokens
    return sequence


def test_memory_then_disk_then_computing_again() -> None:
    room = Room(page_size=4, ram_pages=3, disk_pages=5)
    assert room.tier_of(computed(12)) == (Tier.RAM, 3)
    assert room.tier_of(computed(13)) == (Tier.DISK, 4)
    assert room.tier_of(computed(21)) == (Tier.RECOMPUTE, 0)
    assert room.tier_of(computed(0)) == (Tier.RECOMPUTE, 0)
    room.use(Tier.RAM, computed(12))
    room.use(Tier.RECOMPUTE, computed(0))
    assert room.tier_of(computed(4)) == (Tier.DISK, 1)


def test_room_for_several_is_counted_together() -> None:
    room = Room(page_size=4, ram_pages=3, disk_pages=3)
    assert room.can_hold([computed(12), computed(12)])
    assert not room.can_hold([computed(8), computed(8), computed(8)])
    assert room.can_hold([computed(12), computed(12), computed(0)]), "nothing computed needs no room"
    assert (room.ram_pages, room.disk_pages) == (3, 3), "asking takes nothing"


def test_a_plan_parks_on_disk_what_memory_does_not_take() -> None:
    driver = Driver(Limits(num_pages=16, page_size=4, num_slots=4, runway_steps=0))
    for seed in range(4):
        driver.submit([[seed] * 14], 40)
    for _ in range(2):
        driver.iterate()
    parks: list[Park] = []
    for _ in range(12):
        plan = driver.ledger.plan(driver.now_ms, 0, 100)
        parks += plan.parks
        if parks:
            break
        driver.iterate()
    assert [park.tier for park in parks] == [Tier.DISK]
    driver.ledger.apply(plan, driver.now_ms)
    (victim,) = driver.ledger.preempting()
    assert victim.tier is Tier.DISK
    driver.ledger.park_landed(victim)
    driver.ledger.check_integrity()
    assert victim.state is State.PREEMPTED and victim.num_computed > 0


def parked_out(ledger: Ledger) -> Sequence:
    """One of two sequences, with its copy out in flight."""
    plan = ledger.plan(0.0, 100)
    ledger.apply(plan, 0.0)
    ledger.step_done(plan.rows, [1] * len(plan.rows))
    plan = ledger.apply(ledger.plan(1.0, 100), 1.0)
    return plan.parks[0].sequence


def two_chats() -> Ledger:
    ledger = Ledger(Limits(num_pages=8, page_size=4, num_slots=2, runway_steps=0, preempt_every=1))
    for id in range(2):
        ledger.submit([Sequence(id, SequenceRequest((id, 1, 2, 3, 4), SamplingParams(), 20, cache_prompt=False), id)])
    return ledger


def test_pages_of_an_overdue_park_stay_in_transfer_until_it_lands() -> None:
    ledger = two_chats()
    sequence = parked_out(ledger)
    pages = list(sequence.pages)
    before = ledger.transfer_pages
    ledger.copy_overdue(sequence, 7, 2.0)
    ledger.check_integrity()
    assert (sequence.state, sequence.tier, sequence.num_computed) == (State.PREEMPTED, Tier.RECOMPUTE, 0)
    assert ledger.transfer_pages == before and sequence.pages == []
    free = ledger.free_pages
    plan = ledger.apply(ledger.plan(3.0, 100), 3.0)
    taken = {page for restore in plan.restores for page in restore.sequence.pages}
    assert not taken & set(pages), "a page that a copy still reads was given away"
    ledger.overdue_landed(7)
    ledger.check_integrity()
    assert ledger.free_pages + sum(len(r.sequence.pages) for r in plan.restores) >= free + 1


def test_an_overdue_restore_gives_its_pages_up_and_parks_again() -> None:
    ledger = two_chats()
    sequence = parked_out(ledger)
    for each in ledger.preempting():
        ledger.park_landed(each)
    plan = ledger.apply(ledger.plan(2.0, 100), 2.0)
    assert sequence in [restore.sequence for restore in plan.restores]
    pages = list(sequence.pages)
    ledger.copy_overdue(sequence, 3, 4.0)
    ledger.check_integrity()
    assert sequence.state is State.PREEMPTED and sequence.parked_at_ms == 4.0
    plan = ledger.apply(ledger.plan(5.0, 100), 5.0)
    (again,) = [restore for restore in plan.restores if restore.sequence is sequence]
    assert again.tier is Tier.RECOMPUTE and not set(sequence.pages) & set(pages)
    ledger.overdue_landed(3)
    ledger.check_integrity()


def test_a_cancelled_sequence_leaves_its_slot_when_its_copy_is_overdue() -> None:
    ledger = two_chats()
    sequence = parked_out(ledger)
    slot = sequence.slot
    assert slot is not None
    assert not ledger.finish(sequence, 2.0)
    ledger.copy_overdue(sequence, 1, 3.0)
    ledger.check_integrity()
    assert ledger.sequence_in_slot(slot) is None
    ledger.overdue_landed(1)
    ledger.check_integrity()
