"""Parking without an engine: a small pool whose pages are known, and sequences that are parked and come back."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import torch

from pyserve.disk_tier import DiskTier
from pyserve.kv_store import KvStore
from pyserve.ops import CopyStream
from pyserve.park import Ending, Landed, Parking
from pyserve.sequence import Sequence, Tier
from pyserve.types import SamplingParams, SequenceRequest

PAGE_SIZE = 4


def small_store(num_pages: int = 32) -> KvStore:
    """Every page has content of its own."""
    kv = KvStore(num_pages=num_pages, num_layers=2, num_kv_heads=2, page_size=PAGE_SIZE, head_dim=8, kv_type="f16")
    bits = kv.tensor.view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)))
    return kv


def parking_of(kv: KvStore, directory: Path, **options: object) -> Parking:
    """With memory and disk; `options` of `Parking`."""
    stream = CopyStream()
    disk = DiskTier(directory, limit_bytes=1 << 20, pool=kv.tensor, stream=stream)
    return Parking(kv, **{"budget_bytes": 1 << 20, "stream": stream, "disk": disk, "verify": "all", **options})  # type: ignore[arg-type]


def sequence_of(num_computed: int, *, id: int = 0) -> Sequence:
    sequence = Sequence(id, SequenceRequest((1,) * (num_computed + 1), SamplingParams()), id)
    sequence.num_computed = num_computed
    return sequence


def content(kv: KvStore, pages: list[int]) -> torch.Tensor:
    """A copy of the pages' bytes, uint8 [pages, page_bytes]."""
    return kv.tensor.view(torch.uint8).reshape(kv.tensor.shape[0], -1)[pages].clone()


def one(parking: Parking) -> Landed:
    """The next copy that ends, or is overdue."""
    give_up_s = time.monotonic() + 10
    while time.monotonic() < give_up_s:
        landed = parking.landed()
        if landed:
            (only,) = landed
            return only
        time.sleep(0.0005)
    raise AssertionError("no copy has landed")


def park(parking: Parking, sequence: Sequence, pages: list[int], tier: Tier = Tier.RAM) -> Landed:
    parking.park(sequence, pages, tier)
    landed = one(parking)
    assert landed.sequence is sequence and not landed.is_restore
    return landed


def restore(parking: Parking, sequence: Sequence, pages: list[int], *, cached_pages: int = 0) -> Landed:
    assert parking.restore(sequence, pages, cached_pages=cached_pages)
    landed = one(parking)
    assert landed.sequence is sequence and landed.is_restore
    return landed


def round_trip(parking: Parking, kv: KvStore, sequence: Sequence, pages: list[int], back: list[int]) -> None:
    """Out of `pages` and into `back`, with the pages overwritten in between: the bytes must be the same (R38)."""
    before = content(kv, pages)
    assert park(parking, sequence, pages).ending is Ending.DONE
    kv.tensor.view(torch.uint8).reshape(kv.tensor.shape[0], -1)[pages] = 0xEE
    assert restore(parking, sequence, back).ending is Ending.DONE
    assert torch.equal(content(kv, back), before)


def flip(parking: Parking, sequence_id: int, page: int) -> None:
    """One bit of a parked page."""
    host = parking._parked[sequence_id].host
    assert host is not None
    ((extent, _),) = host.stretches(page, page + 1)
    extent.slab.data[extent.first * parking._kv.page_bytes + 17] ^= 4


def check_host_memory(parking: Parking) -> None:
    """Every page of the arena that is in use belongs to somebody who is known, and no page to two."""
    copies = [*parking._copies.values(), *parking._overdue.values()]
    states = [*parking._parked.values(), *parking.room.kept(), *(each.parked for each in copies)]
    users = Counter(share.block for state in states for share in state.shares)
    assert all(block.num_users == count for block, count in users.items()), "a block counts its users wrongly"
    assert parking.tiers.blocks._blocks <= users.keys(), "nobody uses a block"
    hosts = [place.host for place in (*states, *users) if place.host is not None]
    owned = [(id(e.slab), page) for host in hosts for e in host.extents for page in range(e.first, e.first + e.count)]
    assert len(owned) == len(set(owned)), "a page of host memory has two owners"
    slabs = parking.arena._slabs
    for slab in slabs:
        assert slab.num_used + sum(count for _, count in slab.gaps) == slab.num_pages
    assert sum(slab.num_used for slab in slabs) == len(owned), "a page of host memory has no owner"
    num_pages = sum(slab.num_pages for slab in slabs) + parking.arena.growing_pages
    assert num_pages * parking.page_bytes == parking.held_bytes, "held_bytes does not say what is held"


def check_nothing_is_held(parking: Parking) -> None:
    """No memory, no file, no copy and no note of a sequence that is gone."""
    assert (parking.held_bytes, parking.disk_bytes) == (0, 0)
    held = (parking._copies, parking._moves, parking._parked, parking._overdue, parking.room._kept, parking.room._queue)
    assert not any(held) and not parking.tiers.blocks


def finish(parking: Parking) -> None:
    """The first four sequences end: nothing is left of what was parked."""
    check_host_memory(parking)
    parking.discard([sequence_of(1, id=number) for number in range(4)])
    while not parking.rest():
        parking.landed()
    check_nothing_is_held(parking)
    parking.close()
