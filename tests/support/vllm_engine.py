"""A whole engine in this process: vLLM's own scheduler, pool and aggregator around our connector and a checked model.

Only the model and the process borders are ours. vLLM's assertions stand, so an unknown or doubled id ends the test as
it would end the engine; metadata and results are pickled between the halves as between vLLM's processes.
"""

from __future__ import annotations

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import json
import pickle
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvshuttle.connector import vllm_compat
from kvshuttle.connector.connector import ShuttleConnector, _host_id
from kvshuttle.connector.stats import ShuttleStats
from kvshuttle.connector.worker_half import WorkerHalf, WorkerPlace
from kvshuttle.handoff.messages import Hello, HelloAck, Status, StatusReport
from support.checked_model import HEAD_SIZE, NUM_HEADS, CheckedModel
from support.side import ask_side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from vllm.v1.core.sched.output import SchedulerOutput

    from kvshuttle.config import ConnectorConfig
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.transport import Transport

LIMIT_S = 60.0
"""Far beyond any wait here, on a busy machine too; a test that gets there has failed."""
BLOCK_SIZE = 16


@dataclass(frozen=True)
class EngineOptions:
    """``transport``: makes a rank's transport. ``extra``: kv_connector_extra_config."""

    engine_id: str
    transport: Callable[[int], Transport]
    num_blocks: int = 65
    num_ranks: int = 1
    num_layers: int = 2
    max_num_batched_tokens: int = 128
    load_failure_policy: str = "recompute"
    model_name: str = "tiny"
    has_prefix_cache: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """What the client of one request has got."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    kv_transfer_params: dict[str, Any] | None = None


def vllm_config(options: EngineOptions, directory: Path) -> VllmConfig:
    """A configuration as vLLM makes it from its command line."""
    model = directory / options.model_name
    model.mkdir(exist_ok=True)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": NUM_HEADS * options.num_ranks,
        "num_key_value_heads": NUM_HEADS * options.num_ranks,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    (model / "config.json").write_text(json.dumps(described))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=2048, seed=0, enforce_eager=True
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=options.has_prefix_cache),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=2048,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=options.num_ranks, distributed_executor_backend="mp"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="ShuttleConnector",
            kv_connector_module_path="kvshuttle.connector.connector",
            kv_role="kv_both",
            engine_id=options.engine_id,
            kv_load_failure_policy=options.load_failure_policy,
            kv_connector_extra_config={"side_channel_port": 0, **options.extra},
        ),
        device_config=DeviceConfig("cpu"),
    )


def kv_cache_config(options: EngineOptions) -> KVCacheConfig:
    """One group of full-attention layers."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(options.num_layers)]
    return KVCacheConfig(
        num_blocks=options.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)]
    )


class RankConnector(ShuttleConnector):
    """A worker's connector of a given rank, with a given transport, without torch.distributed."""

    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, *, rank: int, transport: Callable[[], Transport]
    ) -> None:
        self._rank_here = rank
        self._transport_here = transport
        super().__init__(config, KVConnectorRole.WORKER, cache)

    def make_worker_half(self, config: ConnectorConfig, secret: bytes | None) -> WorkerHalf:
        place = WorkerPlace(self._rank_here, host_id=_host_id(), secret=secret)
        return WorkerHalf(config, place, transport_factory=self._transport_here)


