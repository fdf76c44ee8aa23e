"""A copy stream that goes wrong on demand: the double of a device with faults."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from pyserve.ops import CopyFailed, CopyStream


class FaultyStream:
    """The real stream, but for the copies that `fault` names: it says for the number of a copy what happens to it.

    refuse      posting raises
    fail        the first page is copied, then the copy fails
    hang        it does not begin before `release` is called
    query       it goes well, but asking for it raises twice before it answers
    flip        a bit of host memory flips after a copy out, before a copy back
    """

    def __init__(self, fault: Callable[[int, bool], str | None]) -> None:
        self.real = CopyStream()
        self.fault = fault
        self.num_posted = 0
        self.num_faults = 0
        self.hung: list[HungEvent] = []

    def copy_pages(
        self, pool: torch.Tensor, host: torch.Tensor, pages: torch.Tensor, to_host: bool, **options: Any
    ) -> Any:
        fault = self.fault(self.num_posted, to_host)
        self.num_posted += 1
        self.num_faults += fault is not None
        post = lambda: self.real.copy_pages(pool, host, pages, to_host, **options)  # noqa: E731
        if fault == "refuse":
            raise RuntimeError("the device takes no more copies")
        if fault == "fail":
            first = pages[:1].clone()
            first[0, 1:4] = 1
            return FailedEvent(self.real.copy_pages(pool, host, first, to_host))
        if fault == "hang":
            self.hung.append(HungEvent(post))
            return self.hung[-1]
        if fault == "query":
            return ShyEvent(post())
        if fault == "flip":
            host[int(pages[0, 4]) * (pool[0].numel() * pool.element_size()) + 5] ^= 16
        return post()

    def release(self) -> None:
        """Copies that hang begin."""
        for event in self.hung:
            event.begin()

    def close(self) -> None:
        self.release()
        self.real.close()


class GatedStream:
    """The real stream, but a copy begins only when it is let through, and then goes well or fails."""

    def __init__(self) -> None:
        self.real = CopyStream()
        self.held: deque[HungEvent] = deque()
        self.is_open = False

    def copy_pages(
        self, pool: torch.Tensor, host: torch.Tensor, pages: torch.Tensor, to_host: bool, **options: Any
    ) -> Any:
        post = lambda: self.real.copy_pages(pool, host, pages, to_host, **options)  # noqa: E731
        if self.is_open:
            return post()
        self.held.append(HungEvent(post))
        return self.held[-1]

    def let_through(self, is_good: bool = True) -> None:
        """The copy that has waited longest."""
        if self.held:
            event = self.held.popleft()
            if not is_good:
                event.error = CopyFailed("the device lost the copy")
            event.begin()

    def open(self) -> None:
        """Nothing is held back any more."""
        self.is_open = True
        while self.held:
            self.let_through()

    def close(self) -> None:
        self.open()
        self.real.close()


class FailedEvent:
    copy_s = 0.0

    def __init__(self, real: Any) -> None:
        self.real = real

    def query(self) -> bool:
        if self.real.query():
            raise CopyFailed("the device lost the copy half way")
        return False

    def wait(self, timeout_s: float | None = None) -> bool:
        return bool(self.real.wait(timeout_s)) and self.query()


class HungEvent:
    copy_s = 0.0

    def __init__(self, post: Callable[[], Any]) -> None:
        self.post = post
        self.real: Any = None
        self.error: CopyFailed | None = None  # what becomes of it once it has run
        self.has_begun = threading.Event()

    def begin(self) -> None:
        if self.real is None:
            self.real = self.post()
            self.has_begun.set()

    def query(self) -> bool:
        if self.real is None or not self.real.query():
            return False
        if self.error is not None:
            raise self.error
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.has_begun.wait(timeout_s) and bool(self.real.wait(timeout_s))


class ShyEvent:
    copy_s = 0.0

    def __init__(self, real: Any) -> None:
        self.real = real
        self.num_asked = 0

    def query(self) -> bool:
        self.num_asked += 1
        if self.num_asked <= 2:
            raise RuntimeError("an unrelated launch failed")
        return bool(self.real.query())

    def wait(self, timeout_s: float | None = None) -> bool:
        return bool(self.real.wait(timeout_s))
