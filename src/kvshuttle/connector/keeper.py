"""The keeping side in the scheduler half: what a request leaves for its next turn, and how that makes room.

vLLM looks at the free blocks of its pool in two places: when it admits a waiting request, and when a running one needs
its next blocks, where it preempts if there are none. Blocks kept for later turns are not among the free ones, so they
are let go of *before* it looks, and both happen as if nothing were kept:

- before a waiting request is admitted, vLLM asks how many tokens can be loaded for it. That is the time to make room
  for all that it needs;
- at the end of each step room is made for all that the next one can need of what has been admitted.

Nothing is let go of for a request that would not fit anyway. All of it happens on the engine's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.blocks import num_blocks_for
from kvshuttle.clock import now_s
from kvshuttle.connector import vllm_compat
from kvshuttle.connector.chains import settled_chain
from kvshuttle.handoff.retention import Retention

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvshuttle.blocks import TokenChain
    from kvshuttle.config import ConnectorConfig
    from kvshuttle.connector.holder import Holder
    from kvshuttle.connector.stats import ShuttleStats
    from kvshuttle.handoff.ledger import LeaseLedger
    from kvshuttle.handoff.params import Keep

_AHEAD_TOKENS = 2
"""A running request computes one token in the next step, and one more where vLLM schedules ahead of its results."""


class Keeper:
    """``max_step_tokens``: what one step computes at most. ``is_disconnect_retained``: see ``ConnectorConfig``."""

    def __init__(
        self,
        holder: Holder,
        retention: Retention,
        *,
        block_size_tokens: int,
        max_step_tokens: int,
        is_disconnect_retained: bool,
    ) -> None:
        self._holder = holder
        self._retention = retention
        self._block_size_tokens = block_size_tokens
        self._max_step_tokens = max_step_tokens
        self._is_disconnect_retained = is_disconnect_retained

    # -- keeping ----------------------------------------------------------------------------------

    def lasting_chain(self, request: Request, prompt: TokenChain | None = None) -> TokenChain | None:
        """Names what a request that is over leaves for a later turn; None for nothing.

        ``prompt``: its prompt's chain, where it is known.
        """
        is_complete = vllm_compat.is_answered(request)
        if not is_complete and vllm_compat.is_aborted(request):
            is_complete = self._is_disconnect_retained or vllm_compat.has_stop_strings(request)
        return settled_chain(request, self._block_size_tokens, prompt) if is_complete else None

    def keep(self, wish: Keep, chain: TokenChain, block_ids: Sequence[int]) -> None:
        """Keep the blocks of ``chain``, with which ``block_ids`` begins; vLLM may be told that they are free."""
        kept = tuple(block_ids[: len(chain.links)])
        if len(kept) < len(chain.links) or self._holder.pool is None:
            return
        if self._retention.keep(wish, block_ids=kept, chain=chain, now_s=now_s()):
            self._holder.adopt(kept)

    # -- giving way -------------------------------------------------------------------------------

    def make_room_for(
        self, request: Request, num_local_tokens: int, num_external_tokens: int, live: Iterable[Request]
    ) -> None:
        """vLLM is about to admit a waiting request: see that its whole sequence fits, if that is possible at all.

        ``live``: all requests. A load is admitted only beside what other prompts under way still need.
        """
        pool = self._holder.pool
        if pool is None or not self._retention.num_handles:
            return
        num_blocks = num_blocks_for(request.num_tokens, self._block_size_tokens)
        num_beside = self._holder.num_watermark_blocks
        if num_external_tokens:
            num_beside += sum(self._blocks_to_go(each) for each in live if each is not request)
        if pool.get_num_free_blocks() >= num_blocks + num_beside:
            return
        hits = vllm_compat.cached_blocks(pool, request, num_local_tokens // self._block_size_tokens)

        def num_missing() -> int:
            # Hits that nobody else uses are in the free list, and leave it when the request gets them.
            num_hits_in_use = sum(int(block.ref_cnt > 0) for block in hits)
            return num_blocks - num_hits_in_use - int(pool.get_num_free_blocks())

        if not self._is_possible(num_missing(), hits):
            return
        while num_missing() + num_beside > 0 and self._give_way():
            pass

    def make_headroom(self, scheduled: SchedulerOutput, live: Iterable[Request]) -> None:
        """A step has been scheduled: see that what it and earlier ones admitted finds its blocks in the next one."""
        pool = self._holder.pool
        if pool is None or not self._retention.num_handles:
            return
        steps = scheduled.num_scheduled_tokens
        num_needed = sum(self._next_blocks(request, steps.get(request.request_id, 0)) for request in live)
        while pool.get_num_free_blocks() < num_needed and self._give_way():
            pass

    def give_way(self) -> bool:
        """A running request has found no block after all. True when there is one more now."""
        pool = self._holder.pool
        if pool is None:
            return False
        num_free_blocks = pool.get_num_free_blocks()
        while self._give_way():
            if pool.get_num_free_blocks() > num_free_blocks:
                return True
        return False

    def _give_way(self) -> bool:
        """Let go of one handle. Its blocks are free at once where no request and no other handle has them."""
        if not self._retention.give_way(now_s()):
            return False
        self._holder.return_freed(now_s())
        return True

    def _is_possible(self, num_missing_blocks: int, hits: list[KVCacheBlock]) -> bool:
        """Whether so many blocks would become free, if all went that can; those of ``hits`` are not gained by it."""
        if num_missing_blocks > self._retention.num_blocks:
            return False
        pool = self._holder.pool
        assert pool is not None
        pins = self._retention.idle_pins()
        for block in hits:
            pins.pop(block.block_id, None)
        num_free = sum(int(pool.blocks[block_id].ref_cnt <= num_pins) for block_id, num_pins in pins.items())
        return num_missing_blocks <= num_free

    def _blocks_to_go(self, request: Request) -> int:
        """Blocks that a prompt under way needs to be complete; 0 for one that has not been admitted."""
        if not request.num_computed_tokens:
            return 0
        held = num_blocks_for(request.num_computed_tokens, self._block_size_tokens)
        return max(num_blocks_for(request.num_tokens, self._block_size_tokens) - held, 0)

    def _next_blocks(self, request: Request, num_scheduled_tokens: int) -> int:
        num_done_tokens = request.num_computed_tokens + num_scheduled_tokens
        if not num_done_tokens:
            return 0
        num_ahead_tokens = max(request.num_tokens - num_done_tokens, 0) + _AHEAD_TOKENS
        if num_scheduled_tokens:
            num_ahead_tokens = min(num_ahead_tokens, self._max_step_tokens + _AHEAD_TOKENS)
        end = num_blocks_for(num_done_tokens + num_ahead_tokens, self._block_size_tokens)
        return end - num_blocks_for(num_done_tokens, self._block_size_tokens)

    # -- telling ----------------------------------------------------------------------------------

    def report(self, stats: ShuttleStats) -> None:
        """How much is kept, for the metrics."""
        stats.set("retained_handles", self._retention.num_handles)
        stats.set("retained_blocks", self._retention.num_blocks)


def retention_of(config: ConnectorConfig, ledger: LeaseLedger, *, num_blocks: int) -> Retention:
    """What ``config`` says, for a pool of ``num_blocks``."""
    max_blocks = int(num_blocks * config.retention_max_fraction)
    if config.retention_max_blocks:
        max_blocks = min(max_blocks, config.retention_max_blocks)
    return Retention(
        ledger,
        duration_s=config.decoder_kv_blocks_ttl,
        max_blocks=max_blocks,
        is_renewed_on_use=config.is_retention_renewed_on_use,
    )
