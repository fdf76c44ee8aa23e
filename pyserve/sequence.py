"""One sequence: a prompt with its continuation, and where it stands on its way through slots, pool and tiers."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyserve.prefix import Node
    from pyserve.types import SequenceRequest


class State(Enum):
    """A sequence's place. Only RUNNING ones get rows; PREEMPTING and RESTORING ones have a copy in flight."""

    WAITING = "waiting"  # no slot yet
    RUNNING = "running"
    PREEMPTING = "preempting"  # its pages are being copied out, and are its own until the copy lands
    PREEMPTED = "preempted"  # parked: a slot, no pages
    RESTORING = "restoring"  # its pages are reserved and being filled
    FINISHED = "finished"


class Tier(StrEnum):
    """Where the state of a parked sequence is."""

    RAM = "ram"
    DISK = "disk"
    RECOMPUTE = "recompute"  # nowhere: its tokens are computed again

    @property
    def is_copy(self) -> bool:
        """It takes a copy to get there, and one to come back."""
        return self is not Tier.RECOMPUTE


class Sequence:
    """One prompt with its continuation. Changed by the ledger alone; compared by identity.

    `index` is the sequence's place in its request and `group_id` names the request. `prompt_leader` is the id of
    the sequence with the same prompt that computes it first; this one is not admitted before that one has computed
    its prompt or ended, so that it finds the prompt in the cache.
    """

    __slots__ = (
        "cache_node",
        "debt",
        "entry_debt",
        "group_id",
        "id",
        "index",
        "is_refusal_told",
        "max_cells",
        "next_count_len",
        "num_cached",
        "num_computed",
        "num_forced_parks",
        "num_known",
        "num_parks",
        "pages",
        "parked_at_ms",
        "parked_cells",
        "preempted_ms",
        "progress",
        "prompt_leader",
        "prompt_len",
        "request",
        "resident_since_ms",
        "slot",
        "state",
        "tier",
        "tokens",
        "waiting_since_ms",
    )

    def __init__(
        self, id: int, request: SequenceRequest, group_id: int, index: int = 0, prompt_leader: int | None = None
    ) -> None:
        self.id = id
        self.request = request
        self.group_id = group_id
        self.index = index
        self.prompt_leader = prompt_leader
        self.slot: int | None = None
        self.state = State.WAITING
        self.tokens = list(request.prompt)  # prompt, then what was generated
        self.prompt_len = len(request.prompt)
        self.num_computed = 0  # tokens whose K and V are in its pages, or in its parked copy
        self.num_cached = 0  # prompt tokens taken from the prompt cache at admission
        self.num_known = 0  # prompt tokens that the prompt cache had when it was submitted
        self.pages: list[int] = []  # at least ceil(num_computed / page_size); more where room is reserved
        self.num_parks = 0
        self.parked_at_ms: float | None = None
        self.tier: Tier | None = None
        self.parked_cells = 0  # cells in the parked copy
        self.preempted_ms = 0.0
        # The planner's own bookkeeping.
        self.max_cells = 0  # the most cells it can ever need
        self.debt = 0  # pages that its next step and runway need beyond those it holds
        self.entry_debt = 0  # the same with the runway that is clear when somebody enters
        self.next_count_len = 0  # the number of tokens at which its pages and debts are looked at again
        self.progress = 0  # how far num_computed ever was when it last entered the pool, or was set back
        self.resident_since_ms = 0.0  # since it was brought in, and may run
        self.waiting_since_ms: float | None = None  # since it heads the waiting queue
        self.num_forced_parks = 0
        self.is_refusal_told = False  # the refusal of its rotation was reported for this park
        self.cache_node: Node | None = None  # the last of its pages that the prompt cache knows; None: do not register

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def is_generating(self) -> bool:
        """Its prompt was computed; a recomputation after a park does not undo that."""
        return self.num_computed >= self.prompt_len or len(self.tokens) > self.prompt_len

    @property
    def furthest(self) -> int:
        """The most that num_computed ever was; a recomputation does not cost a place."""
        return max(self.progress, self.num_computed)

    @property
    def has_advanced(self) -> bool:
        """It has computed something that it had not when it entered the pool."""
        return self.num_computed > self.progress

    def recompute(self) -> None:
        """What was computed is nowhere any more."""
        self.tier = Tier.RECOMPUTE
        self.progress = self.furthest
        self.num_computed = self.parked_cells = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.state.value}, computed {self.num_computed} of {len(self.tokens)}, "
            f"{len(self.pages)} pages)"
        )


def make_group(requests: Items[SequenceRequest], group_id: int, first_id: int) -> list[Sequence]:
    """The sequences of one request, with ids from `first_id` on. The first with a prompt leads the others with it."""
    leaders: dict[tuple[int, ...], int] = {}  # prompt -> the sequence that computes it for the others
    group: list[Sequence] = []
    for index, request in enumerate(requests):
        group.append(Sequence(first_id + index, request, group_id, index, leaders.get(request.prompt)))
        leaders.setdefault(request.prompt, first_id + index)
    return group


def pass_leadership(leader: Sequence, waiting: Iterable[Sequence]) -> None:
    """`leader` ended before its prompt was computed: the first that waited for it computes it for the others."""
    heir: Sequence | None = None
    for sequence in waiting:
        if sequence.prompt_leader == leader.id:
            sequence.prompt_leader = heir.id if heir is not None else None
            heir = heir or sequence