class Engine:
    """``model``: its KV. ``answers`` and ``prompts``: by request id. ``metrics``: what the connector reported so far.

    ``between``: called between the forward pass and the processing of its output, where vLLM takes aborts.
    """

    def __init__(self, options: EngineOptions, directory: Path) -> None:
        self.options = options
        config, cache = vllm_config(options, directory), kv_cache_config(options)
        config.cache_config.num_gpu_blocks = options.num_blocks
        self.model = CheckedModel(
            num_blocks=options.num_blocks,
            block_size=BLOCK_SIZE,
            num_layers=options.num_layers,
            num_ranks=options.num_ranks,
        )
        self.workers = [
            RankConnector(config, cache, rank=rank, transport=lambda rank=rank: options.transport(rank))
            for rank in range(options.num_ranks)
        ]
        for worker, caches in zip(self.workers, self.model.caches, strict=True):
            worker.register_kv_caches(caches)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self.connector = self.scheduler.connector
        assert isinstance(self.connector, ShuttleConnector)
        self.half = self.connector._scheduler
        assert self.half is not None
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {
                (0, rank): pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
                for rank, worker in enumerate(self.workers)
            }
        )
        self._aggregator = KVOutputAggregator.from_connector(self.connector, options.num_ranks)
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.prompts: dict[str, list[int]] = {}
        self.metrics = ShuttleStats()
        self.between: Callable[[], None] = lambda: None
        self.num_steps = 0

    # -- what a client does -----------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int] | None,
        params: Any = None,
        *,
        max_tokens: int = 1,
        stop: Sequence[str] = (),
        **fields: Any,
    ) -> Request:
        """A request arrives. ``params``: its kv_transfer_params."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            stop=list(stop),
            extra_args={"kv_transfer_params": params},
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=None if token_ids is None else list(token_ids),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **fields,
        )
        self.requests[request_id] = request
        self.answers[request_id] = Answer()
        self.prompts[request_id] = list(token_ids or ())
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client is gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # -- what the engine core does ----------------------------------------------------------------

    def step(self) -> bool:
        """One turn of the engine loop; False when it would have blocked for want of requests."""
        if not self.scheduler.has_requests():
            return False
        self.num_steps += 1
        scheduled = self.scheduler.schedule()
        output = self._execute(scheduled)
        self.between()
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in outputs.outputs:
                answer = self.answers[each.request_id]
                answer.tokens += each.new_token_ids
                if each.finish_reason is not None:
                    answer.finish_reason = str(each.finish_reason)
                    answer.kv_transfer_params = each.kv_transfer_params
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.metrics.aggregate(ShuttleConnector.build_kv_connector_stats(stats.kv_connector_stats))
        return True

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        metadata = [pickle.loads(pickle.dumps(scheduled.kv_connector_metadata)) for _ in self.workers]
        for worker, each in zip(self.workers, metadata, strict=True):
            worker.handle_preemptions(each)
        output = self._forward(scheduled)
        outputs = [
            ModelRunnerOutput(
                req_ids=output.req_ids,
                req_id_to_index=output.req_id_to_index,
                sampled_token_ids=output.sampled_token_ids,
            )
            for _ in self.workers
        ]
        for worker, each, worker_output in zip(self.workers, metadata, outputs, strict=True):
            worker_output.kv_connector_output = pickle.loads(pickle.dumps(_worker_hooks(worker, each, scheduled)))
        aggregated = self._aggregator.aggregate(outputs)
        assert aggregated is not None
        return aggregated

    def _forward(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        sampled: list[list[int]] = []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens  # counts this step's tokens already
            block_ids = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            token = self.model.forward(list(request.all_token_ids), block_ids, start=end - num_tokens, end=end)
            sampled.append([token] if end == request.num_tokens else [])
        ids = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={each: index for index, each in enumerate(ids)}, sampled_token_ids=sampled
        )

    # -- what a test wants to know ----------------------------------------------------------------

    @property
    def card(self) -> EngineCard:
        """Who it says it is, asked over the side channel."""
        reply = ask_side(self.half.address, Hello(protocol_version=1, sender="test"))
        assert isinstance(reply, HelloAck)
        return reply.card

    def status(self) -> StatusReport:
        """How it says it is, asked over the side channel."""
        reply = ask_side(self.half.address, Status())
        assert isinstance(reply, StatusReport)
        return reply

    @property
    def num_free_blocks(self) -> int:
        """In vLLM's pool, right now."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def count(self, *key: str) -> float:
        """A counter of the connector's metrics."""
        return self.metrics.data.get("|".join(key), 0)

    def num_preemptions(self, request_id: str) -> int:
        """How often vLLM took a request's blocks away."""
        return self.requests[request_id].num_preemptions

    def has_finished(self, *request_ids: str) -> bool:
        """All of these have been answered."""
        return all(self.answers[request_id].finish_reason for request_id in request_ids)

    def is_idle(self) -> bool:
        """Nothing would make the engine loop run."""
        return not self.scheduler.has_requests()

    def shutdown(self) -> None:
        """As vLLM ends an engine."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()


def run_until(condition: Callable[[], bool], engines: Iterable[Engine], what: str, *, limit_s: float = LIMIT_S) -> None:
    """Turn the engines' loops until ``condition``; fail when that takes too long."""
    deadline_at_s = time.monotonic() + limit_s
    engines = tuple(engines)
    while not condition():
        assert time.monotonic() < deadline_at_s, f"waited {limit_s} s for: {what}"
        for engine in engines:
            engine.step()
        time.sleep(0.0005)  # vLLM's loop sleeps 1 ms after a step without work; condition and deadline decide


def _worker_hooks(worker: ShuttleConnector, metadata: Any, scheduled: SchedulerOutput) -> KVConnectorOutput:
    """A worker's hooks around and after the forward pass, in vLLM's order."""
    output = KVConnectorOutput()
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    worker.wait_for_save()
    if vllm_compat.HAS_TRANSFER_RESULTS:
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
    else:
        output.finished_sending, output.finished_recving = worker.get_finished(scheduled.finished_req_ids)
    output.invalid_block_ids = worker.get_block_ids_with_load_errors()
    output.kv_connector_stats = worker.get_kv_connector_stats()
    output.kv_cache_events = worker.get_kv_connector_kv_cache_events()
    output.kv_connector_worker_meta = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    return output
