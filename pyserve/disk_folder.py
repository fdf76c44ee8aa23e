"""The disk tier's folder: whether a directory can take parked state, and a folder of this process in it.

The folder holds a lock file: a folder whose lock nobody holds was left by a process that has died, and is removed at
the next start, with the files of ours in it and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

from pyserve.errors import SettingsError

SUFFIX = ".pages"
_FOLDER = "pyserve-parked-"
_LOCK = "lock"
_RESERVE_BYTES = 256 << 20  # of the disk, left to others
_PROBE_BYTES = 1 << 16


def check_directory(directory: Path) -> None:
    """Make the directory and write to it. Raises SettingsError, one line, when it cannot take parked state."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f"{_FOLDER}probe-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with probe.open("xb", buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
                os.fsync(file)
        finally:
            probe.unlink(missing_ok=True)
        space_bytes = space_of(directory)
    except OSError as error:
        raise SettingsError(f"--preempt-disk {directory}: {error.strerror or error}") from error
    if space_bytes <= 0:
        raise SettingsError(
            f"--preempt-disk {directory}: the disk is full; {_RESERVE_BYTES >> 20} MiB of it are left to others"
        )


def space_of(directory: Path) -> int:
    """Bytes that parked state may take there at most; negative when others need them."""
    return shutil.disk_usage(directory).free - _RESERVE_BYTES


def make_folder(directory: Path) -> tuple[Path, IO[str]]:
    """A new folder of this process, locked until the file is closed. What dead processes left is removed first.

    Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"{_FOLDER}*"):
        try:
            _locked(left).close()
        except OSError:  # in use, or not a folder of ours
            continue
        remove_folder(left)
    folder = directory / f"{_FOLDER}{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)  # what chats say can be read from their keys and values
    return folder, _locked(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder with our files in it; whatever else is there stays, and so does the folder then."""
    with contextlib.suppress(OSError):
        for path in [*folder.glob(f"*{SUFFIX}"), folder / _LOCK]:
            path.unlink(missing_ok=True)
        folder.rmdir()


def _locked(folder: Path) -> IO[str]:
    """Hold the folder's lock until the file is closed. Raises OSError when another process holds it."""
    lock = (folder / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock
