"""The scheduler half: vLLM's scheduler hooks in, a step's metadata out.

It lives in the engine core process beside two threads: the engine's own, which runs the hooks, and the side
channel's, which answers peers and the router even while the engine idles or computes. One lock guards what both
touch; nothing waits while holding it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from kvshuttle import __version__
from kvshuttle.blocks import TokenChain, token_chain
from kvshuttle.clock import now_s
from kvshuttle.connector import fingerprint as fp
from kvshuttle.connector import vllm_compat
from kvshuttle.connector.holder import Holder
from kvshuttle.connector.pusher import Pusher
from kvshuttle.connector.reader import Reader
from kvshuttle.connector.readings import EngineClock
from kvshuttle.connector.service import Load, SideChannelService
from kvshuttle.connector.stats import ShuttleStats
from kvshuttle.connector.step_metadata import StepMetadata, WorkerHandshake, WorkerReport
from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.cards import EngineCard
from kvshuttle.handoff.ledger import LeaseLedger
from kvshuttle.handoff.messages import PROTOCOL_VERSION, Message
from kvshuttle.handoff.params import DecodeLeg, Leg, Mode, PrefillLeg, parse_leg
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.ids import LeaseId, mint
from kvshuttle.transport.side_channel import Endpoint, SideChannelThread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvshuttle.config import ConnectorConfig

logger = logging.getLogger(__name__)


class SchedulerHalf:
    """One engine's hand-off decisions. Hooks are called on the engine's thread.

    ``address``: ``host:port`` of its side channel, "" before ``open``.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: ConnectorConfig,
        *,
        secret: bytes | None,
        host_id: str,
    ) -> None:
        fp.check_supported(vllm_config, kv_cache_config)
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            logger.warning(
                "kvshuttle: kv_load_failure_policy is %r: requests whose KV cannot be read get errors", policy
            )
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._secret = secret
        self._host_id = host_id
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._incarnation = mint("inc")
        self.address = ""
        self._block_size_tokens = int(fp.attention_spec(kv_cache_config).block_size)
        self._lock = threading.RLock()
        self._stats = ShuttleStats()
        self._legs: dict[str, Leg] = {}
        self._pool: BlockPool | None = None
        self._live_requests: dict[str, Request] = {}
        self._num_running = 0
        # Made when the workers' caches exist; before that no hook has anything to do.
        self._holder: Holder | None = None
        self._reader: Reader | None = None
        self._pusher: Pusher | None = None
        self._service: SideChannelService | None = None
        self._side: SideChannelThread[Message] | None = None

    # -- start and stop ---------------------------------------------------------------------------

    def bind_pool(self, pool: BlockPool) -> None:
        """vLLM's block pool, given once before the first step."""
        self._pool = pool
        if self._holder is not None:
            self._holder.bind_pool(pool)

    def open(self, handshakes: Mapping[int, WorkerHandshake]) -> None:
        """All workers are ready: compose the engine's card and answer the side channel.

        Raises ``ConfigError`` when ranks differ or the address cannot be bound.
        """
        ranks = [handshakes[rank] for rank in sorted(handshakes)]
        own = fp.fingerprint(
            self._vllm_config, self._kv_cache_config, ranks, model_identity=self._config.model_identity
        )
        card = EngineCard(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            kv_role=str(self._vllm_config.kv_transfer_config.kv_role),
            protocol_version=PROTOCOL_VERSION,
            vllm_version=vllm_compat.vllm_version(),
            fingerprint=own,
            workers=tuple(handshake.card for handshake in ranks),
        )
        ledger = LeaseLedger(incarnation=self._incarnation, fingerprint=own, mint=lambda: LeaseId(mint("lease")))
        holder = self._holder = Holder(ledger, lease_s=self._config.lease_s)
        if self._pool is not None:
            holder.bind_pool(self._pool)
        endpoint = Endpoint(
            codec=MessageCodec(), secret=self._secret, sender=self._engine_id, handler=self._answer, now_s=now_s
        )
        port = self._config.side_channel_port
        if port:
            port += int(getattr(self._vllm_config.parallel_config, "data_parallel_index", 0) or 0)
        self.address = endpoint.bind(self._config.side_channel_host, port)
        self._side = SideChannelThread(endpoint, tick=self._tick, name="kvshuttle-side")
        clock = EngineClock(self._host_id, is_shared=all(each.host_id == self._host_id for each in ranks))
        self._reader = Reader(
            self._config, card=card, clock=clock, holder=holder, side=self._side, stats=self._stats, lock=self._lock
        )
        self._pusher = Pusher(holder, card=card, side=self._side, lock=self._lock)
        self._service = SideChannelService(card, holder, self._pusher, lock=self._lock, load=self._load)
        self._side.start()
        logger.info(
            "kvshuttle %s: engine %s (%s) listens on %s, vLLM %s",
            __version__, self._engine_id, self._incarnation, self.address, card.vllm_version,
        )  # fmt: skip

    def shutdown(self) -> None:
        """Stop the side channel. Idempotent."""
        if self._side is not None:
            self._side.stop(timeout_s=2.0)

    # -- scheduler hooks --------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request arrived: read its params, and ask the holder at once when it is a decode leg."""
        leg, problem = self._leg_of(request)
        is_push = leg is not None and leg.mode is Mode.PUSH
        chain = self._prompt_chain(request) if isinstance(leg, DecodeLeg) or is_push else None
        with self._lock:
            self._live_requests[request.request_id] = request
            self._return_blocks()
            if problem:
                logger.warning("kvshuttle: %s computes locally: %s", request.request_id, problem)
                self._stats.count("rejected_params")
            if leg is None or self._reader is None or self._pusher is None:
                return
            self._legs[request.request_id] = leg
            if isinstance(leg, DecodeLeg) and chain is not None:
                self._reader.begin(request.request_id, leg, chain)
            elif isinstance(leg, DecodeLeg):
                self._stats.count("transfers", "read", "prompt_without_tokens")
            elif is_push and chain is not None:
                self._pusher.begin(request.request_id, leg, chain)

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind the local prefix that a read would bring; None while the holder has not answered."""
        with self._lock:
            self._return_blocks()
            if self._reader is None or vllm_compat.wants_all_computed(request):
                return 0, False
            num_tokens = self._reader.offer(request.request_id, num_computed_tokens)
        if num_tokens and num_computed_tokens + num_tokens > request.num_tokens:
            # vLLM asserts this, and the engine would die of it.
            raise LocalProtocolError(f"{num_tokens} tokens were offered for {request.num_tokens}")
        return num_tokens, bool(num_tokens)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated: order the read, or tell the holder that there is nothing to read."""
        with self._lock:
            if self._reader is None:
                return
            if num_external_tokens:
                block_ids = tuple(block.block_id for block in blocks.blocks[0])
                self._reader.admit(request.request_id, num_external_tokens, block_ids)
            else:
                self._reader.decline(request.request_id)

    def step_metadata(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """This step's orders for the workers."""
        with self._lock:
            self._num_running = len(scheduler_output.num_scheduled_tokens)
            self._return_blocks()
            if self._reader is None or self._pusher is None:
                return StepMetadata()
            step = self._reader.take_step()
            try:
                self._pusher.publish(scheduler_output, self._live_requests, step)
            except Exception:
                # The other orders of this step are owed to vLLM; readers of the push have their deadlines.
                logger.exception("kvshuttle: progress of a push was not published")
                self._stats.count("internal_errors", "publish")
            return step

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        """A step's results, before vLLM applies them: it asserts on ids that it does not expect."""
        with self._lock:
            if self._reader is None or self._holder is None:
                return
            if isinstance(output.kv_connector_worker_meta, WorkerReport):
                self._take_report(output.kv_connector_worker_meta, self._reader, self._holder)
            for request_id in tuple(output.finished_recving or ()):
                is_expected = self._reader.is_loading(request_id)
                has_failed = self._reader.has_failed(request_id)
                if not self._reader.settle(request_id) and output.finished_recving:
                    output.finished_recving.discard(request_id)
                if has_failed and request_id in self._live_requests:
                    vllm_compat.restart_after_failed_load(self._live_requests[request_id])
                if not is_expected:
                    self._complain_of_completion(request_id)
            for request_id in tuple(output.finished_sending or ()):
                # This connector never delays a free, so nobody waits for this.
                output.finished_sending = set()
                self._complain_of_completion(request_id)
            self._return_blocks()

    def on_request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, in whatever way: hold what a prefill leg computed, let go of what a decode leg leased.

        Never delays vLLM's own free: blocks that are needed longer are pinned, so an idle engine stays idle.
        """
        with self._lock:
            self._live_requests.pop(request.request_id, None)
            leg = self._legs.pop(request.request_id, None)
            if self._reader is not None:
                self._reader.end(request.request_id)
            if self._pusher is not None and self._pusher.is_pushing(request.request_id):
                return False, self._pusher.finish(request, block_ids[0], lease_s=self._config.lease_s)
        if not isinstance(leg, PrefillLeg) or not vllm_compat.is_answered(request):
            return False, None
        chain = self._prompt_chain(request)
        if chain is None or self._holder is None:
            return False, None
        # A request that was preempted in its last step has been answered and has no blocks any more.
        computed = block_ids[0] if request.num_computed_tokens >= chain.num_tokens else []
        with self._lock:
            return False, self._holder.hold(leg, chain=chain, block_ids=computed, now_s=now_s())

    def return_blocks(self) -> bool:
        """Memory is short: give the pool what is due to it. True when that was anything."""
        with self._lock:
            return self._return_blocks() > 0

    def reset(self) -> bool:
        """vLLM's caches lose their meaning (new weights): nothing held may be lent any more. False: try again."""
        with self._lock:
            return self._holder is None or self._holder.drop_all(now_s())

    def take_stats(self) -> ShuttleStats | None:
        """Metrics since the last step."""
        with self._lock:
            if self._service is not None and self._holder is not None:
                self._service.count_changes(self._stats)
                self._stats.set("held_blocks", self._holder.ledger.num_held_blocks)
                self._stats.set("leases_held", self._holder.ledger.num_leases)
                self._stats.set("quarantined_blocks", self._holder.num_quarantined_blocks)
            return self._stats.take()

    # -- the rest ---------------------------------------------------------------------------------

    def count_internal_error(self, hook: str) -> None:
        """An exception was caught at the edge of a hook."""
        with self._lock:
            self._stats.count("internal_errors", hook)

    def _return_blocks(self) -> int:
        return self._holder.return_freed(now_s()) if self._holder is not None else 0

    def _take_report(self, report: WorkerReport, reader: Reader, holder: Holder) -> None:
        # Before vLLM frees the destinations of what failed.
        for request_id, num_ranks in report.undrained.items():
            for _ in range(num_ranks):
                holder.quarantine(request_id, reader.destination(request_id))
        for request_id, num_ranks in report.drained.items():
            holder.lift_quarantine(request_id, num_ranks)
        reader.note_failures(report.failed)
        reader.note_pushes(report.arriving, report.push_failed)

    def _complain_of_completion(self, request_id: str) -> None:
        logger.error("kvshuttle: kept an unexpected completion of %s from vLLM", request_id)
        self._stats.count("internal_errors", "unexpected_completion")

    def _leg_of(self, request: Request) -> tuple[Leg | None, str]:
        try:
            return parse_leg(request.kv_transfer_params), ""
        except ValueError as error:
            return None, str(error)

    def _prompt_chain(self, request: Request) -> TokenChain | None:
        token_ids = request.prompt_token_ids
        if not token_ids or getattr(request, "prompt_embeds", None) is not None:
            return None
        return token_chain(token_ids, self._block_size_tokens, vllm_compat.content_identity(request))

    def _load(self) -> Load:
        num_running = min(self._num_running, len(self._live_requests))
        pool = self._pool
        num_blocks, num_free = (pool.num_gpu_blocks, pool.get_num_free_blocks()) if pool is not None else (0, 0)
        return Load(
            num_running=num_running,
            num_waiting=len(self._live_requests) - num_running,
            num_loading=self._reader.num_loading if self._reader is not None else 0,
            num_slots=int(self._vllm_config.scheduler_config.max_num_seqs),
            num_blocks=num_blocks,
            num_free_blocks=num_free,
        )

    def _answer(self, message: Message) -> Message | None:
        return self._service.answer(message) if self._service is not None else None

    def _tick(self, now: float) -> float | None:
        with self._lock:
            if self._reader is None or self._pusher is None:
                return None
            deadlines = (self._reader.tick(now), self._pusher.tick(now))
            return min((at_s for at_s in deadlines if at_s is not None), default=None)
