"""Measured rates: how fast parked pages come back from each tier, and how fast prompts are computed (R23).

They answer one question: is it quicker to compute a page's tokens again than to fetch the page? Both costs grow with
the pages, so the answer is the same for a short chat and a long one, and belongs to the tier. No answer is given before
enough was measured, and none from figures that are old, so that a tier that was slow for a while gets another try.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyserve.sequence import Tier

_KEPT = 0.9  # share of what was measured before that still counts after one more measurement
_MAX_AGE_S = 60.0
_ENOUGH_BYTES = 16 << 20
_ENOUGH_TOKENS = 1000
_MARGIN = 0.7  # computing must be this much quicker, or nothing changes


@dataclass(slots=True)
class Rate:
    """Something per second, recent measurements first. `enough`: how much must have been measured to be believed."""

    enough: float
    amount: float = 0.0
    seconds: float = 0.0
    measured_at_s: float = float("-inf")

    def add(self, amount: float, seconds: float, now_s: float) -> None:
        if now_s - self.measured_at_s > _MAX_AGE_S:
            self.amount = self.seconds = 0.0
        self.amount = self.amount * _KEPT + amount
        self.seconds = self.seconds * _KEPT + seconds
        self.measured_at_s = now_s

    def per_s(self, now_s: float) -> float | None:
        """None: not known."""
        if self.amount < self.enough or self.seconds <= 0.0 or now_s - self.measured_at_s > _MAX_AGE_S:
            return None
        return self.amount / self.seconds


@dataclass(slots=True)
class Rates:
    """The rates of one server. `page_bytes` and `page_size` are bytes and tokens of a page."""

    page_bytes: int
    page_size: int
    prompt: Rate = field(default_factory=lambda: Rate(_ENOUGH_TOKENS))
    restore: dict[Tier, Rate] = field(
        default_factory=lambda: {tier: Rate(_ENOUGH_BYTES) for tier in (Tier.RAM, Tier.DISK)}
    )

    def slow_tiers(self, now_s: float) -> frozenset[Tier]:
        """Tiers from which a page comes back more slowly than it is computed again."""
        tokens_per_s = self.prompt.per_s(now_s)
        if tokens_per_s is None:
            return frozenset()
        compute_s = self.page_size / tokens_per_s
        slow = set()
        for tier, rate in self.restore.items():
            bytes_per_s = rate.per_s(now_s)
            if bytes_per_s is not None and compute_s < _MARGIN * self.page_bytes / bytes_per_s:
                slow.add(tier)
        return frozenset(slow)
