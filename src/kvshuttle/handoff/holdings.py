"""What the ledger writes down: holdings and where to find them, leases on them, when each ends, what became of them."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.messages import DenyReason
    from kvshuttle.ids import Handle, LeaseId


FIRST_LEASE_S = 2.0
"""A lease on KV that is kept for later turns is granted for no longer than until this much after the keeping's end: its
reader may die at once. Twice the default ``submit_margin_s``, so that a read can still be begun in the last instant."""
LAST_LEASE_S = 5.0
"""After the keeping's end a renewal is good for this long: its reader lives, and nobody can begin anew."""


class EndReason(StrEnum):
    """Why a holding cannot be found any more. Also the metric label of KV kept for later turns."""

    RELEASED = "released"
    """A reader that needed it once, or the router."""
    SUPERSEDED = "superseded"
    """A later turn is held instead."""
    EXPIRED = "expired"
    """Its time was over."""
    PRESSURE = "pressure"
    """The engine needed the blocks."""
    BUDGET = "budget"
    """More was kept than may be."""


@dataclass(slots=True)
class LedgerCounters:
    """How often each thing happened since the start.

    ``holding_ended``: holdings whose blocks were let go of. ``retained_ended``: those of them that were kept for later
    turns, counted already when they could not be found any more.
    """

    granted: int = 0
    kept: int = 0
    refused_full: int = 0
    acquired: int = 0
    denied: Counter[DenyReason] = field(default_factory=Counter)
    renewed: int = 0
    renew_refused: int = 0
    released: int = 0
    lease_expired: int = 0
    holding_ended: Counter[EndReason] = field(default_factory=Counter)
    retained_ended: Counter[EndReason] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Holding:
    """One sequence's blocks under a handle.

    ``is_evictable``: kept for later turns, for as long as nothing else needs the blocks. ``renewal_s``: what each use
    adds to its life. ``why_dropped``: set when it became unfindable; it is kept for the leases on it only.
    """

    handle: Handle
    block_ids: tuple[int, ...]
    chain: TokenChain
    ends_at_s: float
    is_evictable: bool
    renewal_s: float = 0.0
    num_leases: int = 0
    why_dropped: EndReason | None = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """One reader's right to read a holding, whose blocks are kept until it ends."""

    lease_id: LeaseId
    holding: Holding
    ends_at_s: float
    is_over: bool = False

    def begin(self, now_s: float, duration_s: float) -> None:
        """It is granted now, for ``duration_s``; on what is kept for later turns, until little after that ends."""
        self._note_use(now_s)
        self._move_end(now_s + duration_s, self.holding.ends_at_s + FIRST_LEASE_S)

    def extend(self, now_s: float, duration_s: float) -> None:
        """Its reader lives: move the end no earlier than ``duration_s`` from now.

        What is held for a hand-off can be found for as long as somebody reads it. What is kept for later turns keeps
        its own time, and outlives that by little, from the last renewal of a lease on it.
        """
        self._note_use(now_s)
        self._move_end(now_s + duration_s, max(self.holding.ends_at_s, now_s + LAST_LEASE_S))

    def _note_use(self, now_s: float) -> None:
        holding = self.holding
        if holding.renewal_s and holding.why_dropped is None:
            holding.ends_at_s = max(holding.ends_at_s, now_s + holding.renewal_s)

    def _move_end(self, at_s: float, latest_at_s: float) -> None:
        """``latest_at_s`` is for what is kept for later turns."""
        holding = self.holding
        if holding.is_evictable:
            self.ends_at_s = max(self.ends_at_s, min(at_s, latest_at_s))
        else:
            self.ends_at_s = max(self.ends_at_s, at_s)
            holding.ends_at_s = max(holding.ends_at_s, self.ends_at_s)


