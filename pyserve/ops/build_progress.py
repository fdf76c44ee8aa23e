"""Says how far a build is, while a compiler works for a minute or more."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 10.0


def num_objects(folder: Path, since_s: float) -> int:
    """Object files in `folder` that were written since `since_s` (time.time())."""
    with suppress(OSError):  # a compiler that fails takes its file away
        return sum(path.stat().st_mtime >= since_s for path in folder.glob("*.o"))
    return 0


def say(what: str) -> None:
    """A line for whoever waits for the server."""
    print(f"building {what}", file=sys.stderr, flush=True)


@contextmanager
def told(name: str, what: str, num_done: Callable[[], int]) -> Iterator[None]:
    """Lines at the begin, every ten seconds and at the end of building `name`. `num_done`: files compiled so far."""
    started, is_over = time.monotonic(), threading.Event()
    say(f"{name} ({what}) ...")

    def watch() -> None:
        while not is_over.wait(INTERVAL_S):
            say(f"{name}: {num_done()} compiled after {time.monotonic() - started:.0f} s")

    watcher = threading.Thread(target=watch, name="build-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
    say(f"{name}: done in {time.monotonic() - started:.0f} s")
