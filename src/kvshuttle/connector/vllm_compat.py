"""Every difference between the supported vLLM releases, and nowhere else.

Supported: 0.27.1 to 0.32. Names that a release lacks are replaced here by equivalents, so that the rest of
the connector is written against one API: the newest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvshuttle.blocks import ContentIdentity


try:  # 0.30 and later
    TransferResults = _base.KVConnectorTransferResults
    HAS_TRANSFER_RESULTS = True
except AttributeError:
    HAS_TRANSFER_RESULTS = False

    @dataclass
    class TransferResults:  # type: ignore[no-redef]
        """What 0.30's ``KVConnectorTransferResults`` holds."""

        finished_sending: set[str] = field(default_factory=set)
        finished_recving: set[str] = field(default_factory=set)
        failed_recving: set[str] = field(default_factory=set)


try:  # 0.32 and later
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE: Any = CacheHitSource.P2P
except ImportError:
    HIT_SOURCE = None


def vllm_version() -> str:
    """The release as text. The CPU wheel's distribution has another name, so ask the module first."""
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


def adopt_logging() -> None:
    """Let our log lines go where vLLM's go: it configures its own logger only."""
    ours, theirs = logging.getLogger("kvshuttle"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level or logging.INFO)
        ours.propagate = not theirs.handlers


def content_identity(request: Request) -> ContentIdentity:
    """What besides token ids decides the KV of ``request``: LoRA, salt, multimodal items."""
    from kvshuttle.blocks import ContentIdentity, MultimodalSpan

    lora = getattr(request, "lora_request", None)
    spans = tuple(
        MultimodalSpan(
            offset_tokens=int(feature.mm_position.offset),
            num_tokens=int(feature.mm_position.length),
            identity=str(feature.identifier),
        )
        for feature in (getattr(request, "mm_features", None) or ())
    )
    return ContentIdentity(
        lora=str(lora.lora_name) if lora is not None else "",
        salt=str(getattr(request, "cache_salt", None) or ""),
        multimodal=spans,
    )


def wants_all_computed(request: Request) -> bool:
    """True when a request may not use KV that it did not compute, e.g. for ``prompt_logprobs``.

    From 0.32 on vLLM declines the offer itself, before that it would take it.
    """
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def restart_after_failed_load(request: Request) -> None:
    """Have vLLM free all blocks of a request whose load failed before it computes the prompt.

    From 0.30 on it does so itself. Before that it keeps them and recomputes into the very blocks that a read which
    has not ended may still write to.
    """
    if not HAS_TRANSFER_RESULTS:
        request.num_computed_tokens = 0


def is_answered(request: Request) -> bool:
    """True when a request ended because it was done, not because it was aborted or failed."""
    from vllm.v1.request import RequestStatus

    names = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
    return request.status in {getattr(RequestStatus, name) for name in names if hasattr(RequestStatus, name)}


def is_aborted(request: Request) -> bool:
    """True when a request was ended from outside: its client has left, or a stop string was found in its answer."""
    from vllm.v1.request import RequestStatus

    return bool(request.status == RequestStatus.FINISHED_ABORTED)


def has_stop_strings(request: Request) -> bool:
    """True when an abort of this request may mean that its answer is complete: stop strings are found outside."""
    return bool(getattr(request.sampling_params, "stop", None))


def num_settled_tokens(request: Request) -> int:
    """Tokens of a request that is over whose KV is certainly in its blocks; 0 when it never got to answer.

    The token sampled last has none. Steps that are still under way do not count; releases before 0.32 do not tell of
    them but for those that vLLM scheduled ahead. A request that waits for a load has no output yet, and counts tokens
    that have not arrived.
    """
    if not request.num_output_tokens:
        return 0
    num_under_way = getattr(request, "num_in_flight_tokens", None)
    if num_under_way is None:
        num_under_way = getattr(request, "num_output_placeholders", 0)
    return int(max(0, min(request.num_computed_tokens - num_under_way, request.num_tokens - 1)))


def cached_blocks(pool: BlockPool, request: Request, num_blocks: int) -> list[KVCacheBlock]:
    """The first blocks of a request's prefix that the prefix cache has, at most ``num_blocks``."""
    blocks = []
    for block_hash in request.block_hashes[:num_blocks]:
        found = pool.get_cached_block(block_hash, [0])
        if not found:
            break
        blocks.append(found[0])
    return blocks


def num_watermark_blocks(kv_cache_manager: KVCacheManager) -> int:
    """Free blocks that vLLM leaves when it admits a request; 0 in releases that have no watermark."""
    return int(getattr(kv_cache_manager, "watermark_blocks", 0))


def pin(pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Keep blocks out of the free list; each call adds one reference per block."""
    pool.touch([pool.blocks[block_id] for block_id in block_ids])


def unpin(pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Give one reference per block back; the tail of a sequence is evicted before its head."""
    pool.free_blocks([pool.blocks[block_id] for block_id in reversed(tuple(block_ids))])


class BlockTables:
    """Block tables of some requests, kept from what the scheduler tells its workers: all releases tell that."""

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}

    def update(self, scheduled: SchedulerOutput, wanted: Container[str]) -> None:
        """Take a step in. ``wanted``: the requests to keep tables of, from their first step on."""
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in wanted:
                self._tables[new.req_id] = list(new.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id not in wanted:
                continue
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            self._tables.setdefault(request_id, []).extend(block_ids[0] if block_ids else ())

    def of(self, request_id: str) -> list[int]:
        """A request's blocks from its first token on, as of this step."""
        return self._tables.get(request_id, [])

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._tables.pop(request_id, None)


def page_content(vllm_config: VllmConfig, spec: Any, *, is_cpu: bool) -> str:
    """What decides the meaning of a page's bytes besides its shape, as text that two engines compare.

    That is the attention backend, vLLM's minor release (backends change their packing without telling), and on the
    CPU the instruction set that K is packed for.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    parts = sorted(str(backend.get_name()) for backend in get_current_attn_backends(vllm_config))
    if is_cpu:
        parts.append(_attention_isa(spec, vllm_config.cache_config.cache_dtype))
    parts.append("vllm-" + ".".join(vllm_version().split(".")[:2]))
    return ",".join(part for part in parts if part)


def _attention_isa(spec: Any, cache_dtype: str) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return ""
    return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache_dtype))


def kv_dtype(spec: Any, cache_dtype: str) -> str:
    """Type of a cached element. Kinds of fp8 share one storage type, so the configured name counts for them."""
    stored = f"{spec.dtype}".removeprefix("torch.")
    return f"{stored}/{cache_dtype}" if cache_dtype.startswith("fp8") else stored
