"""The worker half: vLLM's worker hooks in, orders to the comm thread out, each result reported exactly once."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector import vllm_compat
from kvshuttle.connector.arrivals import PushNews
from kvshuttle.connector.comm_thread import CommThread, CommThreadOptions
from kvshuttle.connector.kv_layout import kv_memory
from kvshuttle.connector.loads import Loads
from kvshuttle.connector.reads import DrainedRead, ReadResult
from kvshuttle.connector.stats import ShuttleStats
from kvshuttle.connector.step_metadata import StepMetadata, WorkerHandshake, WorkerReport
from kvshuttle.connector.writes import SETTLE_TIMEOUT_S, EndedWrite, FailedWrite
from kvshuttle.ids import mint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from kvshuttle.config import ConnectorConfig
    from kvshuttle.connector.comm_thread import CommOutcome, TransportFactory
    from kvshuttle.connector.step_metadata import FailedLoad, ReadOrder
    from kvshuttle.handoff.block_plan import BlockPlan
    from kvshuttle.handoff.messages import Message
    from kvshuttle.handoff.progress import Restarted
    from kvshuttle.transport import Transport
    from kvshuttle.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)

_DIRECTION = "read"
_SETTLE_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which worker this is. ``host_id``: names the monotonic clock of this host. ``secret``: the side channel's."""

    rank: int
    host_id: str
    secret: bytes | None


