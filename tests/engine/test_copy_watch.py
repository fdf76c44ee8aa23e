"""Whoever waits for copies is told of the first that ends, whichever that is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from pyserve.copy_watch import wait_any
from pyserve.disk_tier import DiskTier
from pyserve.park import Ending, Parking
from pyserve.sequence import Tier
from tests.engine.faults import GatedStream
from tests.engine.parked import finish, sequence_of, small_store

MIB = 1 << 20
LONG_S = 60.0  # nobody waits for so long unless something is wrong


@pytest.mark.parametrize("is_begun", [True, False], ids=["posted while somebody waits", "posted before"])
def test_a_younger_copy_that_ends_first_is_noticed(tmp_path: Path, is_begun: bool) -> None:
    kv, stream = small_store(), GatedStream()
    disk = DiskTier(tmp_path, limit_bytes=MIB, pool=kv.tensor, stream=stream)  # type: ignore[arg-type]
    parking = Parking(kv, budget_bytes=MIB, stream=stream, disk=disk)  # type: ignore[arg-type]
    parking.prepare(8)
    while parking.arena.is_growing:
        parking.landed()
    parking.park(sequence_of(14, id=1), [0, 1, 2, 3], Tier.DISK)
    while not stream.held:
        time.sleep(0.001)
    waiter = threading.Thread(target=wait_any, args=(parking, LONG_S))
    if is_begun:
        waiter.start()
    stream.is_open = True
    parking.park(sequence_of(14, id=2), [4, 5, 6, 7], Tier.RAM)
    if not is_begun:
        waiter.start()
    waiter.join(LONG_S / 2)
    assert not waiter.is_alive()
    (landed,) = parking.landed()
    assert (landed.sequence.id, landed.ending) == (2, Ending.DONE)
    stream.open()
    wait_any(parking, LONG_S)
    assert [each.sequence.id for each in parking.landed()] == [1]
    finish(parking)


def test_a_copy_that_is_overdue_ends_the_wait() -> None:
    stream = GatedStream()
    parking = Parking(small_store(), budget_bytes=MIB, stream=stream, deadline_s=0.05)  # type: ignore[arg-type]
    parking.park(sequence_of(6, id=1), [0, 1])
    endings: list[Ending] = []
    started_s = time.monotonic()
    while not endings:
        wait_any(parking, LONG_S)
        endings += [each.ending for each in parking.landed()]
    assert endings == [Ending.OVERDUE] and time.monotonic() - started_s < LONG_S / 2
    stream.open()
    wait_any(parking, LONG_S)
    assert [each.ending for each in parking.landed()] == [Ending.LATE]
    finish(parking)
