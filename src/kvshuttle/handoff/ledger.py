"""The holder's promises: which blocks it keeps, for whom, and until when.

A *holding* is one sequence's blocks kept under a handle for a time; a handle has several when a request carried
several prompts. A *lease* is one reader's right to read a holding; leases count references, so several readers may
read at once. A *pin* is a lease of the engine's own writers, which no clock ends. A holding leaves in one of three
ways: dropped by a reader or the router, expired, or reclaimed. What is kept for later turns (``retention.py``) is
``is_evictable``: it can be reclaimed, its time is its own, and leases outlive that by little.

Fencing, the one invariant that everything serves: **blocks do not appear in ``take_freed`` while a lease on
them lives by this holder's clock**, and they appear there exactly once. A drop under an outstanding lease only
makes the holding unfindable; its blocks go when the last lease is released or expires.

The ledger is pure and single-threaded: callers hold one lock, pass the time, and move freed blocks back to the
pool on the engine's own thread. Every method that takes ``now_s`` first lets go of what has ended by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvshuttle.blocks import TokenChain, num_blocks_for, num_common_tokens
from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.checks import acquire_refusal, check_duration, wanted_chain
from kvshuttle.handoff.holdings import Deadlines, EndReason, Holding, Lease, LedgerCounters, Shelf
from kvshuttle.handoff.messages import (
    Acquire,
    Acquired,
    Denied,
    DenyReason,
    Release,
    Released,
    Renew,
    Renewed,
)
from kvshuttle.ids import Handle

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.handoff.cards import Fingerprint
    from kvshuttle.ids import LeaseId

MAX_LEASE_S = 120.0
"""Longest lease granted at once. Readers renew every third of a lease, so a longer one only serves dead readers."""

_GONE_S = -1.0
_NOTHING = TokenChain(block_size_tokens=1, num_tokens=0, links=(), tail=b"")


class LeaseLedger:
    """What one engine holds for others, on its ``shelf``. ``mint`` makes lease ids that no other incarnation makes."""

    def __init__(
        self,
        *,
        incarnation: str,
        fingerprint: Fingerprint,
        mint: Callable[[], LeaseId],
        max_holdings: int = 65536,
        max_lease_s: float = MAX_LEASE_S,
    ) -> None:
        self.counters = LedgerCounters()
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._mint = mint
        self._max_holdings = max_holdings
        self._max_lease_s = max_lease_s
        self.shelf = Shelf()
        self._leases: dict[str, Lease] = {}
        self._deadlines: Deadlines[Holding | Lease] = Deadlines()

    def hold(
        self,
        handle: Handle,
        *,
        block_ids: tuple[int, ...],
        chain: TokenChain,
        duration_s: float,
        now_s: float,
        is_evictable: bool = False,
        renewal_s: float = 0.0,
    ) -> bool:
        """Keep ``block_ids`` (absolute index 0 first), whose content is ``chain``, for ``duration_s``.

        The ledger owns the blocks from here on: they come back through ``take_freed`` exactly once. False: the ledger
        is full, nothing is held and the blocks come back at once. ``is_evictable``: kept for later turns, may be
        reclaimed. ``renewal_s``: what each use of it adds, 0 for nothing.
        Raises ``LocalProtocolError`` when the blocks cannot hold the chain.
        """
        if chain.num_tokens == 0 or len(block_ids) < num_blocks_for(chain.num_tokens, chain.block_size_tokens):
            raise LocalProtocolError(f"{len(block_ids)} blocks cannot hold {chain.num_tokens} tokens of {handle!r}")
        if not (math.isfinite(duration_s) and duration_s > 0):
            raise LocalProtocolError(f"{handle!r} cannot be held for {duration_s} s")
        self.expire(now_s)
        if self.is_full:
            self.counters.refused_full += 1
            self.shelf.turn_away(block_ids)
            return False
        holding = Holding(handle, block_ids, chain, now_s + duration_s, is_evictable, renewal_s)
        self.shelf.add(holding)
        self._deadlines.watch(holding)
        self.counters.granted += 1
        return True

    def acquire(self, message: Acquire, *, now_s: float) -> Acquired | Denied:
        """Lend the holding of the handle that shares the longest verified prefix with the wanted chain.

        Raises ``RemoteProtocolError`` when the message contradicts itself.
        """
        wanted = wanted_chain(message)
        duration_s = min(check_duration(message.duration_s), self._max_lease_s)
        self.expire(now_s)
        refusal = acquire_refusal(message, self._incarnation, self._fingerprint)
        if refusal is not None:
            return self._deny(*refusal)
        candidates = self.shelf.find(message.handle)
        if not candidates:
            return self._deny(DenyReason.UNKNOWN_HANDLE)
        # Of equals, the least lent: siblings of one request with equal prompts each get a holding of their own.
        num_tokens, _, position = max(
            (num_common_tokens(holding.chain, wanted), -holding.num_leases, -index)
            for index, holding in enumerate(candidates)
        )
        if num_tokens == 0:
            return self._deny(DenyReason.NO_COMMON_PREFIX)
        return self._lend(candidates[-position], num_tokens, duration_s, now_s)

    def renew(self, message: Renew, *, now_s: float) -> Renewed:
        """Extend leases; a negative remaining time says that the lease is gone.

        Raises ``RemoteProtocolError`` when the duration is not a positive number.
        """
        duration_s = min(check_duration(message.duration_s), self._max_lease_s)
        self.expire(now_s)
        return Renewed(tuple(self._renew_one(lease_id, duration_s, now_s) for lease_id in message.lease_ids))

    def release(self, message: Release, *, now_s: float) -> Released:
        """End leases, and with ``drop`` what they read from, or whole handles. Unknown ids are ignored."""
        self.expire(now_s)
        why = EndReason.RELEASED if message.drop else None
        for lease_id in message.lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None:
                self.counters.released += 1
                self._end_lease(lease, why, now_s=now_s)
        for handle in message.handles if message.drop else ():
            self.drop(handle, EndReason.RELEASED, now_s=now_s)
        return Released()

    def drop(self, handle: str, why: EndReason, *, now_s: float) -> None:
        """Nobody may acquire under this handle any more; blocks that are lent stay until the last lease ends."""
        for holding in self.shelf.find(handle):
            self._settle(holding, why, now_s=now_s)

    def pin(self, handle: Handle, block_ids: tuple[int, ...]) -> LeaseId | None:
        """Lend a holding to its own engine's writers: a lease that no clock ends, only ``release``.

        ``block_ids``: which of the handle's holdings. None when it cannot be found any more.
        """
        for holding in self.shelf.find(handle):
            if holding.block_ids == block_ids:
                return self._lease(holding, math.inf).lease_id
        return None

    def keep(self, block_ids: tuple[int, ...]) -> LeaseId:
        """Keep blocks that nobody may acquire, until the returned lease is released. The ledger owns them, as in
        ``hold``: what a request leaves behind that ended while its blocks were still being written from.
        """
        holding = Holding(Handle(""), block_ids, _NOTHING, 0.0, is_evictable=False, why_dropped=EndReason.RELEASED)
        self.shelf.add(holding)
        self.counters.kept += 1
        return self._lease(holding, math.inf).lease_id

    def is_findable(self, handle: Handle, block_ids: tuple[int, ...]) -> bool:
        """Whether ``pin`` would find this holding."""
        return any(holding.block_ids == block_ids for holding in self.shelf.find(handle))

    def prolong(self, handle: str, duration_s: float, *, now_s: float) -> float:
        """Extend what is kept for later turns. Returns the seconds that remain, negative when there is nothing."""
        self.expire(now_s)
        kept = [holding for holding in self.shelf.find(handle) if holding.is_evictable]
        for holding in kept:
            holding.ends_at_s = max(holding.ends_at_s, now_s + duration_s)
        return min((holding.ends_at_s - now_s for holding in kept), default=_GONE_S)

    def expire(self, now_s: float) -> None:
        """Let go of every lease and idle holding that has ended by ``now_s``."""
        while (subject := self._deadlines.pop_ended(now_s)) is not None:
            if isinstance(subject, Lease):
                self.counters.lease_expired += 1
                self._end_lease(subject, None, now_s=now_s)
            else:
                self._settle(subject, None, now_s=now_s)

    def reclaim(self, why: EndReason, *, now_s: float, keeping: tuple[int, ...] = ()) -> bool:
        """Let go of the idle evictable holding that was used longest ago; never of that of ``keeping``, its blocks.

        False when there is none. A holding that is lent is not idle.
        """
        self.expire(now_s)
        holding = self.shelf.idle(keeping)
        if holding is not None:
            self._settle(holding, why, now_s=now_s)
        return holding is not None

    def take_freed(self) -> list[tuple[int, ...]]:
        """Block ids, a tuple per holding, that may go back to the pool now; each exactly once."""
        return self.shelf.take_freed()

    def handles(self) -> tuple[Handle, ...]:
        """Handles under which something can be acquired."""
        return tuple(dict.fromkeys(holding.handle for holding in self.shelf.findable()))

    def next_deadline_at_s(self) -> float | None:
        """When ``expire`` next has something to look at; None when nothing is held."""
        return self._deadlines.next_at_s()

    @property
    def num_holdings(self) -> int:
        """Holdings whose blocks are kept, findable or not."""
        return self.shelf.num_holdings

    @property
    def is_full(self) -> bool:
        """Whether ``hold`` would refuse."""
        return self.shelf.num_holdings >= self._max_holdings

    @property
    def num_held_blocks(self) -> int:
        """Blocks kept; one that two holdings share counts twice, as it is pinned twice."""
        return self.shelf.num_held_blocks

    @property
    def num_leases(self) -> int:
        """Leases that have neither been released nor expired."""
        return len(self._leases)

    @property
    def is_drained(self) -> bool:
        """Nothing held, nothing lent, and every freed block taken."""
        return self.shelf.is_empty and not self._leases

    def __repr__(self) -> str:
        holdings, leases, held_blocks = self.num_holdings, len(self._leases), self.num_held_blocks
        return f"<LeaseLedger {holdings=} {leases=} {held_blocks=}>"

    def _deny(self, reason: DenyReason, detail: str = "") -> Denied:
        self.counters.denied[reason] += 1
        return Denied(reason, detail)

    def _lend(self, holding: Holding, num_tokens: int, duration_s: float, now_s: float) -> Acquired:
        lease = self._lease(holding, now_s)
        lease.begin(now_s, duration_s)
        self._deadlines.watch(lease)
        self.counters.acquired += 1
        block_ids = holding.block_ids[: num_blocks_for(num_tokens, holding.chain.block_size_tokens)]
        return Acquired(lease.lease_id, self._incarnation, num_tokens, block_ids, lease.ends_at_s - now_s)

    def _lease(self, holding: Holding, ends_at_s: float) -> Lease:
        lease = Lease(self._mint(), holding, ends_at_s)
        if lease.lease_id in self._leases:
            raise LocalProtocolError(f"lease id {lease.lease_id!r} was minted twice")
        self._leases[lease.lease_id] = lease
        holding.num_leases += 1
        self.shelf.use(holding)
        return lease

    def _renew_one(self, lease_id: str, duration_s: float, now_s: float) -> float:
        lease = self._leases.get(lease_id)
        if lease is None:
            self.counters.renew_refused += 1
            return _GONE_S
        lease.extend(now_s, duration_s)
        self.counters.renewed += 1
        return lease.ends_at_s - now_s

    def _end_lease(self, lease: Lease, why_dropped: EndReason | None, *, now_s: float) -> None:
        del self._leases[lease.lease_id]
        lease.is_over = True
        lease.holding.num_leases -= 1
        self.shelf.use(lease.holding)
        self._settle(lease.holding, why_dropped, now_s=now_s)

    def _settle(self, holding: Holding, why: EndReason | None, *, now_s: float) -> None:
        """Make a holding unfindable that has ended or is dropped; let go of its blocks when nobody reads it."""
        if why is None and holding.ends_at_s <= now_s:
            why = EndReason.EXPIRED
        if why is not None and holding.why_dropped is None:
            holding.why_dropped = why
            self.shelf.hide(holding)
            if holding.is_evictable:
                self.counters.retained_ended[why] += 1
        if holding.num_leases == 0 and holding.why_dropped is not None:
            self.counters.holding_ended[holding.why_dropped] += 1
            self.shelf.let_go(holding)
