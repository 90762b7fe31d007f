"""What the ledger writes down: holdings, leases on them, when each ends, and what became of them."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.messages import DenyReason
    from kvshuttle.ids import Handle, LeaseId


@dataclass(slots=True)
class LedgerCounters:
    """How often each thing happened since the start. ``holding_*`` say how holdings ended."""

    granted: int = 0
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


class Deadlines:
    """When holdings and leases end, soonest first; equal ends in the order of arrival.

    Ends only ever move later, so each subject has one entry, which is put back when it surfaces too early.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Holding | Lease]] = []
        self._order = count()

    def watch(self, subject: Holding | Lease) -> None:
        """Report ``subject`` once, when it ends, unless it is over by then."""
        heapq.heappush(self._heap, (subject.ends_at_s, next(self._order), subject))

    def pop_ended(self, now_s: float) -> Holding | Lease | None:
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