class WorkerHalf:
    """One rank's share of the connector. All methods run in the worker's main thread.

    ``transport_factory``: makes the transport, in the comm thread; NIXL as configured when None.
    """

    def __init__(
        self, config: ConnectorConfig, place: WorkerPlace, *, transport_factory: TransportFactory | None = None
    ) -> None:
        self._config = config
        self._place = place
        self._transport_factory = transport_factory or self._make_nixl
        self._comm: CommThread | None = None
        self._handshake: WorkerHandshake | None = None
        self._kv_caches: Mapping[str, Tensor] = {}
        self._stats = ShuttleStats()
        self._report = WorkerReport()
        self._last_step: StepMetadata | None = None
        self._last_ended_step: StepMetadata | None = None
        self._loads = Loads()
        self._failed_block_ids: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor], *, num_blocks: int, page_content: str) -> None:
        """Register the KV memory and start the comm thread.

        ``page_content``: what else decides the meaning of a page's bytes. Raises ``ConfigError`` when the layout is
        not supported.
        """
        memory = kv_memory(kv_caches, num_blocks=num_blocks)
        self._kv_caches = kv_caches
        options = CommThreadOptions(
            rank=self._place.rank,
            host=self._config.side_channel_host,
            advertise_host=self._config.advertise_host or self._config.side_channel_host,
            host_id=self._place.host_id,
            transit_allowance_s=self._config.submit_margin_s,
        )
        self._comm = CommThread(
            memory, options, transport_factory=self._transport_factory, endpoint_factory=self._make_endpoint
        )
        card = self._comm.start()
        self._handshake = WorkerHandshake(card, kv_layout=f"{memory.layout}/{page_content}", host_id=options.host_id)
        logger.info(
            "kvshuttle: rank %d registered %d regions, side channel %s", card.rank, len(card.regions), card.address
        )

    def handshake(self) -> WorkerHandshake | None:
        """What the scheduler half needs to know of this rank; None before the caches are registered."""
        return self._handshake

    def begin_step(self, metadata: StepMetadata) -> None:
        """Pass a step's orders on, once, however many hooks show the same metadata."""
        if metadata is self._last_step or self._comm is None:
            return
        self._last_step = metadata
        # Before anything can fail: whatever is in here gets an end. Pushes first, since one may be called off in the
        # step that begins it.
        for expectation in metadata.pushes:
            self._loads.expect_push(expectation.request_id, block_ids=expectation.block_ids)
        failed = [load for load in metadata.failed_loads if not load.is_push or self._is_pending(load)]
        reads = [order for order in metadata.reads if not order.is_instead_of_push or self._is_pending(order)]
        self._expect(failed, reads)
        for incarnation in metadata.gone:
            self._comm.forget(incarnation)
        for incarnation, cards in metadata.peers.items():
            self._comm.meet(incarnation, cards[self._place.rank])
        for expectation in metadata.pushes:
            self._comm.expect(expectation)
        for load in failed:
            self._comm.abandon(load.request_id)
        for order in reads:
            self._comm.order(order)
        self._restart(metadata.restarted, self._comm)

    def _expect(self, failed: list[FailedLoad], reads: list[ReadOrder]) -> None:
        for load in failed:
            self._loads.fail(load)
        for order in reads:
            block_ids = _destination(order.plan)
            self._loads.expect(order.request_id, block_ids=block_ids, budget_s=order.budget_s, now_s=now_s())

    def end_step(self, metadata: StepMetadata) -> None:
        """The step's forward pass has been launched: what it computes may be written, once, when it is done."""
        if metadata is self._last_ended_step or self._comm is None:
            return
        self._last_ended_step = metadata
        if metadata.progress:
            self._comm.compute(self._launched(), tuple(metadata.progress))
        if metadata.sources_over:
            self._comm.forget_sources(tuple(metadata.sources_over))

    def transfer_results(self) -> vllm_compat.TransferResults:
        """Requests whose reads ended since the last call; each request id comes once."""
        results = vllm_compat.TransferResults()
        if self._comm is None:
            return results
        outcomes = self._comm.take()
        reads = [outcome for outcome in outcomes if isinstance(outcome, ReadResult | DrainedRead)]
        for outcome in outcomes:
            self._note(outcome)
        step = self._loads.settle(reads, is_comm_alive=self._comm.is_alive, now_s=now_s())
        for result in step.ended:
            results.finished_recving.add(result.request_id)
            self._count(result)
        results.failed_recving.update(step.failures)
        self._report.failed.update(step.failures)
        self._report.undrained += step.undrained
        self._report.drained += step.drained
        self._failed_block_ids |= step.failed_block_ids
        return results

    def take_failed_block_ids(self) -> set[int]:
        """Destination blocks of failed reads since the last call, for vLLM up to 0.29."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def count_internal_error(self, hook: str) -> None:
        """An exception was caught at the edge of a hook."""
        self._stats.count("internal_errors", hook)

    def take_report(self) -> WorkerReport | None:
        """What the scheduler half should know besides ids; None when there is nothing."""
        report = self._report
        if report == WorkerReport():
            return None
        self._report = WorkerReport()
        return report

    def take_stats(self) -> ShuttleStats | None:
        """Metrics since the last call."""
        return self._stats.take()

    def shutdown(self) -> None:
        """Stop the comm thread. Idempotent."""
        if self._comm is not None and not self._comm.stop():
            logger.error("kvshuttle: %r did not stop; its memory stays mapped until the process ends", self._comm)

    def _is_pending(self, order: FailedLoad | ReadOrder) -> bool:
        return self._loads.is_pending(order.request_id)

    def _restart(self, restarted: list[Restarted], comm: CommThread) -> None:
        """Before the forward pass that overwrites what is lost, and for a moment only: see ``SETTLE_TIMEOUT_S``."""
        if not restarted or comm.restart(restarted):
            return
        give_up_at_s = now_s() + SETTLE_TIMEOUT_S
        source_ids = [each.source_id for each in restarted]
        while not comm.is_settled(source_ids) and now_s() < give_up_at_s:
            time.sleep(_SETTLE_POLL_S)

    def _launched(self) -> Callable[[], bool]:
        """Says when the forward pass that has just been launched is done."""
        assert self._handshake is not None
        if self._handshake.card.device == "DRAM":
            return lambda: True
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        is_done: Callable[[], bool] = event.query
        return is_done

    def _note(self, outcome: CommOutcome) -> None:
        """What is of no concern to loads."""
        match outcome:
            case PushNews() if outcome.failure:
                self._report.push_failed[outcome.request_id] = outcome.failure
            case PushNews():
                self._report.arriving.add(outcome.request_id)
            case EndedWrite():
                self._stats.count("transfer_bytes", "write", by=outcome.num_bytes)
                self._stats.count("pushed_bytes", "streamed" if outcome.is_streamed else "final", by=outcome.num_bytes)
                self._stats.observe("transfer_descriptors", "write", value=outcome.num_descriptors)
                self._stats.observe("transfer_post_seconds", "write", value=outcome.post_s)
                self._stats.observe("transfer_wire_seconds", "write", value=outcome.wire_s)
            case FailedWrite():
                self._stats.count("transfer_failures", "write", outcome.reason)

    def _count(self, result: ReadResult) -> None:
        if result.reason:
            if not result.is_called_off:
                self._stats.count("transfer_failures", _DIRECTION, result.reason)
            return
        if result.is_pushed:
            self._stats.count("transfer_bytes", "push", by=result.num_bytes)
            self._stats.observe("push_wait_seconds", value=result.wire_s)
            return
        self._stats.count("transfer_bytes", _DIRECTION, by=result.num_bytes)
        self._stats.observe("transfer_descriptors", _DIRECTION, value=result.num_descriptors)
        self._stats.observe("transfer_post_seconds", _DIRECTION, value=result.post_s)
        self._stats.observe("transfer_wire_seconds", _DIRECTION, value=result.wire_s)

    def _make_nixl(self) -> Transport:
        # Imported here: the API server imports this package too and must not load NIXL.
        from kvshuttle.transport.nixl import NixlTransport, prepare_environment

        prepare_environment(os.environ)
        return NixlTransport(
            name=mint(f"kvshuttle-{self._place.rank}"),
            backends=self._config.nixl_backends,
            backend_params=self._config.nixl_backend_params or None,
            has_progress_thread=self._config.nixl_progress_thread,
        )

    def _make_endpoint(self, handler: Callable[[Message], Message | None]) -> Endpoint[Message]:
        from kvshuttle.handoff.wire import MessageCodec
        from kvshuttle.transport.endpoint import Endpoint

        return Endpoint(
            codec=MessageCodec(),
            secret=self._place.secret,
            sender=f"worker-{self._place.rank}",
            handler=handler,
            now_s=now_s,
        )


def _destination(plan: BlockPlan) -> tuple[int, ...]:
    return tuple(run.destination_first + offset for run in plan.runs for offset in range(run.num_blocks))
