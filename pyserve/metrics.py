"""The figures of /metrics, in Prometheus' text format, made from the engine's snapshot and counters (R33)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pyserve.histogram import Histogram
from pyserve.types import Counters, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HISTOGRAMS = {  # the engine's name, without its _s -> what it shows
    "queue": ("queue", "Time from arrival to a slot."),
    "ttft": ("time_to_first_token", "Time from arrival to the first token."),
    "inter_token": ("inter_token", "Time between two tokens of a sequence, parks included."),
    "e2e": ("request", "Time from arrival to the end of the answer."),
    "step": ("step", "Time of one step of the model."),
    "preempted": ("preempted", "Time that sequences were parked, per park."),
    "park_copy": ("park_copy", "Time to copy one sequence out of the pool."),
    "restore_copy": ("restore_copy", "Time to copy one sequence back into the pool."),
}


def render(snapshot: Snapshot, counters: Counters) -> bytes:
    """The whole page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(snapshot, counters))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, snapshot: Snapshot, counters: Counters) -> None:
        self._snapshot = snapshot
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, text, value in _counters(self._counters):
            yield CounterMetricFamily(name, text, value=value)
        for name, text, value in (*_rates(self._counters), *_now(self._snapshot)):
            yield GaugeMetricFamily(name, text, value=value)
        yield from _histograms(self._counters)


def _histograms(counters: Counters) -> Iterator[HistogramMetricFamily]:
    for key, (name, text) in HISTOGRAMS.items():
        histogram = counters.histograms.get(f"{key}_s") or Histogram()
        yield HistogramMetricFamily(
            f"pyserve:{name}_seconds", text, buckets=histogram.cumulative(), sum_value=histogram.sum
        )


Figure = tuple[str, str, float]


def _counters(counters: Counters) -> Iterator[Figure]:
    yield "llamacpp:prompt_tokens_total", "Prompt tokens computed.", counters.prompt_tokens
    yield "llamacpp:prompt_seconds_total", "Time spent on prompts.", counters.prompt_s
    yield "llamacpp:tokens_predicted_total", "Tokens generated.", counters.generated_tokens
    yield "llamacpp:tokens_predicted_seconds_total", "Time spent generating.", counters.generate_s
    yield "llamacpp:n_decode_total", "Steps of the model.", counters.steps
    yield "llamacpp:n_preempt_total", "Sequences parked.", counters.preempts
    yield "llamacpp:n_resume_total", "Sequences restored.", counters.resumes
    yield "pyserve:cached_prompt_tokens_total", "Prompt tokens taken from the prompt cache.", counters.cached_tokens
    yield "pyserve:recompute_total", "Restores that computed the tokens again.", counters.recomputes
    yield "pyserve:copy_failed_total", "Parks and restores whose copy failed.", counters.copies_failed
    yield "pyserve:hash_mismatch_total", "Restores of pages that were not what was parked.", counters.hash_mismatches
    yield "pyserve:parked_bytes_total", "Bytes copied out of the pool.", counters.parked_bytes
    yield "pyserve:moved_bytes_total", "Bytes of parked state moved from memory to disk.", counters.moved_bytes
    yield "pyserve:restored_bytes_total", "Bytes copied back into the pool.", counters.restored_bytes
    yield "pyserve:sequences_finished_total", "Sequences that ended well.", counters.finished
    yield "pyserve:sequences_failed_total", "Sequences that ended with an error.", counters.failed
    yield "pyserve:sequences_cancelled_total", "Sequences called off by their client.", counters.cancelled


def _rates(counters: Counters) -> Iterator[Figure]:
    yield "llamacpp:n_tokens_max", "Longest sequence seen, in tokens.", counters.longest_sequence
    yield (
        "llamacpp:prompt_tokens_seconds",
        "Prompt tokens per second.",
        _ratio(counters.prompt_tokens, counters.prompt_s),
    )
    yield (
        "llamacpp:predicted_tokens_seconds",
        "Generated tokens per second.",
        _ratio(counters.generated_tokens, counters.generate_s),
    )
    yield (
        "llamacpp:n_busy_slots_per_decode",
        "Slots in a step, parked ones left out.",
        _ratio(counters.busy_slots, counters.steps),
    )


def _now(snapshot: Snapshot) -> Iterator[Figure]:
    processing = sum(slot.is_processing for slot in snapshot.slots)
    yield "llamacpp:requests_processing", "Slots with a task, parked ones too.", processing
    yield "llamacpp:requests_deferred", "Sequences waiting for a slot.", snapshot.num_waiting
    yield "llamacpp:requests_preempted", "Sequences parked now.", snapshot.requests_preempted
    yield "llamacpp:preempt_ram_bytes", "Host memory for parked state, idle buffers too.", snapshot.preempt_ram_bytes
    yield "pyserve:preempt_disk_bytes", "Bytes of parked state on disk.", snapshot.preempt_disk_bytes
    yield "pyserve:pool_pages", "Pages of the pool.", snapshot.num_pages
    yield "pyserve:pool_pages_free", "Pages that nobody holds.", snapshot.free_pages
    yield "pyserve:pool_pages_cached", "Pages that only the prompt cache holds.", snapshot.cached_pages
    yield "pyserve:pool_pages_held", "Pages that sequences hold.", snapshot.held_pages
    yield "pyserve:pool_pages_in_transfer", "Pages held for a copy in flight.", snapshot.transfer_pages
    used = snapshot.num_pages - snapshot.free_pages - snapshot.cached_pages
    yield "pyserve:pool_use_ratio", "Share of the pool held by sequences and copies.", _ratio(used, snapshot.num_pages)
    yield "pyserve:is_stuck", "1 when something waits and nothing moves.", float(snapshot.is_stuck)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
