"""What the engine does beside a step that runs, so that the step behind it starts in time and with everybody.

The next step is started behind it, if decoding is all there is to do (`look_ahead`): it takes its tokens from the one
that runs without the loop. A sequence that is not in the one that runs cannot be in the one behind it; such a step is
started by the loop.

So a copy would cost its sequence, beside the steps that it really takes, one that was looked ahead too early, for the
park and for the restore each. Therefore a copy that is posted before a step has until the end of that step to land
(`have_landed`), and nothing is looked ahead before it has. Whoever is parked and finds room at once comes back while
the same step runs, and misses no other; on CUDA, where a copy waits on the device for the step posted before it, one
step later. A copy that takes longer costs the others this one wait of the program for the loop; while it goes on, steps
are looked ahead as ever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from pyserve.copy_watch import CopyWatch
from pyserve.ledger import Ledger
from pyserve.plan import Rows
from pyserve.sequence import Sequence
from pyserve.steps import Begun, Steps
from pyserve.task import Task
from pyserve.transfers import Transfers


class Beside:
    """Works on the engine's own objects, in the engine's task."""

    def __init__(
        self,
        ledger: Ledger,
        transfers: Transfers,
        steps: Steps,
        watch: CopyWatch,
        tasks: Mapping[int, Task],
        context_len: int,
    ) -> None:
        self._ledger = ledger
        self._transfers = transfers
        self._steps = steps
        self._watch = watch
        self._tasks = tasks
        self._context_len = context_len

    async def have_landed(self, sequences: list[Sequence], begun: Begun) -> bool:
        """Whether the copies of these, posted before the step that runs, end before it does; then those that can come
        back have, or their copies have been given as long.

        From its start to here no sequence in that step has ended, so it writes to no page that is free.
        """
        while any(map(self._transfers.is_copying, sequences)):
            self._transfers.collect()  # a small copy has ended by now, and need not be waited for in a thread
            if any(map(self._transfers.is_copying, sequences)):
                await self._watch.wait(begun.done)
                self._transfers.collect()
                if begun.done.done():
                    return False
            sequences = sequences + self._restore()
        return True

    def _restore(self) -> list[Sequence]:
        """Bring back those for whom there is room, if that is all there is to do. Returns them."""
        now_s = time.monotonic()
        plan = self._transfers.plan(now_s)
        if not plan.restores or plan.parks or plan.admissions or plan.failures or plan.refused_rotation:
            return []
        self._ledger.apply(replace(plan, rows=Rows()), now_s * 1e3)
        self._transfers.start((), plan.restores)
        return plan.moved

    def look_ahead(self, begun: Begun) -> Begun | None:
        """Start the decode step behind the one that runs, if that is all there is to do, for those who go on.

        Whether one ends by its token is not known yet: its row is computed for nobody then.
        """
        if not self._steps.can_start_behind(begun):
            return None
        running = begun.step.rows
        places = [place for place, sequence in enumerate(running.sequences) if self._goes_on(sequence)]
        rows = running.following(places)
        plan = self._transfers.plan(time.monotonic())
        is_allowed = bool(places) and self._ledger.may_follow(rows, plan, running)
        return self._steps.start_behind(rows, places) if is_allowed else None

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence in the running step wants another token after it, if that is not one to stop at."""
        task = self._tasks.get(sequence.id)
        if task is None or len(sequence.tokens) >= self._context_len:
            return False
        max_tokens = sequence.request.max_tokens
        return max_tokens is None or task.num_sent + 1 < max_tokens
