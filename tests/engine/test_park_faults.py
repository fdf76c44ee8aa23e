"""Faults of copies, memory and disks: one clear line in the log, nothing lost, nothing leaked, and the bytes that each
chat gives alone (R20, R23, R23b, R26).
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyserve.engine import Engine
from pyserve.models.load import Model
from pyserve.park import Parking
from pyserve.sequence import Tier
from tests.engine.faults import FaultyStream
from tests.engine.parked import sequence_of, small_store
from tests.engine.workload import SEEDED, Run, alone, assert_clean, four_chats, ignore_speed, run

CHATS = four_chats(SEEDED)


@pytest.fixture(scope="module")
def texts(tiny_model: Model) -> list[list[int]]:
    return [alone(tiny_model, chat) for chat in CHATS]


def pressed(model: Model, prepare: Callable[[Engine], None], **settings: object) -> Run:
    """Four chats on a pool for two; `prepare` breaks something."""

    def prepare_all(engine: Engine) -> None:
        ignore_speed(engine)
        prepare(engine)

    return run(
        model,
        [[chat] for chat in CHATS],
        prepare=prepare_all,
        **{"ctx_size": 256, "parallel": 4, "page_size": 4, "verify_parks": "all", **settings},
    )


def broken(
    fault: Callable[[int, bool], str | None], deadline_s: float = 60.0
) -> tuple[Callable[[Engine], None], list[FaultyStream]]:
    streams: list[FaultyStream] = []

    def prepare(engine: Engine) -> None:
        stream = FaultyStream(fault)
        engine._parking.tiers.stream.close()
        engine._parking.tiers.stream = stream  # type: ignore[assignment]
        engine._parking.deadline_s = deadline_s
        streams.append(stream)

    return prepare, streams


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("preempt_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("fault", ["refuse", "fail"])
@pytest.mark.parametrize("to_host", [True, False], ids=["park", "restore"])
def test_a_copy_that_fails_is_computed_again(
    tiny_model: Model,
    texts: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    fault: str,
    to_host: bool,
    preempt_async: bool,
) -> None:
    prepare, streams = broken(lambda number, is_park: fault if is_park is to_host else None)
    result = pressed(tiny_model, prepare, preempt_async=preempt_async)
    assert [o.tokens for o in result.outcomes] == texts
    assert streams[0].num_faults >= 1
    assert_clean(result)
    assert result.counters.copies_failed == len(failures(caplog)) >= 1
    assert all("it will be computed again" in line for line in failures(caplog))


def test_every_other_copy_fails(tiny_model: Model, texts: list[list[int]]) -> None:
    prepare, _ = broken(lambda number, is_park: ("refuse", None, "fail", None)[number % 4])
    result = pressed(tiny_model, prepare, preempt_every=7)
    assert [o.tokens for o in result.outcomes] == texts
    assert_clean(result)


def test_a_flipped_bit_is_counted_and_the_chat_computed_again(
    tiny_model: Model, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    prepare, streams = broken(lambda number, is_park: None if is_park else "flip")
    result = pressed(tiny_model, prepare)
    assert [o.tokens for o in result.outcomes] == texts
    assert result.counters.hash_mismatches == streams[0].num_faults >= 1
    assert all("not what was parked" in line for line in failures(caplog))
    assert_clean(result)


@pytest.mark.parametrize("to_host", [True, False], ids=["park", "restore"])
def test_a_copy_that_does_not_end_is_given_up_and_its_pages_are_not_used(
    tiny_model: Model, texts: list[list[int]], caplog: pytest.LogCaptureFixture, to_host: bool
) -> None:
    """The copy begins long after its deadline: if its pages had been given away, it would read or write theirs."""
    timers: list[threading.Timer] = []

    def fault(number: int, is_park: bool) -> str | None:
        if is_park is to_host and not timers:
            timers.append(threading.Timer(0.6, lambda: streams[0].release()))
            timers[0].start()
            return "hang"
        return None

    prepare, streams = broken(fault, deadline_s=0.03)
    result = pressed(tiny_model, prepare)
    timers[0].join()
    assert [o.tokens for o in result.outcomes] == texts
    assert sum("not done after" in line for line in failures(caplog)) == 1
    assert_clean(result)


def test_a_server_stops_in_time_beside_a_copy_that_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    """The copy may still write: its memory is not given back."""
    kv = small_store()
    stream = FaultyStream(lambda number, to_host: "hang")
    parking = Parking(kv, budget_bytes=1 << 20, stream=stream, deadline_s=0.1)  # type: ignore[arg-type]
    sequence = sequence_of(8)
    parking.park(sequence, [0, 1], Tier.RAM)
    while parking.room._queue:
        parking.landed()
    started_s = time.monotonic()
    parking.close()
    assert time.monotonic() - started_s < 5
    assert parking.held_bytes > 0
    assert sum("never ended" in line for line in failures(caplog)) == 1
    stream.release()
    parking.close()
    assert parking.held_bytes == 0


def test_an_event_that_cannot_be_asked_is_asked_again(
    tiny_model: Model, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    prepare, streams = broken(lambda number, is_park: "query")
    result = pressed(tiny_model, prepare)
    assert [o.tokens for o in result.outcomes] == texts
    assert result.counters.copies_failed == 0, "no answer is not a failure"
    assert 1 <= len(failures(caplog)) <= streams[0].num_faults
    assert all("an unrelated launch failed" in line for line in failures(caplog))
    assert_clean(result)


def test_memory_that_cannot_be_had_means_computing_again(
    tiny_model: Model, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(engine: Engine) -> None:
        def refuse(num_bytes: int) -> torch.Tensor:
            raise MemoryError("the system has none")

        engine._parking.arena.allocate = refuse

    result = pressed(tiny_model, prepare)
    assert [o.tokens for o in result.outcomes] == texts
    assert sum("the system has none" in line for line in failures(caplog)) == 1
    assert_clean(result)


def no_memory(engine: Engine) -> None:
    engine._parking.arena.budget_bytes = 0


def test_past_the_memory_budget_chats_are_parked_on_disk(
    tiny_model: Model, texts: list[list[int]], tmp_path: Path
) -> None:
    result = pressed(tiny_model, no_memory, preempt_disk=str(tmp_path))
    assert [o.tokens for o in result.outcomes] == texts
    assert result.counters.recomputes == result.counters.copies_failed == 0
    # Pages that the prompt cache still has when their chat comes back are not copied.
    assert 0 < result.counters.restored_bytes <= result.counters.parked_bytes
    assert_clean(result)
    assert result.snapshot.preempt_disk_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_what_lies_in_memory_moves_to_disk_when_memory_is_wanted(
    tiny_model: Model, texts: list[list[int]], tmp_path: Path
) -> None:
    def little_memory(engine: Engine) -> None:
        engine._parking.arena.budget_bytes = 40 * engine.info.page_bytes

    result = pressed(tiny_model, little_memory, preempt_disk=str(tmp_path))
    assert [o.tokens for o in result.outcomes] == texts
    assert result.counters.moved_bytes > 0
    assert_clean(result)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("preempt_async", [True, False], ids=["async", "sync"])
def test_forced_parks_to_disk_change_nothing(
    tiny_model: Model, texts: list[list[int]], tmp_path: Path, page_size: int, preempt_async: bool
) -> None:
    result = pressed(
        tiny_model,
        no_memory,
        ctx_size=512,
        preempt_disk=str(tmp_path),
        preempt_every=16,
        preempt_async=preempt_async,
        page_size=page_size,
    )
    assert [o.tokens for o in result.outcomes] == texts
    assert result.preempts >= 4 * 5 and result.counters.recomputes == 0
    assert_clean(result)


def refusing(number: int) -> Callable[[Engine], None]:
    """Every write fails with this error."""

    def prepare(engine: Engine) -> None:
        no_memory(engine)
        disk = engine._parking.disk
        assert disk is not None

        def write(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        disk._write = write  # type: ignore[method-assign, assignment]

    return prepare


def gone(engine: Engine) -> None:
    no_memory(engine)
    assert engine._parking.disk is not None
    shutil.rmtree(engine._parking.disk.folder)


def damaging(damage: Callable[[Path], None]) -> Callable[[Engine], None]:
    def prepare(engine: Engine) -> None:
        no_memory(engine)
        disk = engine._parking.disk
        assert disk is not None
        read = disk._read

        def damaged(file: object, pages: list[int], first: int) -> None:
            damage(file.path)  # type: ignore[attr-defined]
            read(file, pages, first)  # type: ignore[arg-type]

        disk._read = damaged  # type: ignore[method-assign, assignment]

    return prepare


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (refusing(errno.ENOSPC), "No space left on device"),
        (refusing(errno.EACCES), "Permission denied"),
        (gone, "No such file or directory"),
        (damaging(lambda path: path.write_bytes(path.read_bytes()[:-1])), "is cut short"),
        (damaging(lambda path: path.unlink()), "No such file or directory"),
        (damaging(alter), "not what was parked"),
    ],
    ids=["full", "unwritable", "gone", "truncated", "deleted", "altered"],
)
def test_a_disk_that_fails_costs_one_line_and_some_computing(
    tiny_model: Model,
    texts: list[list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    prepare: Callable[[Engine], None],
    message: str,
) -> None:
    result = pressed(tiny_model, prepare, preempt_disk=str(tmp_path))
    assert [o.tokens for o in result.outcomes] == texts
    lines = failures(caplog)
    assert lines and all(message in line for line in lines)
    assert len(lines) == result.counters.copies_failed + result.counters.hash_mismatches
    assert_clean(result)
    assert result.snapshot.preempt_disk_bytes == 0
    assert list(tmp_path.iterdir()) == []
