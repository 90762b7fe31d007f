"""Prefill requests that readers may be written from, found by handle and tokens, from their arrival to their end."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.messages import DeclineReason

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.ledger import LeaseLedger
    from kvshuttle.handoff.registrations import Registration
    from kvshuttle.ids import Handle, LeaseId

_MAX_SPENT_HANDLES = 16384


@dataclass(slots=True, eq=False)
class Source:
    """One prefill request: ``handle`` and ``chain`` name what it computes.

    ``block_ids``: None while the request runs, then its blocks, which the ledger holds. ``fence``: keeps the blocks of
    a request that ended without computing the prompt, until no write reads them.
    """

    source_id: str
    handle: Handle
    chain: TokenChain
    registrations: dict[LeaseId, Registration] = field(default_factory=dict)
    block_ids: tuple[int, ...] | None = None
    fence: LeaseId | None = None


class Sources:
    """All of them. A source is over when its request has ended, its blocks are let go of and nobody is written to.

    A handle whose last source is over is *spent*: a dispatch has a handle of its own, so nothing more comes under it.
    """

    def __init__(self, ledger: LeaseLedger) -> None:
        self._ledger = ledger
        self._by_id: dict[str, Source] = {}
        self._by_handle: dict[str, list[Source]] = {}
        self._spent: OrderedDict[str, DeclineReason] = OrderedDict()
        self._over: list[str] = []
        self._ended: dict[str, Source] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, source_id: str) -> Source:
        return self._by_id[source_id]

    def add(self, source: Source) -> None:
        """A request arrived. Raises ``LocalProtocolError`` when it had arrived before."""
        if source.source_id in self._by_id:
            raise LocalProtocolError(f"source {source.source_id!r} began twice")
        self._by_id[source.source_id] = source
        self._by_handle.setdefault(source.handle, []).append(source)

    def is_known(self, handle: str) -> bool:
        """Whether a source has this handle."""
        return handle in self._by_handle

    def match(self, handle: str, chain: TokenChain) -> Source | None:
        """The source of exactly these tokens; of equal ones that with the fewest registrations."""
        candidates = [source for source in self._by_handle.get(handle, ()) if source.chain == chain]
        return min(candidates, key=lambda source: len(source.registrations), default=None)

    def spend(self, handle: str, reason: DeclineReason) -> None:
        """Nothing is to be had under this handle from now on; the first reason stands."""
        self._spent.setdefault(handle, reason)
        while len(self._spent) > _MAX_SPENT_HANDLES:
            self._spent.popitem(last=False)

    def why_spent(self, handle: str) -> DeclineReason | None:
        """None when something may be had under it."""
        return self._spent.get(handle)

    def end(self, source: Source) -> None:
        """Its request has ended."""
        self._ended[source.source_id] = source
        self.review(source)

    def review(self, source: Source) -> None:
        """Forget a source if it is over."""
        if source.registrations or source.source_id not in self._ended:
            return
        if source.block_ids and self._ledger.is_findable(source.handle, source.block_ids):
            return
        del self._by_id[source.source_id], self._ended[source.source_id]
        siblings = self._by_handle[source.handle]
        siblings.remove(source)
        if not siblings:
            del self._by_handle[source.handle]
            self.spend(source.handle, DeclineReason.UNKNOWN_HANDLE)
        self._over.append(source.source_id)

    def review_all(self) -> None:
        """The ledger has let go of something, perhaps."""
        for source in tuple(self._ended.values()):
            self.review(source)

    def take_over(self) -> tuple[str, ...]:
        """Sources that are over, each once."""
        self.review_all()
        over, self._over = tuple(self._over), []
        return over
