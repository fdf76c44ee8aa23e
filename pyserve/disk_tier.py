"""THE DISK TIER: parked state in files, written and read by a thread of its own (R23).

Structure. Each parked sequence is one file of whole pages in list order, beside its hashes, which stay in memory. The
files lie in a folder of this process within the directory that the user named (disk_folder.py). Unless nothing is to be
verified every page has a hash: beside a disk it costs nothing. Those of the pool get theirs as they are copied out of
it; pages that come from memory keep the one that they have, which is older, and get one here where they have none.

A job moves pages in large pieces through one aligned staging buffer: pool -> staging by the copy stream, staging ->
file; and back. It runs in the tier's thread from end to end, so it never meets the event loop; `DiskEvent` says how it
went, with the same meaning as the copy stream's events. Jobs run one after the other.

Failure. A full disk, a folder that is gone or not writable, a file that is cut short: the job fails, which costs one
log line and the computing of that sequence's tokens, and the tier takes nothing for a while. Altered files are found
by the hashes.

Not handled: bypassing the system's page cache. The machine's free memory, which the RAM tier watches, counts cached
file pages as free.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from pyserve.disk_folder import SUFFIX, make_folder, remove_folder, space_of
from pyserve.errors import SettingsError
from pyserve.host_arena import Extent
from pyserve.ops import CopyFailed, CopyStream, PageRow, comb_table

_PIECE_BYTES = 8 << 20
_RETRY_S = 30.0


class DiskEvent:
    """Stands for one job of the disk thread; `query`, `wait` and `copy_s` as those of a copy's event."""

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._error: CopyFailed | None = None
        self.copy_s = 0.0

    def query(self) -> bool:
        if not self._is_done.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        self._is_done.wait(timeout_s)
        return self.query()

    def finish(self, copy_s: float, error: CopyFailed | None = None) -> None:
        self.copy_s = copy_s
        self._error = error
        self._is_done.set()


@dataclass(eq=False, slots=True)
class ParkFile:
    """One sequence's pages on disk. `hashes` int64 [num_pages]; 0 where none was taken."""

    path: Path
    num_pages: int
    hashes: torch.Tensor
    is_dropped: bool = False  # nobody wants it any more: a job in progress stops, and the file goes


