"""The disk tier by itself: round trips, limits, whose files it touches, and where it cannot work (R23)."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyserve.disk_folder import check_directory
from pyserve.disk_tier import DiskTier
from pyserve.errors import SettingsError
from pyserve.kv_store import KvStore
from pyserve.ops import CopyStream
from pyserve.park import Ending, Parking
from pyserve.sequence import Tier
from tests.engine.parked import content, flip, one, park, restore, sequence_of, small_store

MIB = 1 << 20


def parking_on(directory: Path, kv: KvStore, *, limit_bytes: int = MIB, verify: str = "all") -> Parking:
    stream = CopyStream()
    disk = DiskTier(directory, limit_bytes=limit_bytes, pool=kv.tensor, stream=stream)
    return Parking(kv, budget_bytes=MIB, stream=stream, disk=disk, verify=verify)


def settled(parking: Parking) -> None:
    """Wait until the tier's thread has nothing left to do."""
    assert parking.disk is not None
    parking.disk._thread.submit(lambda: None).result(5)


@pytest.mark.parametrize("verify", ["off", "sample", "all"])
@pytest.mark.parametrize("piece_pages", [1, 3, 100])
def test_pages_come_back_from_disk_as_they_went(tmp_path: Path, piece_pages: int, verify: str) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv, verify=verify)
    assert parking.disk is not None
    parking.disk._piece_pages = piece_pages
    pages = [9, 8, 7, 1, 2, 20, 22, 24]
    sequence = sequence_of(30)
    before = content(kv, pages)
    landed = park(parking, sequence, pages, Tier.DISK)
    assert (landed.ending, landed.num_bytes, landed.tier) == (Ending.DONE, 8 * kv.page_bytes, Tier.DISK)
    (file,) = parking.disk.folder.glob("*.pages")
    assert parking.disk.folder.stat().st_mode & 0o077 == 0, "others on the machine can read what is parked"
    assert file.stat().st_size == 8 * kv.page_bytes
    assert parking.parked_bytes(sequence) == parking.disk_bytes == 8 * kv.page_bytes
    assert parking.held_bytes == 0
    back = [3, 4, 5, 6, 30, 29, 28, 0]
    kept = content(kv, back[:2])
    assert restore(parking, sequence, back, cached_pages=2).ending is Ending.DONE
    assert torch.equal(content(kv, back[2:]), before[2:])
    assert torch.equal(content(kv, back[:2]), kept), "what the prompt cache provides was written"
    settled(parking)
    assert not file.exists() and parking.disk_bytes == 0
    parking.close()
    assert list(tmp_path.iterdir()) == []


def test_parked_state_moves_from_memory_to_disk(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv)
    sequence = sequence_of(26)
    before = content(kv, list(range(7)))
    park(parking, sequence, list(range(7)))
    parking.move_to_disk(sequence)
    assert parking.parked_bytes(sequence) == 7 * kv.page_bytes
    landed = one(parking)
    assert (landed.ending, landed.num_bytes) == (Ending.MOVED, 7 * kv.page_bytes)
    parking.rest()
    assert parking.held_bytes == 0 and parking.disk_bytes == 7 * kv.page_bytes
    assert restore(parking, sequence, list(range(10, 17))).ending is Ending.DONE
    assert torch.equal(content(kv, list(range(10, 17))), before)
    parking.close()


def test_a_bit_that_flips_in_memory_before_the_move_is_noticed_after_it(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv)
    sequence = sequence_of(26)
    park(parking, sequence, list(range(7)))
    flip(parking, 0, 4)
    parking.move_to_disk(sequence)
    assert one(parking).ending is Ending.MOVED
    assert restore(parking, sequence, list(range(10, 17))).ending is Ending.MISMATCH
    parking.close()


@pytest.mark.parametrize("verify", ["off", "sample", "all"])
@pytest.mark.parametrize("piece_pages", [1, 3, 100])
def test_whatever_page_changes_on_disk_is_noticed_after_a_move(tmp_path: Path, piece_pages: int, verify: str) -> None:
    """Also those that memory, with a sample, had no hash of."""
    kv = small_store()
    for page in range(7):
        parking = parking_on(tmp_path, kv, verify=verify)
        assert parking.disk is not None
        parking.disk._piece_pages = piece_pages
        sequence = sequence_of(26)
        park(parking, sequence_of(4, id=1), [30])
        park(parking, sequence, list(range(7)))
        parking.move_to_disk(sequence)
        assert one(parking).ending is Ending.MOVED
        (path,) = parking.disk.folder.glob("*.pages")
        parked = bytearray(path.read_bytes())
        parked[page * kv.page_bytes + 100] ^= 0xFF
        path.write_bytes(parked)
        ending = restore(parking, sequence, list(range(10, 17))).ending
        assert ending is (Ending.DONE if verify == "off" else Ending.MISMATCH), f"page {page}"
        parking.close()


