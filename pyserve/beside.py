"""What the engine does beside a step that runs, so that the step behind it starts in time and with everybody.

The next step is started behind it, if decoding is all there is to do (`look_ahead`): it takes its tokens from the one
that runs without the loop. Neither a park nor a restore stops that, so that those who are not parked do not notice:

- Whoever is to be parked is left out of the step that is looked ahead. When that one runs, nobody touches the pages of
  the one left out, and it is parked (`park`).
- Whoever is back from a park and was in no step since knows its token, and is in the next one that is looked ahead.

A copy that is posted before a step or beside it has until the end of that step to land (`have_landed`), and nothing is
looked ahead before it has: otherwise its sequence would miss a step more, for the park and for the restore each. So
whoever is parked and finds room at once comes back while the same step runs, and misses no other; on CUDA too, where a
copy waits on the device for the step collected last, and not for the one that runs. A copy that takes longer costs the
others one wait of the program for the loop; while it goes on, steps are looked ahead as ever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from pyserve.company import Company
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
    ) -> None:
        self._ledger = ledger
        self._transfers = transfers
        self._steps = steps
        self._watch = watch
        self._tasks = tasks
        self._is_park_due = False  # the step that was looked ahead left somebody out

    def park(self, begun: Begun) -> list[Sequence]:
        """Park whoever the step that runs was started without for that, if that is all there is to do. Returns them."""
        if not self._is_park_due:
            return []
        self._is_park_due = False
        now_s = time.monotonic()
        plan = self._transfers.plan(now_s)
        inside = {each.id for each in begun.step.rows.sequences}
        if not plan.has_nothing_but_parks or any(park.sequence.id in inside for park in plan.parks):
            return []
        self._ledger.apply(replace(plan, rows=Rows()), now_s * 1e3)
        self._transfers.start(plan.parks, ())
        return plan.moved

    async def have_landed(self, sequences: list[Sequence], begun: Begun) -> bool:
        """Whether the copies of these, posted before the step that runs or beside it, end before it does; then those
        that can come back have, or their copies have been given as long.
        """
        while any(map(self._transfers.is_copying, sequences)):
            self._transfers.collect()  # a small copy has ended by now, and need not be waited for in a thread
            if any(map(self._transfers.is_copying, sequences)):
                await self._watch.wait(begun.done)
                self._transfers.collect()
                if begun.done.done():
                    return False
            sequences = sequences + self._restore(begun)
        return True

    def _restore(self, begun: Begun) -> list[Sequence]:
        """Bring back those for whom there is room, if that is all there is to do. Returns them.

        Only while no sequence in the step that runs has ended: then it writes to no page that is free.
        """
        if any(each.id not in self._tasks for each in begun.step.rows.sequences):
            return []
        now_s = time.monotonic()
        plan = self._transfers.plan(now_s)
        if not plan.restores or plan.parks or plan.admissions or plan.failures or plan.refused_rotation:
            return []
        self._ledger.apply(replace(plan, rows=Rows()), now_s * 1e3)
        self._transfers.start((), plan.restores)
        return plan.moved

    def look_ahead(self, begun: Begun, company: Company | None) -> Begun | None:
        """Start the decode step behind the one that runs, if that is all there is to do, for those who go on.
        `company`: of those who decoded together last; while they go on together, nobody has to look at each of them.

        Whether one ends by its token is not known yet: its row is computed for nobody then.
        """
        if not self._steps.can_start_behind(begun):
            return None
        running = begun.step.rows
        is_known = company is not None and company.sequences is running.sequences and company.do_all_go_on
        now_s = time.monotonic()
        if is_known and self._ledger.may_repeat(running, now_s * 1e3):
            return self._steps.repeat(begun)
        plan = self._transfers.plan(now_s)
        leaving = {park.sequence.id for park in plan.parks}
        places = [
            place
            for place, sequence in enumerate(running.sequences)
            if sequence.id not in leaving and self._goes_on(sequence)
        ]
        rows = self._ledger.follow(running, places, plan)
        if rows is None:
            return None
        ahead = self._steps.start_behind(rows, places + [-1] * (len(rows) - len(places)))
        self._is_park_due = ahead is not None and bool(leaving)
        return ahead

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence in the running step wants another token after it, if that is not one to stop at."""
        task = self._tasks.get(sequence.id)
        return task is not None and len(sequence.tokens) + 1 < task.end_len