class DiskTier:
    """Files of parked pages within `limit_bytes`. Raises SettingsError when `directory` cannot be used."""

    def __init__(self, directory: Path, *, limit_bytes: int, pool: torch.Tensor, stream: CopyStream) -> None:
        self._pool = pool
        self._page_bytes = pool[0].numel() * pool.element_size()
        self._stream = stream
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self._retry_at_s = float("-inf")
        self._names = itertools.count()
        self._thread = ThreadPoolExecutor(1, "pyserve-disk")
        self._piece_pages = max(1, _PIECE_BYTES // self._page_bytes)
        self._staging: torch.Tensor | None = None  # made by the first job
        try:
            self.folder, self._lock = make_folder(directory)
            self._space_bytes = space_of(self.folder)
        except OSError as error:
            raise SettingsError(f"--preempt-disk {directory}: {error.strerror or error}") from error

    def free_pages(self, now_s: float) -> int:
        """Pages that may still be parked here; 0 for a while after a failure."""
        if now_s < self._retry_at_s:
            return 0
        return max(0, min(self._limit_bytes - self.held_bytes, self._space_bytes)) // self._page_bytes

    def failed(self, now_s: float) -> None:
        """A job has failed: take nothing for a while."""
        self._retry_at_s = now_s + _RETRY_S

    def write(self, pages: PageRow, *, is_hashed: bool) -> tuple[ParkFile, DiskEvent]:
        """Post the copy of the pool's `pages` to a new file. Nobody changes them while it goes on."""
        file = self._new_file(len(pages), torch.full((len(pages),), int(is_hashed), dtype=torch.int64))
        return file, self._post(lambda: self._write(file, pages))

    def write_extents(self, extents: Items[Extent], *, is_hashed: bool) -> tuple[ParkFile, DiskEvent]:
        """Post the move of pages from the host arena to a new file. The extents must stay until it has ended; their
        hashes stay what they are, since the move may be called off.
        """
        hashes = torch.cat([each.slab.hashes[each.first : each.first + each.count] for each in extents])
        file = self._new_file(sum(each.count for each in extents), hashes)
        return file, self._post(lambda: self._write_extents(file, extents, is_hashed))

    def read(self, file: ParkFile, pages: PageRow, first: int) -> DiskEvent:
        """Post the copy of a file's pages, from number `first` on, into the pool's `pages`. Nobody changes these."""
        return self._post(lambda: self._read(file, pages, first))

    def drop(self, file: ParkFile) -> None:
        """The file is not wanted any more. A job that works on it stops."""
        if not file.is_dropped:
            file.is_dropped = True
            self.held_bytes -= file.num_pages * self._page_bytes
            self._thread.submit(self._unlink, file)

    def close(self) -> None:
        """Wait for the job at work, remove the folder."""
        self._thread.shutdown()
        remove_folder(self.folder)
        self._lock.close()
        self.held_bytes = 0

    def _new_file(self, num_pages: int, hashes: torch.Tensor) -> ParkFile:
        num_bytes = num_pages * self._page_bytes
        self.held_bytes += num_bytes
        self._space_bytes -= num_bytes
        return ParkFile(self.folder / f"{next(self._names)}{SUFFIX}", num_pages, hashes)

    # In the tier's thread

    def _post(self, job: Callable[[], None]) -> DiskEvent:
        event = DiskEvent()

        def run() -> None:
            started_s = time.monotonic()
            error: CopyFailed | None = None
            try:
                job()
            except CopyFailed as failure:
                error = failure
            except OSError as failure:
                error = CopyFailed(f"{failure.filename or self.folder}: {failure.strerror or failure}")
            except Exception as failure:
                error = CopyFailed(str(failure))
            event.finish(time.monotonic() - started_s, error)

        self._thread.submit(run)
        return event

    def _write(self, file: ParkFile, pages: PageRow) -> None:
        staging = self._staging_buffer()
        with file.path.open("xb", buffering=0) as out:
            for first in range(0, len(pages), self._piece_pages):
                piece = pages[first : first + self._piece_pages]
                hashes = file.hashes[first : first + len(piece)]
                self._check_wanted(file)
                self._stream.copy_pages(
                    self._pool,
                    staging[: len(piece) * self._page_bytes],
                    comb_table(piece),
                    True,
                    hashes=hashes,
                ).wait()
                _write_all(out, staging[: len(piece) * self._page_bytes])

    def _write_extents(self, file: ParkFile, extents: Items[Extent], is_hashed: bool) -> None:
        number = 0
        with file.path.open("xb", buffering=0) as out:
            for extent in extents:
                data = extent.slab.data
                end = extent.first + extent.count
                for first in range(extent.first, end, self._piece_pages):
                    last = min(end, first + self._piece_pages)
                    self._check_wanted(file)
                    piece = data[first * self._page_bytes : last * self._page_bytes]
                    if is_hashed:
                        self._stream.hash_pages(piece, file.hashes[number : number + last - first])
                    _write_all(out, piece)
                    number += last - first

    def _read(self, file: ParkFile, pages: PageRow, first: int) -> None:
        staging = self._staging_buffer()
        with file.path.open("rb", buffering=0) as source:
            source.seek(first * self._page_bytes)
            for start in range(0, len(pages), self._piece_pages):
                piece = pages[start : start + self._piece_pages]
                hashes = file.hashes[first + start : first + start + len(piece)]
                self._check_wanted(file)
                wanted = staging[: len(piece) * self._page_bytes]
                if not _read_all(source, wanted):
                    raise CopyFailed(f"{file.path} is cut short")
                self._stream.copy_pages(self._pool, wanted, comb_table(piece), False, hashes=hashes).wait()

    def _check_wanted(self, file: ParkFile) -> None:
        if file.is_dropped:
            raise CopyFailed("the sequence has ended")

    def _unlink(self, file: ParkFile) -> None:
        with contextlib.suppress(OSError):  # the folder is gone, or not ours any more: the next write says so
            file.path.unlink(missing_ok=True)
            self._space_bytes = space_of(self.folder)

    def _staging_buffer(self) -> torch.Tensor:
        if self._staging is None:
            memory = mmap.mmap(-1, self._piece_pages * self._page_bytes)
            self._staging = torch.frombuffer(memory, dtype=torch.uint8)
        return self._staging


def _write_all(out: IO[bytes], data: torch.Tensor) -> None:
    left = memoryview(data.numpy().data)
    while left:
        left = left[out.write(left) :]


def _read_all(source: IO[bytes], data: torch.Tensor) -> bool:
    """Whether there was enough to fill `data`."""
    left = memoryview(data.numpy().data)
    while left:
        num_read = source.readinto(left)  # type: ignore[attr-defined]
        if not num_read:
            return False
        left = left[num_read:]
    return True
