"""``ShuttleConnector``: what vLLM loads through ``kv_connector_module_path``.

A facade: it forwards to one half by role and guards every hook. An exception in a hook would kill the engine, so
it is logged, counted and answered with "nothing to transfer"; only start-up may fail, and then says why.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvshuttle.config import ConnectorConfig, secret_from
from kvshuttle.connector import vllm_compat
from kvshuttle.connector.step_metadata import StepMetadata, WorkerHandshake, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvshuttle.connector.scheduler_half import SchedulerHalf
    from kvshuttle.connector.worker_half import WorkerHalf

logger = logging.getLogger(__name__)

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(make_default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Keep a hook's exceptions from vLLM: log, count, and answer with a fresh ``make_default()``."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: ShuttleConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                logger.exception("kvshuttle: %s failed; going on without a transfer", hook.__name__)
                self.count_internal_error(hook.__name__)
                return make_default()

        return call  # type: ignore[return-value]

    return decorate


def _nothing() -> None:
    return None


class ShuttleConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's view of kvshuttle; one instance for each role and process."""

    if vllm_compat.HIT_SOURCE is not None:
        _cache_hit_source = vllm_compat.HIT_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        vllm_compat.adopt_logging()
        config = ConnectorConfig.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        secret = secret_from(os.environ)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            from kvshuttle.connector.scheduler_half import SchedulerHalf

            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, config, secret=secret, host_id=_host_id())
        else:
            self._worker = self.make_worker_half(config, secret)

    def make_worker_half(self, config: ConnectorConfig, secret: bytes | None) -> WorkerHalf:
        """This process's worker half."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        from kvshuttle.connector.worker_half import WorkerHalf, WorkerPlace

        place = WorkerPlace(get_tensor_model_parallel_rank(), host_id=_host_id(), secret=secret)
        return WorkerHalf(config, place)

    def count_internal_error(self, hook: str) -> None:
        """Count an exception caught at the edge of ``hook``."""
        if self._scheduler is not None:
            self._scheduler.count_internal_error(hook)
        elif self._worker is not None:
            self._worker.count_internal_error(hook)

    # -- scheduler hooks --------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """0.30 and later."""
        self._kv_cache_manager = kv_cache_manager
        if self._scheduler is not None:
            num_watermark_blocks = vllm_compat.num_watermark_blocks(kv_cache_manager)
            self._scheduler.bind_pool(kv_cache_manager.block_pool, num_watermark_blocks)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Up to 0.29, where vLLM calls it directly."""
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], WorkerHandshake]) -> None:
        """All workers have registered their caches: start answering peers."""
        self.set_xfer_handshake_metadata({tp_rank: each for (_, tp_rank), each in metadata.items()})

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, WorkerHandshake]) -> None:
        """The same, by tensor-parallel rank only."""
        if self._scheduler is not None:
            self._scheduler.open(metadata)

    @guarded(_nothing)
    def on_new_request(self, request: Request) -> None:
        """A request was added."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a read would bring behind the local prefix."""
        return self._scheduler_half.num_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Groups whose fresh blocks a load fills: all of them, that is the one group we support."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    @guarded(_nothing)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated for a request."""
        self._scheduler_half.after_alloc(request, blocks, num_external_tokens)

    @guarded(StepMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Orders for the workers, every step."""
        return self._scheduler_half.step_metadata(scheduler_output)

    @guarded(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' results, before vLLM applies them."""
        self._scheduler_half.on_worker_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """One KV cache group; vLLM calls the other form since we declare support for several."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, in whatever way."""
        return self._scheduler_half.on_request_finished(request, block_ids)

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """A running request lacks a block: before vLLM preempts one, give back what is due. 0.30 and later."""
        return self._scheduler_half.return_blocks()

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Held KV loses its meaning with the weights that made it. False while some of it is still being read."""
        return self._scheduler_half.reset()

    @property
    def _scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler hook was called on a worker's connector"
        return self._scheduler

    # -- worker hooks -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV memory exists: register it. Fails at start, saying why, when its layout is not supported."""
        from kvshuttle.connector.fingerprint import attention_spec

        is_cpu = all(tensor.device.type == "cpu" for tensor in kv_caches.values())
        content = vllm_compat.page_content(self._vllm_config, attention_spec(self._kv_cache_config), is_cpu=is_cpu)
        self._worker_half.register_kv_caches(
            kv_caches, num_blocks=self._kv_cache_config.num_blocks, page_content=content
        )

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        """What the scheduler half must know of this rank."""
        return self._worker.handshake() if self._worker is not None else None

    @guarded(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The first hook of a step, before its forward pass: reads start here."""
        self._begin_step(kv_connector_metadata)

    @guarded(_nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Reads that no earlier hook of the step has started."""
        if self._connector_metadata is not None:
            self._begin_step(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only when all its layers are here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: readers read the cache itself."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        """The forward pass has been launched: pushes of what it computes may go out. Nothing is waited for."""
        self._end_step()

    @guarded(vllm_compat.TransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> vllm_compat.TransferResults:
        """Reads that ended, each once. 0.30 and later."""
        # Releases differ in when they call wait_for_save; this hook comes after every forward pass.
        self._end_step()
        return self._worker_half.transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same for releases up to 0.29, which learn of failures by block ids."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed reads, where vLLM has no other way to learn of them."""
        failed = self._worker_half.take_failed_block_ids()
        return set() if vllm_compat.HAS_TRANSFER_RESULTS else failed

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler half should know besides ids."""
        return self._worker.take_report() if self._worker is not None else None

    def _begin_step(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, StepMetadata)
        self._worker_half.begin_step(metadata)

    def _end_step(self) -> None:
        if self._connector_metadata is not None:
            assert isinstance(self._connector_metadata, StepMetadata)
            self._worker_half.end_step(self._connector_metadata)

    @property
    def _worker_half(self) -> WorkerHalf:
        assert self._worker is not None, "a worker hook was called on the scheduler's connector"
        return self._worker

    # -- both -------------------------------------------------------------------------------------

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Metrics since the last step."""
        half = self._scheduler if self._scheduler is not None else self._worker
        return half.take_stats() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Stats from their payload, in the API server."""
        from kvshuttle.connector.stats import ShuttleStats

        return ShuttleStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """The Prometheus series, in the API server."""
        from kvshuttle.connector.stats import ShuttlePromMetrics

        return ShuttlePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads before tokens, so that all engines lay a page out alike; vLLM's name for it in every release."""
        return "HND"

    def shutdown(self) -> None:
        """Stop threads and close sockets. Idempotent."""
        half = self._scheduler if self._scheduler is not None else self._worker
        if half is not None:
            half.shutdown()


def _host_id() -> str:
    """Equal for two processes whose monotonic clocks are the same clock."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else socket.gethostname()
