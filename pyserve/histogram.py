"""A histogram with fixed bounds, as Prometheus counts: observing is a bisection and three additions."""

from __future__ import annotations

from bisect import bisect_left

# Seconds; from one step of a small model to a conversation that waited for minutes.
TIME_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts of observed values in seconds; `counts[i]` holds those <= `bounds[i]`, the last one the rest."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = TIME_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, int]]:
        """(`le` label, values up to it), ending with "+Inf"."""
        labels = [*(str(bound) for bound in self.bounds), "+Inf"]
        total, buckets = 0, []
        for label, count in zip(labels, self.counts, strict=True):
            total += count
            buckets.append((label, total))
        return buckets
