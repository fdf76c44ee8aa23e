"""THE ONE ENGINE TASK.

Purpose. One asyncio task owns the ledger, the pool and the model. Everything that changes them happens in it, between
two awaits, so there is no lock anywhere.

One iteration (`_iterate`).
1. Copies that landed: parks free their pages, restores make their sequence runnable.
2. The inbox: new requests and cancels.
3. The ledger plans and applies: evictions, parks, restores, admissions, rows.
4. Park and restore copies are posted to the copy stream.
5. The step starts, in a thread of the program's that needs no interpreter lock and tells the loop through a descriptor.
6. While it runs, the events of the previous step go to their clients (`put` and `put_tokens`, which never wait).
7. Copies of this iteration land while it runs, and those that can come back do (`Beside`). If nothing but decoding is
   to be done then, the next step is started behind it: it takes its tokens from this one without the loop, and the next
   iteration finds it running and leaves out 3 to 5, but for parks of those that the step was started without.
8. The step is awaited; sampled tokens extend their sequences; those that are done leave their slots.

Guarantees. A step that runs does not read or write a page in transfer: a copy out that is posted beside it is of a
sequence that is not in it, and one back is posted only while none of its sequences has ended, whose pages would be
free. A sequence ends exactly once, by `_end`, whatever ended it: it leaves the ledger, its host state is given back,
its client gets one last event. A cancel takes effect at the start of the next iteration, that is within one step; a row
of it that was looked ahead is computed for nobody. A step that fails ends the sequences in it and no other. An error in
the engine itself ends every sequence with a message and the engine goes on.

With `is_async` off, each copy is awaited where it is posted, and the plan is made again with the pages that it freed.

Idle, the task sleeps on an event. With nothing to run and a copy in flight it waits for the copy in a worker thread.
If a request waits and neither is the case, the watchdog says so in the log and in the snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial

from pyserve.beside import Beside
from pyserve.company import Companies, Company
from pyserve.copy_watch import CopyWatch
from pyserve.errors import BrokenLogits, PoolExhausted, PyserveError, StepFailed, Unavailable
from pyserve.generation import Generation
from pyserve.ledger import Ledger
from pyserve.park import Parking
from pyserve.plan import Failure, Plan, Rows
from pyserve.runner import Runner, StepResult
from pyserve.sequence import Sequence, make_group
from pyserve.snapshot import take_snapshot
from pyserve.steps import Begun, Steps
from pyserve.task import Task, end_len_of
from pyserve.transfers import Transfers
from pyserve.types import (
    Counters,
    EngineInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    PromptProgress,
    SequenceRequest,
    Snapshot,
    Started,
    Token,
)

log = logging.getLogger("pyserve.engine")

_STUCK_WAIT_S = 1.0
_REST_S = 0.02
_PROMPT_STEP_TOKENS = 64  # a step with so many prompt tokens tells how fast prompts are computed


class Engine:
    """The task and its state. Callers use `EngineHandle`."""

    def __init__(self, info: EngineInfo, ledger: Ledger, runner: Runner, parking: Parking) -> None:
        self.info = info
        self.counters = Counters()
        self._observe = self.counters.observe
        self.is_draining = False
        self._ledger = ledger
        self._runner = runner
        self._parking = parking
        self._tasks: dict[int, Task] = {}  # sequence id -> its task, from submit to end
        self._arrivals: list[list[Sequence]] = []
        self._cancels: list[tuple[int, bool]] = []  # sequence id, whether its answer is complete
        self._outbox: list[Callable[[], None]] = []  # each queues some events for their clients; in order
        self._next_id = 0  # of sequences; a group's is its first sequence's
        self._transfers = Transfers(ledger, parking, runner.pages_of, self._tasks, self.counters, self._post)
        self._wake = asyncio.Event()
        self._steps = Steps(runner)
        self._copy_watch = CopyWatch(parking)
        self._beside = Beside(ledger, self._transfers, self._steps, self._copy_watch, self._tasks)
        self._gaps: list[float] = []  # seconds between tokens, of the step that is being counted
        self._companies = Companies(ledger, self._tasks)
        self._ahead: Begun | None = None  # the step behind the one that was awaited last
        self._is_stopping = self._is_stuck = False
        self._last_step_at_s = time.monotonic()
        self._snapshot: Snapshot | None = None  # of this iteration, once somebody has asked
        self.is_empty = asyncio.Event()  # no request is open
        self.is_empty.set()

    # --- for the handle

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = take_snapshot(
                self._ledger, self._parking, self._tasks, last_step_at_s=self._last_step_at_s, is_stuck=self._is_stuck
            )
        return self._snapshot

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, less those that the free slots can take."""
        num_free = sum(self._ledger.sequence_in_slot(slot) is None for slot in range(self.info.num_slots))
        return self._ledger.num_waiting + sum(len(group) for group in self._arrivals) - num_free

    def submit(self, requests: Items[SequenceRequest], request_id: str) -> Generation:
        """Queue the sequences of one request; the caller has checked them."""
        now_s, first_id = time.monotonic(), self._next_id
        self._next_id += len(requests)
        generation = Generation(len(requests), lambda index, is_complete: self._cancel(first_id + index, is_complete))
        group = make_group(requests, group_id=first_id, first_id=first_id)
        for sequence in group:
            end_len = end_len_of(sequence, self.info.context_len)
            self._tasks[sequence.id] = Task(sequence, generation, request_id, submitted_s=now_s, end_len=end_len)
        self._arrivals.append(group)
        self.is_empty.clear()
        self._wake.set()
        return generation

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.set()

    def _cancel(self, sequence_id: int, is_complete: bool) -> None:
        self._cancels.append((sequence_id, is_complete))
        self._wake.set()

    # --- the task

    async def run(self) -> None:
        """The engine task; ends after `stop`, when every copy has landed."""
        self._steps.open()
        try:
            while not self._is_stopping:
                try:
                    await self._iterate()
                except Exception as error:
                    log.exception("the engine failed; every running request ends, the server goes on")
                    self._ahead = None
                    await self._steps.abandon()
                    self._end_all(StepFailed(f"the engine failed: {error}"))
                    self._transfers.recover()
        finally:
            self._end_all(Unavailable("the server is shutting down"))
            self._deliver()
            await self._steps.close()
            self._copy_watch.close()
            self._parking.close()

    async def _iterate(self) -> None:
        self._snapshot = None
        self._transfers.collect()
        self._transfers.prepare()
        self._take_inbox()
        begun, self._ahead = self._ahead, None
        if begun is not None:
            moved = self._beside.park(begun)
        else:
            plan = await self._plan_and_apply()
            moved = plan.moved
            self._snapshot = None  # a client may have asked during a synchronous copy
            if not plan.rows:
                self._deliver()
                await self._rest(plan)
                return
            begun = self._steps.start(self._runner.prepare(plan.rows))
        self._deliver()
        is_seen = await self._beside.have_landed(moved, begun)
        self._snapshot = None
        if is_seen and not self._arrivals and not self._cancels:
            self._ahead = self._beside.look_ahead(begun, self._companies.latest)
        await self._finish_step(begun)

    async def _rest(self, plan: Plan) -> None:
        """Nothing to run: wait for a copy, for work, or, if there is work that nothing moves, say so."""
        if plan.parks or plan.restores or plan.admissions or plan.failures or self._arrivals or self._cancels:
            return  # something moved: plan again
        if self._parking.is_busy or self._parking.has_overdue:
            await self._copy_watch.wait()
            return
        self._wake.clear()
        if not self._tasks:  # memory that is still being made has to be given back as well
            await self._sleep(None if self._parking.rest() else _REST_S)
            return
        if not self._is_stuck:
            log.error(
                "nothing runs and no copy is in flight, yet %d sequences wait and %d are parked, with %d pages free",
                self._ledger.num_waiting, self._ledger.num_parked, self._ledger.free_pages,
            )  # fmt: skip
        self._is_stuck = True
        self._snapshot = None
        await self._sleep(_STUCK_WAIT_S)

    async def _sleep(self, timeout_s: float | None) -> None:
        """Until there is work, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    # --- 1 and 2: copies and the inbox

    def _take_inbox(self) -> None:
        cancels, self._cancels = self._cancels, []
        arrivals, self._arrivals = self._arrivals, []
        for group in arrivals:
            self._ledger.submit(group)
        for sequence_id, is_complete in cancels:
            task = self._tasks.get(sequence_id)
            if task is not None:
                if is_complete:
                    self._count_finished(task)
                self.counters.cancelled += not is_complete
                self._end(task, None)

    # --- 3 and 4: plan, apply, post copies

    async def _plan_and_apply(self) -> Plan:
        while True:
            now_s = time.monotonic()
            plan = self._ledger.apply(self._transfers.plan(now_s), now_s * 1e3)
            for admission in plan.admissions:
                self._admitted(self._tasks[admission.sequence.id])
            for failure in plan.failures:
                self._fail_for_room(failure)
            self._transfers.start(plan.parks, plan.restores)
            if plan.refused_rotation is not None:
                log.info("sequence %d waits on: no tier can hold a second one", plan.refused_rotation.id)
            if self.info.is_async or not (plan.parks or plan.restores):
                return plan
            await self._land_everything()

    async def _land_everything(self) -> None:
        while self._parking.is_busy:
            await self._copy_watch.wait()
            self._transfers.collect()

    def _admitted(self, task: Task) -> None:
        task.started_s = time.monotonic()
        self.counters.cached_tokens += task.sequence.num_cached
        self._observe("queue_s", task.started_s - task.submitted_s)
        assert task.sequence.slot is not None
        self._post(task, Started(task.sequence.index, task.sequence.slot))

    def _fail_for_room(self, failure: Failure) -> None:
        self.counters.failed += 1
        task = self._tasks[failure.sequence.id]
        error = PoolExhausted.because(failure.reason, self.info.pool_tokens)
        log.warning("request=%s index=%d: %s", task.request_id, task.sequence.index, error.message)
        self._end(task, error)

    # --- 8: the step

    async def _finish_step(self, begun: Begun) -> None:
        rows = begun.step.rows
        try:
            result = await begun.done
        except Exception as error:
            self._step_failed({each.id for each in rows.sequences}, StepFailed(f"the step failed: {error}"))
            return
        now_s = time.monotonic()
        step_s = now_s - max(begun.started_s, self._last_step_at_s)
        self._last_step_at_s = now_s
        self._is_stuck = False
        if result.broken:
            self._step_failed(result.broken, BrokenLogits())
        company = self._companies.of(rows)
        self._ledger.step_done(rows, result.picked)
        self.counters.generated_tokens += result.num_tokens
        if company is None or result.logprobs or company.has_ending(result.picked):
            self._count(rows, step_s)
            self._took_row_by_row(rows, result, now_s)
        else:
            self.counters.count_step(len(rows), company.longest_len, step_s)
            self._took_together(company, result.picked, now_s)

    def _took_together(self, company: Company, picked: list[int], now_s: float) -> None:
        """In the steady state: everybody has a token, and nobody ends."""
        tasks = company.tasks
        self._observe("inter_token_s", now_s - tasks[0].last_token_s, len(tasks))
        for task in tasks:
            task.last_token_s = now_s
        self._outbox.append(partial(company.hand_over, picked))

    def _took_row_by_row(self, rows: Rows, result: StepResult, now_s: float) -> None:
        tasks = self._tasks
        picked = iter(result.picked)
        for sequence, start, length, samples in rows.columns():
            token = next(picked) if samples else None
            task = tasks.get(sequence.id)
            if task is None:  # it ended after the step was started
                continue
            if not task.first_token_s:
                self._prompt_advanced(task, result, start, length, now_s)
            if token is not None:
                self._took_token(task, token, result, now_s)
        self.counters.observe_all("inter_token_s", self._gaps)
        self._gaps.clear()

    def _step_failed(self, ids: set[int], error: PyserveError) -> None:
        """For these of its sequences; the others go on (R26)."""
        tasks = [self._tasks[id] for id in ids if id in self._tasks]
        if tasks:
            log.error("%d sequences end: %s", len(tasks), error.message)
        for task in tasks:
            self.counters.failed += 1
            self._end(task, error)

    def _prompt_advanced(self, task: Task, result: StepResult, start: int, length: int, now_s: float) -> None:
        sequence = task.sequence
        if start < sequence.prompt_len:
            done = min(start + length, sequence.prompt_len)
            time_ms = (now_s - task.started_s) * 1e3
            self._post(task, PromptProgress(sequence.index, sequence.prompt_len, sequence.num_cached, done, time_ms))
        task.prompt_logprobs.extend(result.prompt_logprobs.get(sequence.id, ()))

    def _took_token(self, task: Task, token: int, result: StepResult, now_s: float) -> None:
        sequence = task.sequence
        request = sequence.request
        if not task.first_token_s:
            self._first_token(task, now_s)
        else:
            self._gaps.append(now_s - task.last_token_s)
        task.last_token_s = now_s
        if request.max_tokens == 0:  # only the prompt was to be scored
            self._finish(task, FinishReason.LENGTH, num_generated=0)
        elif token in request.stop_tokens:
            self._finish(task, FinishReason.STOP, num_generated=task.num_sent)
        else:
            logprobs = result.logprobs.get(sequence.id) if result.logprobs else None
            self._post(task, Token(sequence.index, token, logprobs))
            if len(sequence.tokens) >= task.end_len:
                is_asked_for = request.max_tokens is not None and task.num_sent >= request.max_tokens
                self._finish(task, FinishReason.LENGTH, num_generated=task.num_sent, truncated=not is_asked_for)

    def _first_token(self, task: Task, now_s: float) -> None:
        task.first_token_s = now_s
        self.counters.prompt_tokens += task.sequence.prompt_len - task.sequence.num_cached
        self.counters.prompt_s += now_s - task.started_s
        self._observe("ttft_s", now_s - task.submitted_s)
        if task.sequence.request.prompt_logprobs is not None:
            self._post(task, PromptLogprobs(task.sequence.index, tuple(task.prompt_logprobs)))

    def _count(self, rows: Rows, step_s: float) -> None:
        self.counters.count_step(len(rows), max([len(each.tokens) for each in rows.sequences]), step_s)
        num_prompt_tokens = sum([length for length in rows.lengths if length > 1])
        if num_prompt_tokens >= _PROMPT_STEP_TOKENS:
            self._transfers.rates.prompt.add(num_prompt_tokens, step_s, time.monotonic())

    # --- ends and events

    def _finish(self, task: Task, reason: FinishReason, *, num_generated: int, truncated: bool = False) -> None:
        stats = task.stats(time.monotonic(), num_generated)
        self._count_finished(task)
        self._post(task, Finished(task.sequence.index, reason, stats, truncated))
        self._end(task, None)

    def _count_finished(self, task: Task) -> None:
        self.counters.finished += 1
        self._observe("e2e_s", time.monotonic() - task.submitted_s)

    def _end(self, task: Task, error: PyserveError | None) -> None:
        """The one way out of the engine for a sequence; its last event is queued, or nobody waits for one."""
        if error is not None:
            self._post(task, Failed(task.sequence.index, error, task.stats(time.monotonic(), task.num_sent)))
        if task.first_token_s:
            self.counters.generate_s += task.last_token_s - task.first_token_s
        self._ledger.finish(task.sequence, time.monotonic() * 1e3, is_sound=not isinstance(error, BrokenLogits))
        self._parking.discard([task.sequence])
        del self._tasks[task.sequence.id]
        if not self._tasks:
            self.is_empty.set()

    def _end_all(self, error: PyserveError) -> None:
        self._take_inbox()
        for task in tuple(self._tasks.values()):
            self._end(task, error)

    def _post(self, task: Task, event: Event) -> None:
        self._outbox.append(partial(task.generation.put, event))

    def _deliver(self) -> None:
        outbox, self._outbox = self._outbox, []
        for hand_over in outbox:
            hand_over()
