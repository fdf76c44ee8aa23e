"""Parking under anything: random parks, restores, moves, ends and faults, on budgets that do not suffice. What comes
back is what went, no byte of anyone else's page changes, and in the end nothing is held (R12, R20, R22, R23).
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pyserve.disk_tier import DiskTier
from pyserve.engine import Engine
from pyserve.models.load import Model
from pyserve.park import Ending, Parking
from pyserve.rates import Rates
from pyserve.sequence import Sequence, Tier
from tests.engine.faults import FaultyStream
from tests.engine.parked import PAGE_SIZE, sequence_of, small_store
from tests.engine.workload import GREEDY, SEEDED, alone, assert_clean, four_chats, request, run

NUM_PAGES = 96


class World:
    """A pool that is given out page by page, and sequences that are resident, parked, on their way, or lost."""

    def __init__(self, parking: Parking, stream: FaultyStream, source: random.Random) -> None:
        self.parking = parking
        self.stream = stream
        self.source = source
        self.bits = parking._kv.tensor.view(torch.uint8).reshape(NUM_PAGES, -1)
        self.free = list(range(NUM_PAGES))
        self.pages: dict[Sequence, list[int]] = {}  # of residents, and of those on their way
        self.wanted: dict[Sequence, torch.Tensor] = {}  # what the pages must hold
        self.parked: set[Sequence] = set()
        self.out: set[Sequence] = set()
        self.back: set[Sequence] = set()
        self.overdue: dict[int, list[int]] = {}
        self.num_done = 0
        self.next_id = 0

    @property
    def residents(self) -> list[Sequence]:
        return [each for each in self.pages if each not in self.out and each not in self.back]

    def take(self, count: int) -> list[int]:
        self.source.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def fill(self, page: int) -> None:
        self.bits[page] = torch.randint(0, 256, (self.bits.shape[1],), dtype=torch.uint8)

    def begin(self) -> None:
        count = self.source.randrange(1, 9)
        if count > len(self.free):
            return
        sequence = sequence_of(count * PAGE_SIZE - self.source.randrange(PAGE_SIZE), id=self.next_id)
        self.next_id += 1
        self.pages[sequence] = self.take(count)
        for page in self.pages[sequence]:
            self.fill(page)

    def grow(self) -> None:
        """A resident writes into its last page, and perhaps into one more."""
        if not self.residents or not self.free:
            return
        sequence = self.source.choice(self.residents)
        sequence.num_computed += self.source.randrange(1, PAGE_SIZE + 1)
        written = [self.pages[sequence][-1]] if (sequence.num_computed - 1) % PAGE_SIZE else []
        if -(-sequence.num_computed // PAGE_SIZE) > len(self.pages[sequence]):
            self.pages[sequence] += self.take(1)
            written = self.pages[sequence][-1:]
        for page in written:
            self.fill(page)

    def park(self) -> None:
        if self.residents:
            sequence = self.source.choice(self.residents)
            tier = Tier.DISK if self.source.random() < 0.3 else Tier.RAM
            pages = self.pages[sequence]
            self.wanted[sequence] = self.bits[pages].clone()
            self.out.add(sequence)
            self.parking.park(sequence, list(pages), tier)

    def restore(self) -> None:
        fitting = [each for each in self.parked if len(self.wanted[each]) <= len(self.free)]
        if fitting:
            sequence = self.source.choice(sorted(fitting, key=lambda each: each.id))
            self.parked.remove(sequence)
            self.pages[sequence] = self.take(len(self.wanted[sequence]))
            self.back.add(sequence)
            assert self.parking.restore(sequence, list(self.pages[sequence]), cached_pages=0)

    def move(self) -> None:
        in_memory = [each for each in self.parked if self.parking.can_move(each)]
        if in_memory and not self.parking._moves:
            self.parking.move_to_disk(min(in_memory, key=lambda each: each.id))

    def end(self) -> None:
        everybody = sorted([*self.residents, *self.parked, *self.out, *self.back], key=lambda each: each.id)
        if not everybody:
            return
        sequence = self.source.choice(everybody)
        self.parking.discard([sequence])
        self.parked.discard(sequence)
        if sequence not in self.out and sequence not in self.back:
            self.free += self.pages.pop(sequence, [])
        self.wanted.pop(sequence, None)

    def land(self) -> None:
        for landed in self.parking.landed():
            sequence = landed.sequence
            assert landed.ending is not Ending.MISMATCH, "parked state was overwritten"
            if landed.ending is Ending.LATE:
                self.free += self.overdue.pop(landed.copy_id)
                continue
            if landed.ending is Ending.MOVED:
                continue
            (self.back if landed.is_restore else self.out).remove(sequence)
            pages = self.pages.pop(sequence)
            if landed.ending is Ending.OVERDUE:
                self.overdue[landed.copy_id] = pages
            elif landed.ending is Ending.DONE and landed.is_restore and sequence in self.wanted:
                assert torch.equal(self.bits[pages], self.wanted.pop(sequence)), f"{sequence} came back changed"
                self.pages[sequence] = pages
                self.num_done += 1
            else:
                self.free += pages
            if landed.ending is Ending.DONE and not landed.is_restore and sequence in self.wanted:
                self.parked.add(sequence)
            elif landed.ending is not Ending.DONE:
                self.wanted.pop(sequence, None)
        for page in self.source.sample(self.free, min(3, len(self.free))):
            self.fill(page)  # somebody else's now: a copy that still reads or writes it is found out

    def check(self) -> None:
        given = [page for pages in (*self.pages.values(), *self.overdue.values()) for page in pages]
        assert sorted([*given, *self.free]) == list(range(NUM_PAGES)), "a page is lost or has two owners"
        assert self.parking.held_bytes <= self.parking.arena.budget_bytes


@contextmanager
def world_of(seed: int, directory: Path) -> Iterator[World]:
    source = random.Random(seed)
    kinds = [None] * 8 + ["refuse", "fail", "query", "hang"]
    stream = FaultyStream(lambda number, to_host: source.choice(kinds))
    kv = small_store(NUM_PAGES)
    budget_pages = source.choice([12, 40, 1000])
    limit_bytes = source.choice([6, 30, 1000]) * kv.page_bytes
    disk = DiskTier(directory, limit_bytes=limit_bytes, pool=kv.tensor, stream=stream.real)
    parking = Parking(
        kv,
        budget_bytes=budget_pages * kv.page_bytes,
        stream=stream,  # type: ignore[arg-type]
        disk=disk,
        verify="all",
        deadline_s=0.02,
    )
    try:
        yield World(parking, stream, source)
    finally:
        parking.close()


@pytest.mark.parametrize("seed", range(8))
def test_what_comes_back_is_what_went(seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory, world_of(seed, Path(directory)) as world:
        actions = [world.begin] * 3 + [world.grow] * 3 + [world.park] * 4 + [world.restore] * 4
        actions += [world.move, world.end, world.stream.release]
        for number in range(20_000):  # on a busy machine good copies miss their deadline, too, and few come back
            if number >= 600 and world.num_done > 10:
                break
            world.source.choice(actions)()
            world.land()
            world.check()
            if number % 50 == 0:
                time.sleep(0.025)  # past the deadline of what hangs
        assert world.num_done > 10
        world.stream.fault = lambda number, to_host: None
        world.stream.release()
        while world.parking.is_busy or world.parking.has_overdue:
            world.land()
        while world.residents or world.parked:
            world.end()
        world.parking.rest()
        assert (world.parking.held_bytes, world.parking.disk_bytes) == (0, 0)
        assert len(world.free) == NUM_PAGES
    assert not Path(directory).exists()


class Moody(Rates):
    """Tiers become slow and quick again from one plan to the next."""

    def slow_tiers(self, now_s: float) -> frozenset[Tier]:
        return frozenset(tier for tier in (Tier.RAM, Tier.DISK) if random.random() < 0.2)


@pytest.mark.parametrize("preempt_async", [True, False], ids=["async", "sync"])
def test_tiers_that_become_slow_change_nothing_but_the_way_back(
    tiny_model: Model, tmp_path: Path, preempt_async: bool
) -> None:
    chats = four_chats(SEEDED)

    def prepare(engine: Engine) -> None:
        engine._parking.arena.budget_bytes = 60 * engine.info.page_bytes
        engine._transfers.rates = Moody(engine.info.page_bytes, engine.info.page_size)

    result = run(
        tiny_model,
        [[chat] for chat in chats],
        prepare=prepare,
        ctx_size=256,
        parallel=4,
        page_size=4,
        preempt_every=3,
        preempt_async=preempt_async,
        preempt_disk=str(tmp_path),
    )
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    assert result.counters.recomputes > 0 and result.counters.restored_bytes > 0
    assert_clean(result)
    assert result.snapshot.preempt_disk_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_workloads_with_every_tier_and_faults_match_solo_runs(
    tiny_model: Model, tmp_path: Path, seed: int
) -> None:
    source = random.Random(seed)
    chats = [
        request(source.randrange(1000), source.randrange(3, 80), source.randrange(5, 60), sampling=sampling)
        for sampling in source.choices([GREEDY, SEEDED], k=source.randrange(4, 9))
    ]

    def prepare(engine: Engine) -> None:
        parking = engine._parking
        parking.arena.budget_bytes = source.choice([0, 8, 40, 1000]) * engine.info.page_bytes
        faulty = FaultyStream(lambda number, to_host: source.choice([None] * 6 + ["refuse", "fail", "query", "hang"]))
        parking.tiers.stream.close()
        parking.tiers.stream = faulty  # type: ignore[assignment]
        assert parking.disk is not None
        parking.disk._stream = faulty.real
        parking.deadline_s = 0.05
        threading.Thread(target=let_go, args=(faulty,), daemon=True).start()

    def let_go(stream: FaultyStream) -> None:
        while not stop.wait(0.2):
            stream.release()  # what hangs begins some time, long after it was given up

    stop = threading.Event()
    result = run(
        tiny_model,
        [[chat] for chat in chats],
        prepare=prepare,
        ctx_size=source.randrange(140, 300),
        parallel=source.randrange(2, 6),
        page_size=source.choice([1, 4, 16]),
        batch_size=source.choice([8, 32, 512]),
        preempt_every=source.choice([0, 0, 9]),
        preempt_async=source.choice([True, True, False]),
        preempt_disk=str(tmp_path),
        verify_parks="all",
    )
    stop.set()
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    assert_clean(result)
    assert result.snapshot.preempt_disk_bytes == 0