class Shelf:
    """Holdings by handle, in the order of arrival, and the blocks of those that were let go of.

    ``num_retained``, ``num_retained_blocks``: what is kept for later turns and can be found; a block that several of
    them share counts once.
    """

    def __init__(self) -> None:
        self._by_handle: dict[str, list[Holding]] = {}
        self._freed: list[tuple[int, ...]] = []
        self._retained: OrderedDict[Holding, None] = OrderedDict()
        self._retained_pins: Counter[int] = Counter()
        self.num_holdings = 0
        self.num_held_blocks = 0

    def add(self, holding: Holding) -> None:
        """Keep a holding. A dropped one is kept without being findable."""
        if holding.why_dropped is None:
            self._by_handle.setdefault(holding.handle, []).append(holding)
            if holding.is_evictable:
                self._retained[holding] = None
                self._retained_pins.update(holding.block_ids)
        self.num_holdings += 1
        self.num_held_blocks += len(holding.block_ids)

    def find(self, handle: str) -> tuple[Holding, ...]:
        """What can be acquired under a handle."""
        return tuple(self._by_handle.get(handle, ()))

    def findable(self) -> tuple[Holding, ...]:
        """Everything that can be acquired."""
        return tuple(holding for siblings in self._by_handle.values() for holding in siblings)

    def hide(self, holding: Holding) -> None:
        """Nobody may acquire it any more."""
        siblings = self._by_handle[holding.handle]
        siblings.remove(holding)
        if not siblings:
            del self._by_handle[holding.handle]
        if holding in self._retained:
            del self._retained[holding]
            self._unpin(holding.block_ids)

    def use(self, holding: Holding) -> None:
        """Somebody reads it, or has just ceased to: of what is kept for later turns it is the last to give way."""
        if holding in self._retained:
            self._retained.move_to_end(holding)

    def idle(self, keeping: tuple[int, ...] = ()) -> Holding | None:
        """What is kept for later turns, is read by nobody and was used longest ago; not that in ``keeping``."""
        candidates = (each for each in self._retained if each.num_leases == 0 and each.block_ids != keeping)
        return next(candidates, None)

    def idle_pins(self) -> Counter[int]:
        """Blocks of all that ``idle`` may name, and how many of these share each."""
        return Counter(block_id for each in self._retained if each.num_leases == 0 for block_id in each.block_ids)

    @property
    def num_retained(self) -> int:
        """See the class."""
        return len(self._retained)

    @property
    def num_retained_blocks(self) -> int:
        """See the class."""
        return len(self._retained_pins)

    def let_go(self, holding: Holding) -> None:
        """Its blocks may go back to the pool."""
        assert not holding.is_over, f"{holding.handle} let go twice"
        assert holding.num_leases == 0, f"{holding.handle} let go under {holding.num_leases} leases"
        holding.is_over = True
        self.num_holdings -= 1
        self.num_held_blocks -= len(holding.block_ids)
        self._freed.append(holding.block_ids)

    def turn_away(self, block_ids: tuple[int, ...]) -> None:
        """These blocks were never kept, and may go back to the pool at once."""
        self._freed.append(block_ids)

    def take_freed(self) -> list[tuple[int, ...]]:
        """Blocks that may go back to the pool, a tuple per holding; each exactly once."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def is_empty(self) -> bool:
        """Nothing kept, and every freed block taken."""
        return not (self.num_holdings or self._freed)

    def _unpin(self, block_ids: tuple[int, ...]) -> None:
        for block_id in block_ids:
            self._retained_pins[block_id] -= 1
            if not self._retained_pins[block_id]:
                del self._retained_pins[block_id]


class Ending(Protocol):
    """What has an end. ``is_over``: it is of no interest any more."""

    @property
    def ends_at_s(self) -> float:
        """An instant that only ever moves later."""
        ...

    @property
    def is_over(self) -> bool:
        """Never false again once it is true."""
        ...


E = TypeVar("E", bound=Ending)


class Deadlines(Generic[E]):
    """When things end, soonest first; equal ends in the order of arrival.

    Ends only ever move later, so each subject has one entry, which is put back when it surfaces too early.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, E]] = []
        self._order = count()

    def watch(self, subject: E) -> None:
        """Report ``subject`` once, when it ends, unless it is over by then."""
        heapq.heappush(self._heap, (subject.ends_at_s, next(self._order), subject))

    def pop_ended(self, now_s: float) -> E | None:
        """The next subject that has ended by ``now_s``; None when there is none."""
        while (at_s := self.next_at_s()) is not None and at_s <= now_s:
            subject = heapq.heappop(self._heap)[2]
            if subject.ends_at_s <= now_s:
                return subject
            self.watch(subject)
        return None

    def next_at_s(self) -> float | None:
        """No subject ends before this; None when nothing is watched."""
        while self._heap and self._heap[0][2].is_over:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
