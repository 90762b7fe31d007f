"""The holding side in the scheduler half: pins a finished request's blocks and lends them.

The ledger decides; this file keeps vLLM's block pool in step with it. The pool belongs to the engine's own
thread, so blocks that the ledger lets go of while the engine idles go back at its next hook, before anything
is allocated. The *handle* is dead at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvshuttle.blocks import TokenChain, num_blocks_for
from kvshuttle.connector import vllm_compat
from kvshuttle.handoff.messages import Release
from kvshuttle.handoff.params import PrefillLeg, PrefillResult, to_params
from kvshuttle.ids import Handle

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from kvshuttle.handoff.ledger import LeaseLedger

logger = logging.getLogger(__name__)


class Holder:
    """Keeps the pool's reference counts equal to the ledger's promises. The caller holds the half's lock."""

    def __init__(self, ledger: LeaseLedger, *, lease_s: float) -> None:
        self.ledger = ledger
        self._lease_s = lease_s
        self._pool: BlockPool | None = None
        self.num_watermark_blocks = 0
        self._let_go: list[tuple[int, ...]] = []
        self._quarantine: dict[str, list[tuple[int, ...]]] = {}
        self._quarantine_soon: dict[str, tuple[int, ...]] = {}

    @property
    def pool(self) -> BlockPool | None:
        """The engine's block pool, once it is known."""
        return self._pool

    def bind_pool(self, pool: BlockPool, num_watermark_blocks: int = 0) -> None:
        """Learn the engine's block pool, and how much of it vLLM leaves free when it admits a request."""
        self._pool = pool
        self.num_watermark_blocks = num_watermark_blocks

    def hold(
        self,
        leg: PrefillLeg,
        *,
        chain: TokenChain,
        block_ids: list[int],
        now_s: float,
        num_cached_tokens: int | None = None,
    ) -> dict[str, Any] | None:
        """Pin the blocks of a computed prompt; the response's ``kv_transfer_params``, or None when nothing is held.

        ``num_cached_tokens``: for the response.
        """
        num_blocks = num_blocks_for(chain.num_tokens, chain.block_size_tokens)
        if self._pool is None or chain.num_tokens == 0 or len(block_ids) < num_blocks:
            logger.warning(
                "kvshuttle: %s not held: %d of %d blocks computed", leg.transfer_id, len(block_ids), num_blocks
            )
            return None
        held = tuple(block_ids[:num_blocks])
        is_held = self.ledger.hold(
            Handle(leg.transfer_id), block_ids=held, chain=chain, duration_s=self._lease_s, now_s=now_s
        )
        # Pinned also when the ledger is full: it hands the blocks back through the same door as all others.
        vllm_compat.pin(self._pool, held)
        if not is_held:
            logger.warning("kvshuttle: %s not held: the ledger is full", leg.transfer_id)
            return None
        return to_params(PrefillResult(leg.transfer_id, chain.num_tokens, self._lease_s, num_cached_tokens))

    def adopt(self, block_ids: tuple[int, ...]) -> None:
        """Pin blocks that the ledger has taken in some other way than ``hold``."""
        if self._pool is not None:
            vllm_compat.pin(self._pool, block_ids)

    def drop_all(self, now_s: float) -> bool:
        """Let go of everything that nobody reads; False when something is still read or quarantined."""
        self.ledger.release(Release(handles=self.ledger.handles()), now_s=now_s)
        self.return_freed(now_s)
        return not (self.ledger.num_holdings or self._quarantine or self._quarantine_soon)

    def expire(self, now_s: float) -> None:
        """Let deadlines pass in the ledger. Any thread."""
        self.ledger.expire(now_s)
        self._let_go += self.ledger.take_freed()

    def return_freed(self, now_s: float) -> int:
        """Give the pool what the ledger has let go of; the number of references given back. Engine thread only."""
        self.expire(now_s)
        self._apply_quarantines()
        if self._pool is None or not self._let_go:
            return 0
        let_go, self._let_go = self._let_go, []
        for block_ids in let_go:
            vllm_compat.unpin(self._pool, block_ids)
        return sum(len(block_ids) for block_ids in let_go)

    def num_returnable_blocks(self, idle_pins: Counter[int] | None = None) -> int:
        """Blocks that are not free and that the next allocation can have: they become so at the engine's next hook.

        ``idle_pins``: blocks that are kept only until something needs them, and how often.
        """
        if self._pool is None:
            return 0
        pins = Counter(idle_pins)
        pins.update(block_id for block_ids in self._let_go for block_id in block_ids)
        return sum(self._pool.blocks[block_id].ref_cnt <= num_pins for block_id, num_pins in pins.items())

    def quarantine(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Keep a failed read's destination out of use while the read may still write to it; once a rank."""
        if self._pool is not None and block_ids:
            vllm_compat.pin(self._pool, block_ids)
            self._quarantine.setdefault(request_id, []).append(block_ids)

    def lift_quarantine(self, request_id: str, num_ranks: int) -> None:
        """These many ranks say that the read cannot write any more."""
        entries = self._quarantine.get(request_id, [])
        for _ in range(min(num_ranks, len(entries))):
            block_ids = entries.pop()
            if self._pool is not None:
                vllm_compat.unpin(self._pool, block_ids)
        if not entries:
            self._quarantine.pop(request_id, None)

    def quarantine_soon(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """The same for a push, once, from the engine's next hook on, before its load can end. Any thread."""
        if block_ids not in self._quarantine.get(_push_key(request_id), []):
            self._quarantine_soon[request_id] = block_ids

    def lift_soon(self, request_id: str) -> None:
        """Nothing of this request's push can be written any more. Any thread."""
        self._quarantine_soon.pop(request_id, None)
        self._let_go += self._quarantine.pop(_push_key(request_id), [])

    def _apply_quarantines(self) -> None:
        for request_id, block_ids in self._quarantine_soon.items():
            self.quarantine(_push_key(request_id), block_ids)
        self._quarantine_soon.clear()

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks kept back, counted once for each rank that has not drained."""
        return sum(len(block_ids) for entries in self._quarantine.values() for block_ids in entries)


def _push_key(request_id: str) -> str:
    """A request may have a read in quarantine besides its push."""
    return f"push {request_id}"
