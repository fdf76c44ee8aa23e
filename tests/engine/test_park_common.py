"""Pages that several sequences have in common are copied once, held once, and go with the last that uses them (R11)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest
import torch

from pyserve.engine import Engine
from pyserve.handle import EngineHandle
from pyserve.kv_store import KvStore
from pyserve.models.load import Model
from pyserve.park import Ending, Landed, Parking
from pyserve.sequence import Sequence, Tier
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import Counters, SamplingParams, SequenceRequest, Token
from pyserve.view import Room
from tests.engine.faults import FaultyStream
from tests.engine.parked import (
    PAGE_SIZE,
    check_host_memory,
    check_nothing_is_held,
    content,
    finish,
    flip,
    one,
    parking_of,
    restore,
    sequence_of,
    small_store,
)
from tests.engine.workload import alone, assert_clean, ignore_speed, request, run

CHAIN = ("a", "b", "c", "d")
TIERS = pytest.mark.parametrize("tier", [Tier.RAM, Tier.DISK])


def two(kv: KvStore) -> tuple[Sequence, Sequence, list[int], list[int]]:
    """Two sequences of 4 and 6 pages; the first three hold the same."""
    first, second = sequence_of(14, id=1), sequence_of(22, id=2)
    return first, second, [0, 1, 2, 10], [0, 1, 2, 20, 21, 22]


def park_in_common(
    parking: Parking, sequence: Sequence, pages: list[int], tier: Tier = Tier.RAM, num_common: int = 3
) -> Landed:
    parking.park(sequence, pages, tier, chain=CHAIN[:3], num_common=num_common)
    return one(parking)


def pages_held(parking: Parking) -> int:
    return sum(slab.num_used for slab in parking.arena._slabs) + parking.disk_bytes // parking.page_bytes


def have_memory(parking: Parking) -> None:
    """So that parks are posted at once."""
    parking.prepare(16)
    while parking.arena.is_growing:
        parking.landed()


@TIERS
def test_the_second_park_copies_only_what_it_alone_holds(tmp_path: Path, tier: Tier) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second, pages, more_pages = two(kv)
    wanted, more_wanted = content(kv, pages), content(kv, more_pages)
    assert park_in_common(parking, first, pages, tier).num_bytes == 4 * kv.page_bytes
    assert park_in_common(parking, second, more_pages, tier, num_common=0).num_bytes == 3 * kv.page_bytes
    assert pages_held(parking) == 4 + 3
    assert (parking.parked_bytes(first), parking.parked_bytes(second)) == (4 * kv.page_bytes, 6 * kv.page_bytes)
    kv.tensor.view(torch.uint8)[:23] = 0xEE
    back, more_back = [5, 6, 7, 8], [11, 12, 13, 14, 15, 16]
    assert restore(parking, second, more_back).num_bytes == 6 * kv.page_bytes
    assert restore(parking, first, back, cached_pages=2).num_bytes == 2 * kv.page_bytes
    assert torch.equal(content(kv, more_back), more_wanted)
    assert torch.equal(content(kv, back)[2:], wanted[2:])
    finish(parking)


@TIERS
def test_they_outlive_the_sequence_that_copied_them(tmp_path: Path, tier: Tier) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second, pages, more_pages = two(kv)
    wanted = content(kv, more_pages)
    park_in_common(parking, first, pages, tier)
    park_in_common(parking, second, more_pages, tier)
    parking.discard([first])
    assert pages_held(parking) == 6
    assert restore(parking, second, [24, 25, 26, 27, 28, 29]).ending is Ending.DONE
    assert torch.equal(content(kv, [24, 25, 26, 27, 28, 29]), wanted)
    finish(parking)


def test_parks_of_one_moment_share_the_copy_that_is_on_its_way(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second, pages, more_pages = two(kv)
    wanted = content(kv, more_pages)
    have_memory(parking)
    parking.tiers.stream.pause()
    parking.park(first, pages, Tier.RAM, chain=CHAIN[:3], num_common=3)
    parking.park(second, more_pages, Tier.RAM, chain=CHAIN[:3], num_common=3)
    parking.discard([first])  # it ends before either has landed
    assert parking.landed() == []
    parking.tiers.stream.resume()
    landed: list[Landed] = []
    while len(landed) < 2:
        landed += parking.landed()
    assert sorted(each.num_bytes // kv.page_bytes for each in landed) == [3, 4]
    assert pages_held(parking) == 6
    assert restore(parking, second, [24, 25, 26, 27, 28, 29]).ending is Ending.DONE
    assert torch.equal(content(kv, [24, 25, 26, 27, 28, 29]), wanted)
    finish(parking)


def test_who_uses_a_copy_that_fails_fails_with_it_and_the_next_park_copies_anew(tmp_path: Path) -> None:
    kv = small_store()
    stream = FaultyStream(lambda number, to_host: "fail" if number == 0 else None)
    parking = parking_of(kv, tmp_path, stream=stream)
    have_memory(parking)
    first, second, pages, more_pages = two(kv)
    parking.park(first, pages, Tier.RAM, chain=CHAIN[:3], num_common=3)
    parking.park(second, more_pages, Tier.RAM, chain=CHAIN[:3], num_common=3)
    endings: list[Landed] = []
    while len(endings) < 2:
        endings += parking.landed()
    assert [each.ending for each in endings] == [Ending.FAILED, Ending.FAILED]
    check_host_memory(parking)
    assert park_in_common(parking, second, more_pages).num_bytes == 6 * kv.page_bytes
    finish(parking)


def test_a_flipped_bit_in_common_pages_is_noticed_by_each_and_not_passed_on(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second, pages, more_pages = two(kv)
    park_in_common(parking, first, pages)
    park_in_common(parking, second, more_pages)
    block = parking._parked[1].shares[0].block
    assert block is parking._parked[2].shares[0].block and block.host is not None
    extent = block.host.extents[0]
    extent.slab.data[extent.first * kv.page_bytes] ^= 1
    for sequence, count in ((first, 4), (second, 6)):
        assert restore(parking, sequence, list(range(count))).ending is Ending.MISMATCH
    assert park_in_common(parking, first, pages).num_bytes == 4 * kv.page_bytes, "what is wrong is not used again"
    finish(parking)


def test_after_a_restore_neither_common_nor_full_pages_are_copied_again(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second, pages, more_pages = two(kv)
    park_in_common(parking, first, pages)
    park_in_common(parking, second, more_pages)
    for sequence, its_pages in ((first, pages), (second, more_pages)):
        restore(parking, sequence, its_pages)
    most = parking.arena.budget_bytes // kv.page_bytes
    assert parking.free_pages() == most, "what is kept of running sequences can be had, common pages too"
    second.num_computed += 3  # into its seventh page
    assert park_in_common(parking, second, [*more_pages, 23]).num_bytes == 2 * kv.page_bytes
    assert parking.free_pages() == most - 7
    finish(parking)


def test_what_a_sequence_alone_holds_moves_to_disk_and_the_rest_stays(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second, pages, more_pages = two(kv)
    third = sequence_of(12, id=3)
    wanted = content(kv, more_pages)
    park_in_common(parking, first, pages)
    park_in_common(parking, second, more_pages)
    park_in_common(parking, third, [0, 1, 2])
    assert not parking.can_move(third), "it has no page of its own"
    parking.move_to_disk(second)
    assert one(parking).ending is Ending.MOVED
    assert parking.disk_bytes == 3 * kv.page_bytes and pages_held(parking) == 4 + 3
    landed = restore(parking, second, [24, 25, 26, 27, 28, 29])
    assert (landed.ending, landed.tier) == (Ending.DONE, Tier.DISK)
    assert torch.equal(content(kv, [24, 25, 26, 27, 28, 29]), wanted)
    finish(parking)


def test_chains_that_part_share_as_far_as_they_go_together(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second = sequence_of(16, id=1), sequence_of(16, id=2)
    wanted = content(kv, [0, 1, 8, 9])
    parking.park(first, [0, 1, 2, 3], Tier.RAM, chain=CHAIN, num_common=4)
    one(parking)
    assert num_spared(parking, 3, ("a", "b", "x", "y")) == 2
    parking.park(second, [0, 1, 8, 9], Tier.RAM, chain=("a", "b", "x", "y"), num_common=4)
    assert one(parking).num_bytes == 2 * kv.page_bytes
    assert num_spared(parking, 3, ("a", "b", "x", "y", "z")) == 4
    assert restore(parking, second, [20, 21, 22, 23]).ending is Ending.DONE
    assert torch.equal(content(kv, [20, 21, 22, 23]), wanted)
    finish(parking)


def test_a_flip_in_its_own_pages_ends_nobody_elses(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second, pages, more_pages = two(kv)
    park_in_common(parking, first, pages)
    park_in_common(parking, second, more_pages)
    flip(parking, 1, 0)
    assert restore(parking, first, [5, 6, 7, 8]).ending is Ending.MISMATCH
    assert restore(parking, second, [24, 25, 26, 27, 28, 29]).ending is Ending.DONE
    finish(parking)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_parks_comes_and_ends_what_comes_back_is_what_went(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    kv = small_store(64)
    bits = kv.tensor.view(torch.uint8).reshape(64, -1)
    stream = FaultyStream(lambda number, to_host: source.choice([None] * 9 + ["fail", "refuse"]))
    budget_bytes = source.choice([20, 1000]) * kv.page_bytes
    parking = parking_of(kv, tmp_path, stream=stream, budget_bytes=budget_bytes)
    prefixes = [torch.randint(0, 256, (6, bits.shape[1]), dtype=torch.uint8) for _ in range(2)]
    wanted: dict[Sequence, torch.Tensor] = {}
    num_done = 0
    for number in range(150):
        group, length, num_own = source.randrange(2), source.randrange(1, 7), source.randrange(4)
        sequence = sequence_of((length + num_own) * PAGE_SIZE, id=number)
        own = torch.randint(0, 256, (num_own, bits.shape[1]), dtype=torch.uint8)
        wanted[sequence] = torch.cat([prefixes[group][:length], own])
        pages = source.sample(range(64), length + num_own)
        bits[pages] = wanted[sequence]
        chain = [(group, page) for page in range(length)]
        tier = source.choice([Tier.RAM, Tier.RAM, Tier.DISK])
        parking.park(sequence, pages, tier, chain=chain, num_common=source.randrange(length + 1))
        if one(parking).ending is not Ending.DONE:
            del wanted[sequence]
        check_host_memory(parking)
        while len(wanted) > source.randrange(2, 8):
            back = source.choice(list(wanted))
            expected = wanted.pop(back)
            if parking.can_move(back) and source.random() < 0.3:
                parking.move_to_disk(back)
            if source.random() < 0.7:
                pages = source.sample(range(64), len(expected))
                landed = restore(parking, back, pages)
                assert landed.ending is not Ending.MISMATCH
                if landed.ending is Ending.DONE:
                    assert torch.equal(bits[pages], expected)
                    num_done += 1
            parking.discard([back])
            check_host_memory(parking)
    assert num_done > 20
    parking.discard(wanted)
    while not parking.rest() or parking._moves:
        parking.landed()
    check_nothing_is_held(parking)
    parking.close()
    assert list(tmp_path.iterdir()) == []


def group_of(count: int, prompt_len: int) -> list[SequenceRequest]:
    prompt = request(1, prompt_len, 1).prompt
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(count)]
    return [SequenceRequest(prompt, each, max_tokens=40) for each in params]


def page_bytes_of(model: Model) -> int:
    return build_engine(model, Settings(ctx_size=64, page_size=4), num_threads=1).info.page_bytes


@pytest.mark.parametrize("preempt_async", [True, False], ids=["async", "sync"])
def test_a_group_parks_its_prompt_once(tiny_model: Model, preempt_async: bool) -> None:
    group = group_of(3, 101)  # 25 full pages in common
    result = run(
        tiny_model, [group], ctx_size=512, parallel=3, page_size=4, preempt_every=8, preempt_async=preempt_async
    )
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, one) for one in group]
    page_bytes = page_bytes_of(tiny_model)
    most_new_pages = 3  # of 8 tokens
    assert result.preempts >= 12
    assert result.counters.parked_bytes <= (25 + result.preempts * most_new_pages) * page_bytes
    assert_clean(result)


def test_requests_that_begin_alike_park_the_beginning_once(tiny_model: Model) -> None:
    """Through the prompt cache: the others come when the first has computed what they begin with."""
    prompt = request(1, 100, 1).prompt
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(3)]
    chats = [SequenceRequest((*prompt, *request(each.seed, 9, 1).prompt), each, max_tokens=60) for each in params]

    async def scenario() -> tuple[list[list[int]], Counters]:
        settings = Settings(ctx_size=1024, parallel=3, page_size=4, preempt_every=8)
        engine = build_engine(tiny_model, settings, num_threads=1)
        ignore_speed(engine)
        handle = EngineHandle(engine)
        await handle.start()
        texts: list[list[int]] = []
        first = handle.submit(chats[:1], "first")
        events = await first.next_events()
        while not any(isinstance(event, Token) for event in events):
            events += await first.next_events()
        others = [handle.submit([chat], "other") for chat in chats[1:]]
        for generation, seen in zip([first, *others], [events, [], []], strict=True):
            seen += [event async for event in generation]
            texts.append([event.token for event in seen if isinstance(event, Token)])
        await handle.stop()
        return texts, handle.counters

    texts, counters = asyncio.run(scenario())
    assert texts == [alone(tiny_model, chat) for chat in chats]
    assert counters.cached_tokens == 2 * 100
    assert counters.preempts >= 3 * 7
    own_prompts, most_new_pages = 3 * 3, 3  # of 9 tokens each, of 8 or 9 tokens
    assert counters.parked_bytes <= (25 + own_prompts + counters.preempts * most_new_pages) * page_bytes_of(tiny_model)


def test_a_group_under_pressure_with_every_tier_ends_as_each_alone(tiny_model: Model, tmp_path: Path) -> None:
    group = group_of(4, 61)

    def little(engine: Engine) -> None:
        engine._parking.arena.budget_bytes = 24 * engine.info.page_bytes
        stream = FaultyStream(lambda number, to_host: "fail" if number % 7 == 3 else None)
        engine._parking.tiers.stream.close()
        engine._parking.tiers.stream = stream  # type: ignore[assignment]

    result = run(tiny_model, [group, group_of(2, 30)], prepare=little, ctx_size=160, parallel=5, page_size=4,
                 preempt_disk=str(tmp_path), preempt_every=5, verify_parks="all")  # fmt: skip
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, one) for one in (*group, *group_of(2, 30))]
    assert result.counters.hash_mismatches == 0
    assert_clean(result)
    assert result.snapshot.preempt_disk_bytes == 0


def test_room_counts_common_pages_once() -> None:
    first, second, third = (sequence_of(40, id=number) for number in range(3))  # ten pages each
    assert Room(4, ram_pages=6, disk_pages=99).tier_of(first) == (Tier.DISK, 10)
    room = Room(4, 16, 99, open_outlook=FourInCommon)
    room.use(Tier.RAM, first)
    planned = room.copy()
    assert planned.tier_of(second) == (Tier.RAM, 10)
    planned.use(Tier.RAM, second)
    assert planned.tier_of(third) == (Tier.DISK, 10)
    assert room.can_hold([second]) and room.tier_of(third) == (Tier.RAM, 10), "what a copy took is there still"


class FourInCommon:
    """Four pages of each are the same; the first has to take them."""

    def __init__(self, num_parked: int = 0) -> None:
        self.num_parked = num_parked

    def num_spared(self, sequence: Sequence) -> int:
        return 4 if self.num_parked else 0

    def park(self, sequence: Sequence) -> int:
        self.num_parked += 1
        return 4 if self.num_parked > 1 else 0

    def copy(self) -> FourInCommon:
        return FourInCommon(self.num_parked)


def num_spared(parking: Parking, id: int, chain: Items[Hashable]) -> int:
    outlook = parking.outlook()
    return outlook.num_spared(outlook.shares(id, chain))


@pytest.mark.parametrize("preempt_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("has_disk", [False, True], ids=["memory", "disk"])
def test_a_group_that_is_forced_out_together_takes_its_prompt_once(
    tiny_model: Model, tmp_path: Path, preempt_async: bool, has_disk: bool
) -> None:
    """Again and again: what is kept of them when they are back is room, and taken once as well (R22)."""
    group = group_of(4, 101)  # 25 full pages in common
    tiers: list[Tier] = []

    def just_enough(engine: Engine) -> None:
        ignore_speed(engine)
        parking = engine._parking
        parking.arena.budget_bytes = (25 + 4 * 9) * engine.info.page_bytes
        park = parking.park

        def noted(sequence: Sequence, pages: Any, tier: Tier, **common: Any) -> None:
            tiers.append(tier)
            park(sequence, pages, tier, **common)

        parking.park = noted  # type: ignore[method-assign, assignment]
        parking._park_elsewhere = None  # type: ignore[method-assign, assignment]

    result = run(
        tiny_model, [group], prepare=just_enough, ctx_size=1024, parallel=4, page_size=4, preempt_every=8,
        preempt_async=preempt_async, preempt_disk=str(tmp_path) if has_disk else None,
    )  # fmt: skip
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, each) for each in group]
    assert tiers == [Tier.RAM] * len(tiers) and len(tiers) == result.preempts >= 4 * 4
    assert result.counters.recomputes == 0
    assert_clean(result)


def test_what_residents_keep_in_common_is_room_once(tmp_path: Path) -> None:
    """Pages that could be given up are room already: a park that reckons with them twice finds no memory."""
    kv = small_store()
    parking = parking_of(kv, tmp_path)
    first, second, pages, more_pages = two(kv)
    num_free = parking.free_pages()
    park_in_common(parking, first, pages)
    park_in_common(parking, second, more_pages)
    assert num_spared(parking, 3, CHAIN[:3]) == 3 and parking.free_pages() == num_free - 7
    restore(parking, first, [20, 21, 22, 23])
    assert num_spared(parking, 3, CHAIN[:3]) == 3, "the second one is parked and needs them"
    restore(parking, second, [24, 25, 26, 27, 28, 29])
    assert parking.free_pages() == num_free
    assert num_spared(parking, 3, CHAIN[:3]) == 0
    finish(parking)


@pytest.mark.parametrize("num_pages", [4, 5, 6, 7, 8])
def test_room_that_is_said_to_be_there_is_there_for_one_of_whom_something_is_kept(num_pages: int) -> None:
    """What is kept of it is its own copy of pages that lie in a block by now: they are not spared it as well (R22)."""
    kv = small_store()
    parking = Parking(kv, budget_bytes=10 * kv.page_bytes)
    first, second, pages, more_pages = two(kv)
    parking.park(first, pages, Tier.RAM, chain=CHAIN[:3])
    assert one(parking).ending is Ending.DONE
    assert restore(parking, first, pages).ending is Ending.DONE
    assert park_in_common(parking, second, more_pages).ending is Ending.DONE
    pages = [*pages, 11, 12, 13, 14][:num_pages]
    first.num_computed = num_pages * PAGE_SIZE
    is_room = num_pages - num_spared(parking, first.id, CHAIN[:3]) <= parking.free_pages()
    assert is_room == (num_pages == 4)
    assert num_spared(parking, 3, CHAIN[:3]) == 3
    assert park_in_common(parking, first, pages).ending is (Ending.DONE if is_room else Ending.NO_ROOM)
    finish(parking)
