"""The scheduler half: vLLM's scheduler hooks in, a step's metadata out.

It lives in the engine core process beside two threads: the engine's own, which runs the hooks, and the side
channel's, which answers peers and the router even while the engine idles or computes. One lock guards what both
touch; nothing waits while holding it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from kvshuttle import __version__
from kvshuttle.clock import now_s
from kvshuttle.connector import fingerprint as fp
from kvshuttle.connector import vllm_compat
from kvshuttle.connector.chains import prompt_chain
from kvshuttle.connector.holder import Holder
from kvshuttle.connector.keeper import Keeper, retention_of
from kvshuttle.connector.legs import Legs, leg_of, wish_of
from kvshuttle.connector.pace import Pace
from kvshuttle.connector.pusher import Pusher
from kvshuttle.connector.reader import Reader
from kvshuttle.connector.readings import EngineClock
from kvshuttle.connector.service import Load, SideChannelService
from kvshuttle.connector.stats import ShuttleStats
from kvshuttle.connector.step_metadata import StepMetadata, WorkerHandshake, WorkerReport
from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.cards import FEATURES, EngineCard
from kvshuttle.handoff.ledger import LeaseLedger
from kvshuttle.handoff.messages import PROTOCOL_VERSION, Message
from kvshuttle.handoff.params import Mode, PrefillLeg, keep_of
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.ids import LeaseId, mint
from kvshuttle.transport.side_channel import Endpoint, SideChannelThread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
        self._pace = Pace(config.kv_recompute_threshold, self._stats)
        self._legs = Legs(self._stats)
        self._pool: BlockPool | None = None
        self._num_watermark_blocks = 0
        self._live_requests: dict[str, Request] = {}
        self._num_running = 0
        # Made when the workers' caches exist; before that no hook has anything to do.
        self._holder: Holder | None = None
        self._reader: Reader | None = None
        self._pusher: Pusher | None = None
        self._keeper: Keeper | None = None
        self._service: SideChannelService | None = None
        self._side: SideChannelThread[Message] | None = None

    # -- start and stop ---------------------------------------------------------------------------

    def bind_pool(self, pool: BlockPool, num_watermark_blocks: int = 0) -> None:
        """vLLM's block pool, given once before the first step, and how much of it vLLM leaves free at admissions."""
        self._pool = pool
        self._num_watermark_blocks = num_watermark_blocks
        if self._holder is not None:
            self._holder.bind_pool(pool, num_watermark_blocks)

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
            features=FEATURES,
        )
        ledger = LeaseLedger(incarnation=self._incarnation, fingerprint=own, mint=lambda: LeaseId(mint("lease")))
        holder = self._holder = Holder(ledger, lease_s=self._config.lease_s)
        if self._pool is not None:
            holder.bind_pool(self._pool, self._num_watermark_blocks)
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
            self._config,
            card=card,
            clock=clock,
            holder=holder,
            side=self._side,
            stats=self._stats,
            lock=self._lock,
            pace=self._pace,
        )
        self._pusher = Pusher(holder, card=card, side=self._side, lock=self._lock)
        retention = retention_of(self._config, ledger, num_blocks=self._kv_cache_config.num_blocks - 1)
        self._keeper = Keeper(
            holder,
            retention,
            block_size_tokens=self._block_size_tokens,
            max_step_tokens=int(self._vllm_config.scheduler_config.max_num_batched_tokens),
            is_disconnect_retained=self._config.is_disconnect_retained,
        )
        self._service = SideChannelService(card, holder, self._pusher, retention, lock=self._lock, load=self._load)
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
        """A request arrived: read its params, and ask the holder of its KV at once when there is one."""
        leg, problem = leg_of(request)
        wish = wish_of(leg)
        is_pushed_from_here = isinstance(leg, PrefillLeg) and leg.mode is Mode.PUSH
        chain = prompt_chain(request, self._block_size_tokens) if wish is not None or is_pushed_from_here else None
        with self._lock:
            self._live_requests[request.request_id] = request
            self._return_blocks()
            if problem:
                logger.warning("kvshuttle: %s computes locally: %s", request.request_id, problem)
                self._stats.count("rejected_params")
            if leg is None or self._reader is None or self._pusher is None:
                return
            self._legs.add(request.request_id, leg, chain)
            if wish is not None:
                self._reader.begin(request.request_id, wish, chain)
            if isinstance(leg, PrefillLeg) and is_pushed_from_here and chain is not None:
                self._pusher.begin(request.request_id, leg, chain)

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind the local prefix that a read would bring; None while the holder has not answered.

        vLLM is about to admit the request, so this is the time to make room for it, too.
        """
        with self._lock:
            self._return_blocks()
            if self._reader is None or self._keeper is None:
                return 0, False
            is_all_computed = vllm_compat.wants_all_computed(request)
            num_tokens = 0 if is_all_computed else self._reader.offer(request.request_id, num_computed_tokens)
            if num_tokens is None:
                return None, False
            if num_tokens and num_computed_tokens + num_tokens > request.num_tokens:
                # vLLM asserts this, and the engine would die of it.
                raise LocalProtocolError(f"{num_tokens} tokens were offered for {request.num_tokens}")
            self._legs.note_asked(request.request_id, num_computed_tokens)
            self._keeper.make_room_for(request, num_computed_tokens, num_tokens, self._live_requests.values())
        return num_tokens, bool(num_tokens)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated: order the read, or tell the holder that there is nothing to read."""
        with self._lock:
            if self._reader is None:
                return
            self._legs.note_admitted(request.request_id)
            if num_external_tokens:
                block_ids = tuple(block.block_id for block in blocks.blocks[0])
                self._reader.admit(request.request_id, num_external_tokens, block_ids)
            else:
                self._reader.decline(request.request_id)

    def step_metadata(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """This step's orders for the workers."""
        with self._lock:
            self._num_running = len(scheduler_output.num_scheduled_tokens)
            self._pace.note_scheduled(scheduler_output.num_scheduled_tokens.values(), now_s())
            self._return_blocks()
            self._legs.note_scheduled(scheduler_output.num_scheduled_tokens, self._live_requests)
            if self._reader is None or self._pusher is None or self._keeper is None:
                return StepMetadata()
            step = self._reader.take_step()
            with self._going_on("publish"):
                self._pusher.publish(scheduler_output, self._live_requests, step)
            with self._going_on("headroom"):
                self._keeper.make_headroom(scheduler_output, self._live_requests.values())
            return step

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        """A step's results, before vLLM applies them: it asserts on ids that it does not expect."""
        with self._lock:
            self._pace.note_done(now_s())
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
        """A request ended, in whatever way: hold what a prefill leg computed, let go of what a decode leg leased, keep
        what the next turn may want.

        Never delays vLLM's own free: blocks that are needed longer are pinned, so an idle engine stays idle.
        """
        with self._lock:
            self._live_requests.pop(request.request_id, None)
            live = self._legs.pop(request.request_id)
            num_cached_tokens = live.num_cached_tokens if live is not None else None
            if self._reader is not None:
                self._reader.end(request.request_id)
            if self._pusher is not None and self._pusher.is_pushing(request.request_id):
                lease_s = self._config.lease_s
                return False, self._pusher.finish(
                    request, block_ids[0], lease_s=lease_s, num_cached_tokens=num_cached_tokens
                )
        leg = live.leg if live is not None else None
        if isinstance(leg, PrefillLeg):
            return False, self._hold(request, leg, block_ids[0], num_cached_tokens)
        if live is not None and (wish := keep_of(leg)) is not None and self._keeper is not None:
            # Hashed outside the lock: the side channel's thread would wait for it.
            chain = self._keeper.lasting_chain(request, live.prompt)
            if chain is not None:
                with self._lock:
                    self._keeper.keep(wish, chain, block_ids[0])
        return False, None

    def return_blocks(self) -> bool:
        """A running request lacks a block: give the pool what is due to it, or what is kept for later turns. True when
        that was anything.
        """
        with self._lock:
            return self._return_blocks() > 0 or (self._keeper is not None and self._keeper.give_way())

    def reset(self) -> bool:
        """vLLM's caches lose their meaning (new weights): nothing held may be lent any more. False: try again."""
        with self._lock:
            return self._holder is None or self._holder.drop_all(now_s())

    def take_stats(self) -> ShuttleStats | None:
        """Metrics since the last step."""
        with self._lock:
            if self._service is not None and self._holder is not None:
                self._service.count_changes(self._stats)
                if self._keeper is not None:
                    self._keeper.report(self._stats)
                self._stats.set("held_blocks", self._holder.ledger.num_held_blocks)
                self._stats.set("leases_held", self._holder.ledger.num_leases)
                self._stats.set("quarantined_blocks", self._holder.num_quarantined_blocks)
            return self._stats.take()

    # -- the rest ---------------------------------------------------------------------------------

    def count_internal_error(self, hook: str) -> None:
        """An exception was caught at the edge of a hook."""
        with self._lock:
            self._stats.count("internal_errors", hook)

    def _hold(
        self, request: Request, leg: PrefillLeg, block_ids: list[int], num_cached_tokens: int | None
    ) -> dict[str, Any] | None:
        chain = prompt_chain(request, self._block_size_tokens) if vllm_compat.is_answered(request) else None
        if chain is None or self._holder is None:
            return None
        # A request that was preempted in its last step has been answered and has no blocks any more.
        computed = block_ids if request.num_computed_tokens >= chain.num_tokens else []
        with self._lock:
            return self._holder.hold(
                leg, chain=chain, block_ids=computed, now_s=now_s(), num_cached_tokens=num_cached_tokens
            )

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """The other orders of a step are owed to vLLM; readers of a push have their deadlines."""
        try:
            yield
        except Exception:
            logger.exception("kvshuttle: %s failed in this step", what)
            self._stats.count("internal_errors", what)

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