def test_a_move_that_is_called_off_changes_no_hash_in_memory(tmp_path: Path) -> None:
    """Whoever has that memory next is not checked by hashes of what lay there before."""
    kv = small_store()
    parking = parking_on(tmp_path, kv, verify="sample")
    assert parking.disk is not None
    first, second = sequence_of(26), sequence_of(26, id=8)
    park(parking, first, list(range(7)))
    before = parking.arena._slabs[0].hashes.clone()
    gate, real = threading.Event(), parking.disk._stream.hash_pages

    def held(host: torch.Tensor, hashes: torch.Tensor) -> None:
        gate.wait(10)
        real(host, hashes)

    parking.disk._stream.hash_pages = held  # type: ignore[method-assign]
    parking.move_to_disk(first)
    assert restore(parking, first, list(range(7))).ending is Ending.DONE
    parking.discard([first])
    park(parking, second, list(range(10, 17)))
    known = parking.arena._slabs[0].hashes.clone()
    assert (known == 0).tolist() == (before == 0).tolist(), "the sample is of the same places"
    gate.set()
    settled(parking)
    assert torch.equal(parking.arena._slabs[0].hashes, known)
    assert restore(parking, second, list(range(20, 27))).ending is Ending.DONE
    assert torch.equal(content(kv, list(range(20, 27))), content(kv, list(range(10, 17))))
    parking.close()


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_move_is_called_off_when_its_sequence_comes_back_or_ends(tmp_path: Path, is_restored: bool) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv)
    assert parking.disk is not None
    gate = threading.Event()
    parking.disk._thread.submit(gate.wait, 10)
    sequence = sequence_of(26)
    before = content(kv, list(range(7)))
    park(parking, sequence, list(range(7)))
    parking.move_to_disk(sequence)
    if is_restored:
        assert restore(parking, sequence, list(range(10, 17))).ending is Ending.DONE
        assert torch.equal(content(kv, list(range(10, 17))), before)
    parking.discard([sequence])
    gate.set()
    settled(parking)
    parking.rest()
    assert parking.landed() == []
    assert (parking.held_bytes, parking.disk_bytes) == (0, 0)
    assert list(parking.disk.folder.glob("*.pages")) == []
    parking.close()


def test_a_move_that_fails_leaves_the_state_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv)
    assert parking.disk is not None
    shutil.rmtree(parking.disk.folder)
    sequence = sequence_of(26)
    before = content(kv, list(range(7)))
    park(parking, sequence, list(range(7)))
    parking.move_to_disk(sequence)
    while parking.disk_bytes:
        assert parking.landed() == []
    assert [record.getMessage().count("stays in memory") for record in caplog.records] == [1]
    assert restore(parking, sequence, list(range(10, 17))).ending is Ending.DONE
    assert torch.equal(content(kv, list(range(10, 17))), before)
    parking.close()


def test_files_are_written_and_read_beside_the_loop_through_aligned_memory(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv)
    disk = parking.disk
    assert disk is not None
    threads: list[str] = []
    is_free = threading.Event()

    def held(job: Callable[..., None]) -> Callable[..., None]:
        def run(*given: object) -> None:
            is_free.wait()
            threads.append(threading.current_thread().name)
            job(*given)

        return run

    for name in ("_write", "_write_extents", "_read"):
        setattr(disk, name, held(getattr(disk, name)))
    first, second = sequence_of(16, id=1), sequence_of(16, id=2)
    parking.park(second, [4, 5, 6, 7], Tier.RAM)
    assert one(parking).ending is Ending.DONE
    parking.park(first, [0, 1, 2, 3], Tier.DISK)  # nobody waits here, though the disk does
    parking.move_to_disk(second)
    assert parking.landed() == [] and threads == []
    is_free.set()
    endings: list[Ending] = []
    while len(endings) < 2:
        endings += [each.ending for each in parking.landed()]
    assert set(endings) == {Ending.DONE, Ending.MOVED}
    assert restore(parking, first, [8, 9, 10, 11]).ending is Ending.DONE
    assert len(threads) == 3 and all(name.startswith("pyserve-disk") for name in threads)
    assert disk._staging_buffer().data_ptr() % mmap.PAGESIZE == 0
    parking.close()


