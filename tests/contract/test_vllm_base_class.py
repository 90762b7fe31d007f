"""What the connector takes for granted of the installed vLLM. When this fails vLLM has changed: see ``vllm_compat``."""

from support import quiet_vllm  # noqa: F401 - before anything that imports vLLM

# isort: split
import dataclasses
import inspect

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvshuttle.connector import vllm_compat
from kvshuttle.connector.connector import ShuttleConnector
from kvshuttle.connector.stats import ShuttleStats
from kvshuttle.connector.step_metadata import StepMetadata, WorkerHandshake, WorkerReport

OURS = {"count_internal_error", "make_worker_half"}
"""Public methods that vLLM does not know."""
NEWER = {
    "bind_kv_cache_manager",
    "get_loaded_kv_cache_group_ids",
    "get_transfer_results",
    "has_pending_block_frees",
}
"""Methods that releases before 0.32 do not know and never call."""


def members(cls):
    return {name: member for name, member in vars(cls).items() if not name.startswith("_") and callable(_plain(member))}


def _plain(member):
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def known_to_vllm():
    return {**members(SupportsHMA), **members(KVConnectorBase_V1)}


def test_every_abstract_method_is_there():
    assert ShuttleConnector.__abstractmethods__ == frozenset()
    assert KVConnectorBase_V1.__abstractmethods__ <= set(dir(ShuttleConnector))


def test_every_public_method_is_one_that_vllm_calls():
    unknown = set(members(ShuttleConnector)) - set(known_to_vllm()) - OURS
    assert unknown <= NEWER


@pytest.mark.parametrize("name", sorted(set(members(ShuttleConnector)) & set(known_to_vllm())))
def test_an_override_takes_what_vllm_passes(name):
    theirs = inspect.signature(_plain(known_to_vllm()[name]))
    ours = inspect.signature(_plain(members(ShuttleConnector)[name]))
    named = [p for p in theirs.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    ours.bind(*[object()] * len(named))
    ours.bind(**{parameter.name: object() for parameter in named})
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in theirs.parameters.values()):
        ours.bind(**{parameter.name: object() for parameter in named}, another_keyword=1)


def test_the_factory_finds_the_class_by_its_module():
    config = KVTransferConfig(
        kv_connector="ShuttleConnector",
        kv_connector_module_path="kvshuttle.connector.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={},
    )
    assert KVConnectorFactory.get_connector_class(config) is ShuttleConnector
    assert config.is_kv_producer
    assert config.is_kv_consumer


def test_the_messages_between_the_halves_are_of_vllms_kinds():
    assert issubclass(StepMetadata, base.KVConnectorMetadata)
    assert issubclass(WorkerReport, base.KVConnectorWorkerMetadata)
    assert issubclass(WorkerHandshake, base.KVConnectorHandshakeMetadata)
    assert issubclass(ShuttleStats, KVConnectorStats)


def test_transfer_results_start_empty_and_share_nothing():
    fields = {field.name for field in dataclasses.fields(vllm_compat.TransferResults)}
    assert fields >= {"finished_sending", "finished_recving", "failed_recving"}
    assert vllm_compat.TransferResults().finished_recving is not vllm_compat.TransferResults().finished_recving
    assert hasattr(base, "KVConnectorTransferResults") == vllm_compat.HAS_TRANSFER_RESULTS


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (BlockPool, {"touch", "free_blocks", "get_num_free_blocks", "get_cached_block"}),
        (BlockPool(4, enable_caching=True, hash_block_size=16), {"blocks", "num_gpu_blocks"}),
        (KVCacheBlock(1), {"block_id", "ref_cnt"}),
        (RequestStatus, {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"}),
    ],
    ids=["pool class", "pool", "block", "status"],
)
def test_names_that_we_use_exist(owner, names):
    assert names <= set(dir(owner))


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (KVConnectorOutput, {"finished_sending", "finished_recving", "kv_connector_worker_meta", "invalid_block_ids"}),
        (SchedulerOutput, {"num_scheduled_tokens", "finished_req_ids", "kv_connector_metadata"}),
        (KVCacheConfig, {"num_blocks", "kv_cache_groups"}),
        (FullAttentionSpec, {"block_size", "num_kv_heads", "head_size", "dtype", "sliding_window"}),
    ],
)
def test_fields_that_we_read_exist(cls, names):
    assert names <= {field.name for field in dataclasses.fields(cls)}


def test_attributes_of_a_request_that_we_read_exist():
    from vllm.sampling_params import SamplingParams

    request = Request("r", [1, 2], SamplingParams(extra_args={"kv_transfer_params": {"a": 1}}), None)
    assert request.kv_transfer_params == {"a": 1}
    assert (request.prompt_token_ids, request.num_tokens, request.num_computed_tokens) == ([1, 2], 2, 0)
    assert (request.lora_request, request.cache_salt, request.mm_features, request.prompt_embeds) == (
        None,
        None,
        [],
        None,
    )
    assert not vllm_compat.is_answered(request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert vllm_compat.is_answered(request)
    request.status = RequestStatus.FINISHED_ABORTED
    assert not vllm_compat.is_answered(request)
    assert vllm_compat.is_aborted(request)
    assert not vllm_compat.has_stop_strings(request)
    assert vllm_compat.num_settled_tokens(request) == 0
    request.append_output_token_ids([3, 4])
    request.num_computed_tokens = 3
    assert vllm_compat.num_settled_tokens(request) == 3
    assert list(request.all_token_ids[:3]) == [1, 2, 3]


def test_pinning_adds_a_reference_and_unpinning_takes_it():
    pool = BlockPool(10, enable_caching=True, hash_block_size=16)
    blocks = pool.get_new_blocks(3)
    ids = [block.block_id for block in blocks]
    vllm_compat.pin(pool, ids)
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 9 - 3
    vllm_compat.unpin(pool, ids)
    assert pool.get_num_free_blocks() == 9


def test_blocks_of_a_cached_prefix_are_found_by_the_hashes_of_a_request(tmp_path):
    from kvshuttle.transport.memory import MemoryFabric, MemoryTransport
    from support.vllm_engine import Engine, EngineOptions

    fabric = MemoryFabric()
    engine = Engine(EngineOptions("e", lambda rank: MemoryTransport(fabric, "agent")), tmp_path)
    try:
        pool = engine.scheduler.kv_cache_manager.block_pool
        for name in ("first", "second"):
            request = engine.add(name, list(range(40)))
            while not engine.has_finished(name):
                found = vllm_compat.cached_blocks(pool, request, 2)
                assert len(found) == (0 if name == "first" and not request.num_computed_tokens else 2)
                assert len(vllm_compat.cached_blocks(pool, request, 1)) <= 1
                engine.step()
        assert vllm_compat.num_watermark_blocks(engine.scheduler.kv_cache_manager) == 0
    finally:
        engine.shutdown()


def test_the_instruction_set_of_the_cpu_backend_can_be_asked():
    torch = pytest.importorskip("torch")
    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert vllm_compat._attention_isa(spec, "auto")


def test_fp8_kinds_that_share_a_storage_type_are_told_apart():
    torch = pytest.importorskip("torch")
    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.uint8)
    names = {vllm_compat.kv_dtype(spec, name) for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "auto")}
    assert len(names) == 4


def test_the_source_of_hits_is_named_where_vllm_can_be_told():
    if vllm_compat.HIT_SOURCE is not None:
        assert ShuttleConnector._cache_hit_source is vllm_compat.HIT_SOURCE
