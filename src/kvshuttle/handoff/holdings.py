"""What the ledger writes down: holdings and where to find them, leases on them, when each ends, what became of them."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.messages import DenyReason
    from kvshuttle.ids import Handle, LeaseId


@dataclass(slots=True)
class LedgerCounters:
    """How often each thing happened since the start. ``holding_*`` say how holdings ended."""

    granted: int = 0
    kept: int = 0
    refused_full: int = 0
    acquired: int = 0
    denied: Counter[DenyReason] = field(default_factory=Counter)
    renewed: int = 0
    renew_refused: int = 0
    released: int = 0
    lease_expired: int = 0
    holding_dropped: int = 0
    holding_expired: int = 0
    holding_reclaimed: int = 0


@dataclass(slots=True, eq=False)
class Holding:
    """One sequence's blocks under a handle. ``is_dropped``: unfindable, kept only for the leases on it."""

    handle: Handle
    block_ids: tuple[int, ...]
    chain: TokenChain
    ends_at_s: float
    is_evictable: bool
    num_leases: int = 0
    is_dropped: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """One reader's right to read a holding, which never ends before it."""

    lease_id: LeaseId
    holding: Holding
    ends_at_s: float
    is_over: bool = False

    def extend(self, ends_at_s: float) -> None:
        """Move the end, and the holding's, no earlier than ``ends_at_s``."""
        self.ends_at_s = max(self.ends_at_s, ends_at_s)
        self.holding.ends_at_s = max(self.holding.ends_at_s, self.ends_at_s)


class Shelf:
    """Holdings by handle, in the order of arrival, and the blocks of those that were let go of."""

    def __init__(self) -> None:
        self._by_handle: dict[str, list[Holding]] = {}
        self._freed: list[tuple[int, ...]] = []
        self.num_holdings = 0
        self.num_held_blocks = 0

    def add(self, holding: Holding) -> None:
        """Keep a holding. A dropped one is kept without being findable."""
        if not holding.is_dropped:
            self._by_handle.setdefault(holding.handle, []).append(holding)
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
