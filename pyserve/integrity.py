"""What must be true of a ledger between any two of its calls (R12): pages, sequences, slots and debts add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as List

from pyserve.sequence import Sequence, State
from pyserve.view import View


def check(view: View, slots: List[Sequence | None], filling: Mapping[int, int]) -> None:
    """Raises AssertionError naming the first thing that is wrong. `filling`: the ids that a copy is restoring."""
    view.pool.check_integrity()
    view.cache.check_integrity()
    _check_places(view)
    _check_pages(view, filling)
    _check_filling(view, filling)
    for sequence in [*view.live.values(), *view.departing.values()]:
        _check_sequence(sequence, view.limits.page_size, slots)
    is_current = all((each.debt, each.entry_debt) == view.debts_of(each) for each in view.running.values())
    assert is_current, "a debt is out of date"
    assert view.debt == sum(each.debt for each in view.running.values()), "the debts do not add up"
    assert view.entry_debt == sum(each.entry_debt for each in view.running.values()), "entry debts do not add up"
    decoding = {id for id, each in view.running.items() if each.num_pending == 1}
    assert decoding == view.decoding.by_id.keys(), "decoding is out of date"
    listed = [each.id for each in view.decoding.sequences]
    assert listed == [*view.decoding.by_id], "the list of those who decode is out of date"
    short = {id for id, each in view.running.items() if view.is_short(each) and id not in view.oversized}
    assert short == view.short.keys(), "short is out of date"
    due = {id for id, each in view.running.items() if len(each.tokens) >= view.forced_len(each)}
    forced = due if view.forces_parks else set()
    assert forced == view.forced.keys(), "forced is out of date"
    for each in slots:
        assert each is None or each.id in view.live or each.id in view.departing, f"{each} has left and keeps its slot"
    num_occupied = sum(each is not None for each in slots)
    assert num_occupied + len(view.free_slots) == view.limits.num_slots, "a slot is lost"


def _check_places(view: View) -> None:
    places = [view.running, view.preempting, view.parked, view.restoring, {each.id: each for each in view.waiting}]
    placed = Counter(id for place in places for id in place)
    assert placed == Counter(view.live.keys()), "a sequence is lost or in two places"


def _check_pages(view: View, filling: Mapping[int, int]) -> None:
    holders: Counter[int] = Counter()
    readers: Counter[int] = Counter()
    for sequence in [*view.live.values(), *view.departing.values()]:
        assert len(set(sequence.pages)) == len(sequence.pages), f"{sequence} has a page twice"
        is_leaving = sequence.id in view.preempting or sequence.id in view.departing.keys() - filling.keys()
        (readers if is_leaving else holders).update(sequence.pages)
    for pages in view.overdue.values():
        readers.update(pages)
    pool = view.pool
    for page in range(pool.num_pages):
        assert pool.holders[page] == holders[page], f"page {page}: wrong number of holders"
        assert pool.readers[page] == readers[page], f"page {page}: wrong number of readers"
        assert holders[page] < 2 or pool.is_cached[page], f"page {page} has two owners"
    total = pool.num_free + pool.num_held + pool.num_cached + pool.num_leaving
    assert total == pool.num_pages, f"free + held + cached + in transfer = {total}"


def _check_filling(view: View, filling: Mapping[int, int]) -> None:
    restores = [view.restoring.get(id) or view.departing[id] for id in filling]
    filled = {page for each in restores for page in each.pages[len(each.pages) - filling[each.id] :]}
    known = view.cache.filling_pages()
    assert known <= filled, f"no copy fills the pages {known - filled}"
    for sequence in view.running.values():
        assert not known.intersection(sequence.pages), f"{sequence} runs on pages that are not filled"


def _check_sequence(sequence: Sequence, page_size: int, slots: List[Sequence | None]) -> None:
    state = sequence.state
    num_computed_pages = -(-sequence.num_computed // page_size)
    if state in (State.WAITING, State.PREEMPTED):
        assert not sequence.pages and not sequence.debt, f"{sequence} has pages"
    else:
        assert len(sequence.pages) >= num_computed_pages, f"{sequence} lacks pages"
    if state is State.PREEMPTING:
        assert len(sequence.pages) == num_computed_pages, f"{sequence} copies unwritten pages"
    if state is State.WAITING:
        assert sequence.slot is None, f"{sequence} has a slot"
    else:
        assert sequence.slot is not None and slots[sequence.slot] is sequence, f"{sequence} lost its slot"
