"""The holding side in the scheduler half: pins a finished request's blocks and lends them.

The ledger decides; this file keeps vLLM's block pool in step with it. The pool belongs to the engine's own
thread, so blocks that the ledger lets go of while the engine idles go back at its next hook, before anything
is allocated. The *handle* is dead at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvshuttle.blocks import TokenChain, num_blocks_for
from kvshuttle.connector import vllm_compat
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
        self._quarantine: dict[str, list[tuple[int, ...]]] = {}

    def bind_pool(self, pool: BlockPool) -> None:
        """Learn the engine's block pool."""
        self._pool = pool

    def hold(self, leg: PrefillLeg, *, chain: TokenChain, block_ids: list[int], now_s: float) -> dict[str, Any] | None:
        """Pin the blocks of a computed prompt; the response's ``kv_transfer_params``, or None when nothing is held."""
        num_blocks = num_blocks_for(chain.num_tokens, chain.block_size_tokens)
        if self._pool is None or chain.num_tokens == 0 or len(block_ids) < num_blocks:
            logger.warning(
                "kvshuttle: %s not held: %d of %d blocks computed", leg.transfer_id, len(block_ids), num_blocks
            )
            return None
        held = tuple(block_ids[:num_blocks])
        vllm_compat.pin(self._pool, held)
        is_held = self.ledger.hold(
            Handle(leg.transfer_id), block_ids=held, chain=chain, duration_s=self._lease_s, now_s=now_s
        )
        if not is_held:
            logger.warning("kvshuttle: %s not held: the ledger is full", leg.transfer_id)
            return None
        return to_params(PrefillResult(transfer_id=leg.transfer_id, num_tokens=chain.num_tokens, lease_s=self._lease_s))

    def return_freed(self, now_s: float) -> None:
        """Give the pool what the ledger has let go of. Engine thread only."""
        self.ledger.expire(now_s)
        if self._pool is None:
            return
        for block_ids in self.ledger.take_freed():
            vllm_compat.unpin(self._pool, block_ids)

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

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks kept back, counted once for each rank that has not drained."""
        return sum(len(block_ids) for entries in self._quarantine.values() for block_ids in entries)
