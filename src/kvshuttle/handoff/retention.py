"""What an engine keeps after a request is over, for the next turn of its conversation.

It is held in the ledger as everything else, under a handle that the router chose beforehand, and differs in three
things: it may be read any number of times, its time is its own, and it gives way. A later turn *supersedes* an earlier
handle: that one is let go of once the new one is held, so there is no instant at which the conversation has nothing.

Invariants:

1. A handle that is superseded is dropped only when the one in its place can be acquired.
2. What is lent does not give way: the budget is exceeded rather, until the lease ends.
3. A handle that the router released before the request was over is not kept.

Pure and single-threaded, like the ledger: callers hold one lock and pass the time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.handoff.checks import check_duration
from kvshuttle.handoff.holdings import EndReason
from kvshuttle.handoff.messages import Renewed
from kvshuttle.ids import Handle

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.ledger import LeaseLedger
    from kvshuttle.handoff.messages import Renew
    from kvshuttle.handoff.params import Keep

_MAX_RELEASED_HANDLES = 4096


class KeepOutcome(StrEnum):
    """What became of a wish to keep. Also the metric label, beside those of ``EndReason``."""

    KEPT = "kept"
    NOT_WANTED = "not_wanted"
    """The router released the handle before the request was over."""
    OVER_BUDGET = "over_budget"
    """It alone is more than may be kept."""
    LEDGER_FULL = "ledger_full"


class Retention:
    """``duration_s``: how long each handle is kept. ``max_blocks``: how much at most, all handles together.

    ``is_renewed_on_use``: each read starts the time again; else only ``Renew`` of the router does.
    """

    def __init__(
        self, ledger: LeaseLedger, *, duration_s: float, max_blocks: int, is_renewed_on_use: bool = False
    ) -> None:
        self.outcomes: Counter[KeepOutcome] = Counter()
        self.max_blocks = max_blocks
        self._ledger = ledger
        self._duration_s = duration_s
        self._is_renewed_on_use = is_renewed_on_use
        self._released: OrderedDict[str, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Retention handles={self.num_handles} blocks={self.num_blocks} of {self.max_blocks}>"

    def keep(self, wish: Keep, *, block_ids: tuple[int, ...], chain: TokenChain, now_s: float) -> bool:
        """Keep ``block_ids``, whose content is ``chain``; others give way to it where the budget asks for that.

        True: the ledger owns them from here on, as after its ``hold``.
        """
        outcome = self._outcome(wish, len(block_ids))
        self.outcomes[outcome] += 1
        if outcome is not KeepOutcome.KEPT:
            return False
        self._ledger.hold(
            Handle(wish.handle),
            block_ids=block_ids,
            chain=chain,
            duration_s=self._duration_s,
            now_s=now_s,
            is_evictable=True,
            renewal_s=self._duration_s if self._is_renewed_on_use else 0.0,
        )
        if wish.supersedes is not None and wish.supersedes != wish.handle:
            self._ledger.drop(wish.supersedes, EndReason.SUPERSEDED, now_s=now_s)
        while self.num_blocks > self.max_blocks and self._ledger.reclaim(
            EndReason.BUDGET, now_s=now_s, keeping=block_ids
        ):
            pass
        return True

    def give_way(self, now_s: float) -> bool:
        """The engine is short of blocks: let go of what was used longest ago. False when nothing can go."""
        return self._ledger.reclaim(EndReason.PRESSURE, now_s=now_s)

    def renew(self, message: Renew, *, now_s: float) -> Renewed:
        """Extend leases and what is kept. Raises ``RemoteProtocolError`` when the duration is not a positive number."""
        duration_s = min(check_duration(message.duration_s), self._duration_s)
        renewed = self._ledger.renew(message, now_s=now_s)
        remaining_s = [self._ledger.prolong(handle, duration_s, now_s=now_s) for handle in message.handles]
        return Renewed(renewed.remaining_s, tuple(remaining_s))

    def note_released(self, handles: tuple[str, ...]) -> None:
        """The router does not want these, wherever their requests are."""
        for handle in handles:
            self._released[handle] = None
        while len(self._released) > _MAX_RELEASED_HANDLES:
            self._released.popitem(last=False)

    @property
    def num_handles(self) -> int:
        """What is kept and can be acquired."""
        return self._ledger.shelf.num_retained

    @property
    def num_blocks(self) -> int:
        """Blocks of all that; one that several share counts once."""
        return self._ledger.shelf.num_retained_blocks

    def idle_pins(self) -> Counter[int]:
        """Blocks that ``give_way`` lets go of in the end, and how many handles share each."""
        return self._ledger.shelf.idle_pins()

    def _outcome(self, wish: Keep, num_blocks: int) -> KeepOutcome:
        if wish.handle in self._released:
            return KeepOutcome.NOT_WANTED
        if num_blocks > self.max_blocks:
            return KeepOutcome.OVER_BUDGET
        return KeepOutcome.LEDGER_FULL if self._ledger.is_full else KeepOutcome.KEPT
