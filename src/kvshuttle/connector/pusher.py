"""The writing side in the scheduler half: what prefill requests have computed, who wants it, what the workers do.

The machines decide; this file turns vLLM's steps into progress, answers readers, and carries orders to the workers'
side channels, with no engine step in between. Every method is called under the half's lock.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshuttle.blocks import num_blocks_for
from kvshuttle.clock import now_s
from kvshuttle.connector import vllm_compat
from kvshuttle.errors import TransportError
from kvshuttle.handoff.messages import Proceed, Register, Withdraw
from kvshuttle.handoff.orders import OrdersTaken
from kvshuttle.handoff.params import PrefillResult, to_params
from kvshuttle.handoff.progress import Progress, Publisher, Restarted
from kvshuttle.handoff.push_source import PushSource
from kvshuttle.ids import Handle, LeaseId, mint

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvshuttle.blocks import TokenChain
    from kvshuttle.connector.holder import Holder
    from kvshuttle.connector.step_metadata import StepMetadata
    from kvshuttle.errors import KvshuttleError
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.messages import Message
    from kvshuttle.handoff.orders import Orders
    from kvshuttle.handoff.params import PrefillLeg
    from kvshuttle.transport.endpoint import Endpoint
    from kvshuttle.transport.side_channel import SideChannelThread

logger = logging.getLogger(__name__)

_ORDER_TIMEOUT_S = 2.0


@dataclass(slots=True, eq=False)
class _Push:
    """One prefill leg that is to be pushed, while its request lives."""

    leg: PrefillLeg
    num_tokens: int
    publisher: Publisher
    num_preemptions: int = 0


class Pusher:
    """All pushes out of one engine. ``lock`` is the scheduler half's."""

    def __init__(
        self, holder: Holder, *, card: EngineCard, side: SideChannelThread[Message], lock: threading.RLock
    ) -> None:
        self._holder = holder
        self._source = PushSource(holder.ledger, card=card, mint=lambda: LeaseId(mint("push")))
        self._workers = card.workers
        self._block_size_tokens = card.fingerprint.block_size_tokens
        self._side = side
        self._lock = lock
        self._pushes: dict[str, _Push] = {}
        self._tables = vllm_compat.BlockTables()

    def __repr__(self) -> str:
        return f"<Pusher live={len(self._pushes)} {self._source!r}>"

    @property
    def is_drained(self) -> bool:
        """Nothing is computed for readers, and nobody is written to."""
        return not self._pushes and self._source.is_drained

    # -- the engine -------------------------------------------------------------------------------

    def begin(self, request_id: str, leg: PrefillLeg, chain: TokenChain) -> None:
        """A prefill leg that is to be pushed has arrived."""
        publisher = Publisher(request_id, num_prompt_tokens=chain.num_tokens, block_size_tokens=self._block_size_tokens)
        self._pushes[request_id] = _Push(leg, chain.num_tokens, publisher)
        self._source.begin(request_id, Handle(leg.transfer_id), chain, now_s=now_s())
        self._flush()

    def is_pushing(self, request_id: str) -> bool:
        """Whether this is a prefill leg that is to be pushed."""
        return request_id in self._pushes

    def publish(self, scheduled: SchedulerOutput, requests: Mapping[str, Request], step: StepMetadata) -> None:
        """Write down what this step computes of each prompt. ``requests``: all that the engine has."""
        if self._pushes:
            self._tables.update(scheduled, self._pushes)
        for request_id, push in self._pushes.items():
            num_tokens = scheduled.num_scheduled_tokens.get(request_id, 0)
            self._publish(push, requests[request_id], num_tokens, step)
        step.sources_over += self._source.take_sources_over()

    def finish(
        self, request: Request, block_ids: list[int], *, lease_s: float, num_cached_tokens: int | None
    ) -> dict[str, Any] | None:
        """The request ended, in whatever way; the response's ``kv_transfer_params`` when its prompt was computed.

        ``num_cached_tokens``: for the response.
        """
        request_id = request.request_id
        push = self._pushes.pop(request_id)
        self._tables.forget(request_id)
        num_blocks = num_blocks_for(push.num_tokens, self._block_size_tokens)
        # A request that was preempted in its last step has been answered and has no blocks any more.
        is_whole = request.num_computed_tokens >= push.num_tokens and len(block_ids) >= num_blocks
        is_computed = is_whole and vllm_compat.is_answered(request)
        kept = tuple(block_ids[:num_blocks])
        ending = self._source.finish(request_id, kept, is_computed=is_computed, duration_s=lease_s, now_s=now_s())
        if ending.is_taken:
            self._holder.adopt(kept)
        self._flush()
        if not is_computed:
            return None
        num_held_tokens = push.num_tokens if ending.is_held else 0
        return to_params(PrefillResult(push.leg.transfer_id, num_held_tokens, lease_s, num_cached_tokens))

    # -- the side channel's thread ----------------------------------------------------------------

    def answer(self, message: Register | Proceed | Withdraw) -> Message:
        """What a reader asks. Raises ``RemoteProtocolError`` for what contradicts itself."""
        answer: Message
        match message:
            case Register():
                answer = self._source.register(message, now_s=now_s())
            case Proceed():
                answer = self._source.proceed(message, now_s=now_s())
            case Withdraw():
                answer = self._source.withdraw(message, now_s=now_s())
        self._flush()
        return answer

    def release(self, handles: Iterable[str]) -> None:
        """What these handles name is not needed, also if it is still being computed."""
        for handle in handles:
            self._source.release(handle)

    def tick(self, now: float) -> float | None:
        """Let deadlines pass; the next one, or None."""
        self._source.tick(now)
        self._flush()
        return self._source.next_deadline_at_s()

    # -- the rest ---------------------------------------------------------------------------------

    def _publish(self, push: _Push, request: Request, num_tokens: int, step: StepMetadata) -> None:
        facts: tuple[Restarted | Progress, ...] = ()
        if request.num_preemptions != push.num_preemptions:
            push.num_preemptions = request.num_preemptions
            restarted = push.publisher.on_preempted()
            facts += (restarted,) if restarted else ()
        if num_tokens:
            before = request.num_computed_tokens
            facts += push.publisher.on_step(
                num_before_tokens=before,
                num_after_tokens=before + num_tokens,
                block_ids=self._tables.of(request.request_id),
            )
        step.restarted += [fact for fact in facts if isinstance(fact, Restarted)]
        step.progress += [fact for fact in facts if isinstance(fact, Progress)]

    def _flush(self) -> None:
        """Send the workers what is due to them."""
        for rank, worker in enumerate(self._workers):
            orders = self._source.take_orders(rank, now_s())
            if orders is None:
                continue
            try:
                self._side.submit(functools.partial(self._send, rank=rank, address=worker.address, orders=orders))
            except TransportError as error:
                # Sent again by its own timer.
                logger.warning("kvshuttle: not sent: %s", error)

    def _send(self, side: Endpoint[Message], *, rank: int, address: str, orders: Orders) -> None:
        on_reply = functools.partial(self._on_orders_taken, rank)
        side.request(address, orders, timeout_s=_ORDER_TIMEOUT_S, on_reply=on_reply)

    def _on_orders_taken(self, rank: int, reply: Message | KvshuttleError) -> None:
        if isinstance(reply, OrdersTaken):
            with self._lock:
                self._source.on_orders_taken(rank, reply, now_s=now_s())
                self._flush()