def test_a_large_copy_has_more_time_and_so_has_one_behind_it(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv)
    parking._kv.page_bytes *= 10**6  # as if the pages were large
    for id in range(2):
        parking.park(sequence_of(16, id=id), [0, 1, 2, 3], Tier.DISK)
    first, second = parking._copies.values()
    assert first.deadline_s - first.started_s > parking.deadline_s + first.num_bytes / 10e6
    assert second.deadline_s - second.started_s > parking.deadline_s + 2 * first.num_bytes / 10e6
    parking._kv.page_bytes //= 10**6
    parking.close()


def test_the_limit_holds_and_what_ends_gives_its_room_back(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv, limit_bytes=10 * kv.page_bytes)
    assert parking.disk_free_pages() == 10
    first, second = sequence_of(16, id=1), sequence_of(20, id=2)
    park(parking, first, [0, 1, 2, 3], Tier.DISK)
    park(parking, second, [4, 5, 6, 7, 8], Tier.DISK)
    assert parking.disk_free_pages() == 1
    parking.discard([first])
    assert parking.disk_free_pages() == 5
    settled(parking)
    assert parking.disk is not None and len(list(parking.disk.folder.glob("*.pages"))) == 1
    parking.close()


def test_a_sequence_that_ends_while_its_file_is_written_leaves_none(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv)
    sequence = sequence_of(40)
    parking.park(sequence, list(range(10)), Tier.DISK)
    parking.discard([sequence])
    while not parking.landed():
        time.sleep(0.001)
    settled(parking)
    assert parking.disk_bytes == 0
    assert parking.disk is not None and list(parking.disk.folder.glob("*.pages")) == []
    parking.close()


def test_after_a_failure_the_tier_takes_nothing_for_a_while(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_on(tmp_path, kv)
    assert parking.disk is not None
    parking.disk.folder.joinpath("0.pages").mkdir()  # the first file cannot be made
    assert park(parking, sequence_of(8), [0, 1], Tier.DISK).ending is Ending.FAILED
    now_s = time.monotonic()
    assert parking.disk.free_pages(now_s) == 0 and parking.disk.free_pages(now_s + 31) > 0
    assert parking.disk_bytes == 0
    parking.close()


LEAVE_A_FILE = """
import os, sys
from pathlib import Path
from tests.engine.test_park_disk import parking_on
from tests.engine.parked import park, sequence_of, small_store
from pyserve.sequence import Tier
parking = parking_on(Path(sys.argv[1]), small_store())
park(parking, sequence_of(8), [0, 1], Tier.DISK)
os._exit(1)  # as if killed
"""


def test_what_a_killed_server_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVE_A_FILE, str(tmp_path)], check=False, cwd=Path(__file__).parents[2])
    (left,) = tmp_path.iterdir()
    assert list(left.glob("*.pages"))
    users = tmp_path / "notes.pages"
    users.write_text("not ours")
    with_a_note = tmp_path / "pyserve-parked-1-0"
    with_a_note.mkdir()
    with_a_note.joinpath("note.txt").write_text("not ours either")
    other = parking_on(tmp_path, small_store())
    assert not left.exists()
    assert users.read_text() == "not ours" and with_a_note.joinpath("note.txt").exists()
    second = parking_on(tmp_path, small_store())
    assert other.disk is not None and other.disk.folder.exists(), "another server's folder is in use"
    for parking in (other, second):
        parking.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.pages", "pyserve-parked-1-0"]


def test_a_directory_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    kv = small_store(2)
    for directory in (file, file / "below", Path("/proc/pyserve")):
        for use in (check_directory, lambda at: DiskTier(at, limit_bytes=MIB, pool=kv.tensor, stream=CopyStream())):
            with pytest.raises(SettingsError, match=f"--preempt-disk {directory}: ") as refused:
                use(directory)
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_known_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SettingsError, match=f"^--preempt-disk {tmp_path}: {os.strerror(number)}$"):
        check_directory(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the probe was left"


def test_a_disk_whose_rest_is_left_to_others_is_known_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=256 << 20))
    with pytest.raises(SettingsError, match="the disk is full; 256 MiB of it are left to others"):
        check_directory(tmp_path)


def test_a_directory_that_is_fine_is_made_and_left_empty(tmp_path: Path) -> None:
    check_directory(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
