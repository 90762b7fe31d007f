"""The worker half: vLLM's worker hooks in, orders to the comm thread out, each result reported exactly once."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvshuttle.connector import vllm_compat
from kvshuttle.connector.comm_thread import CommThread, CommThreadOptions, DrainedRead, ReadResult
from kvshuttle.connector.kv_layout import kv_memory
from kvshuttle.connector.stats import ShuttleStats
from kvshuttle.connector.step_metadata import ReadOrder, StepMetadata, WorkerHandshake, WorkerReport
from kvshuttle.ids import mint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from kvshuttle.config import ConnectorConfig
    from kvshuttle.handoff.messages import Message
    from kvshuttle.transport import Transport
    from kvshuttle.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)

_DIRECTION = "read"


class WorkerHalf:
    """One rank's share of the connector. All methods run in the worker's main thread."""

    def __init__(self, config: ConnectorConfig, *, rank: int, secret: bytes | None, host_id: str) -> None:
        self._config = config
        self._rank = rank
        self._secret = secret
        self._host_id = host_id
        self._comm: CommThread | None = None
        self._handshake: WorkerHandshake | None = None
        self._stats = ShuttleStats()
        self._report = WorkerReport()
        self._last_step: StepMetadata | None = None
        self._pending: dict[str, ReadOrder] = {}
        self._failed_block_ids: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor], *, num_blocks: int, isa: str) -> None:
        """Register the KV memory and start the comm thread. Raises ``ConfigError`` when the layout is not supported."""
        memory = kv_memory(kv_caches, num_blocks=num_blocks)
        options = CommThreadOptions(
            rank=self._rank,
            host=self._config.side_channel_host,
            advertise_host=self._config.advertise_host or self._config.side_channel_host,
            host_id=self._host_id,
            transit_allowance_s=self._config.submit_margin_s,
        )
        self._comm = CommThread(
            memory, options, transport_factory=self._make_transport, endpoint_factory=self._make_endpoint
        )
        card = self._comm.start()
        self._handshake = WorkerHandshake(card=card, kv_layout=f"{memory.layout}{'/' + isa if isa else ''}")
        logger.info(
            "kvshuttle: rank %d registered %d regions, side channel %s", self._rank, len(card.regions), card.address
        )

    def handshake(self) -> WorkerHandshake | None:
        """What the scheduler half needs to know of this rank; None before the caches are registered."""
        return self._handshake

    def begin_step(self, metadata: StepMetadata) -> None:
        """Pass a step's orders on, once, however many hooks show the same metadata."""
        if metadata is self._last_step or self._comm is None:
            return
        self._last_step = metadata
        for incarnation, cards in metadata.peers.items():
            self._comm.meet(incarnation, cards[self._rank])
        for order in metadata.reads:
            self._pending[order.request_id] = order
            self._comm.order(order)
        for incarnation in metadata.gone:
            self._comm.forget(incarnation)

    def transfer_results(self) -> vllm_compat.TransferResults:
        """Requests whose reads ended since the last call; each request id comes once."""
        results = vllm_compat.TransferResults()
        if self._comm is None:
            return results
        for outcome in self._comm.take():
            if isinstance(outcome, DrainedRead):
                self._report.drained[outcome.request_id] += 1
            elif outcome.request_id in self._pending:
                order = self._pending.pop(outcome.request_id)
                self._account(outcome)
                results.finished_recving.add(outcome.request_id)
                if outcome.reason:
                    self._note_failed_blocks(order)
                    results.failed_recving.add(outcome.request_id)
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
        if not (report.failed or report.undrained or report.drained):
            return None
        self._report = WorkerReport()
        return report

    def take_stats(self) -> ShuttleStats | None:
        """Metrics since the last call."""
        return self._stats.take()

    def shutdown(self) -> None:
        """Stop the comm thread. Idempotent."""
        if self._comm is not None:
            self._comm.stop()

    def _account(self, result: ReadResult) -> None:
        if result.reason:
            self._report.failed[result.request_id] = result.reason
            self._stats.count("transfer_failures", _DIRECTION, result.reason)
            if not result.is_drained:
                self._report.undrained[result.request_id] += 1
            return
        self._stats.count("transfer_bytes", _DIRECTION, by=result.num_bytes)
        self._stats.observe("transfer_descriptors", _DIRECTION, value=result.num_descriptors)
        self._stats.observe("transfer_post_seconds", _DIRECTION, value=result.post_s)
        self._stats.observe("transfer_wire_seconds", _DIRECTION, value=result.wire_s)

    def _make_transport(self) -> Transport:
        # Imported here: the API server imports this package too and must not load NIXL.
        from kvshuttle.transport.nixl import NixlTransport, prepare_environment

        prepare_environment(os.environ)
        return NixlTransport(
            name=mint(f"kvshuttle-{self._rank}"),
            backends=self._config.nixl_backends,
            backend_params=self._config.nixl_backend_params or None,
            has_progress_thread=self._config.nixl_progress_thread,
        )

    def _make_endpoint(self, handler: Callable[[Message], Message | None]) -> Endpoint[Message]:
        from kvshuttle.clock import now_s
        from kvshuttle.handoff.wire import MessageCodec
        from kvshuttle.transport.endpoint import Endpoint

        return Endpoint(
            codec=MessageCodec(), secret=self._secret, sender=f"worker-{self._rank}", handler=handler, now_s=now_s
        )

    def _note_failed_blocks(self, order: ReadOrder) -> None:
        if not vllm_compat.HAS_TRANSFER_RESULTS:
            for run in order.plan.runs:
                self._failed_block_ids.update(range(run.destination_first, run.destination_first + run.num_blocks))
