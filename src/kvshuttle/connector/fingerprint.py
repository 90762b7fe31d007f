"""What an engine is, for its peers: the fingerprint, and what this release refuses at start."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvshuttle.blocks import CHAIN_SCHEME
from kvshuttle.connector import vllm_compat
from kvshuttle.errors import ConfigError
from kvshuttle.handoff.cards import Fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvshuttle.connector.step_metadata import WorkerHandshake

_VOLATILE_KEYS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash"}
"""Keys of a model's config that say nothing about its KV, or that the fingerprint carries separately."""


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse at start what the hand-off does not handle. Raises ``ConfigError`` saying what and why."""
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        # A pass that is still under way may write to blocks that were freed meanwhile. vLLM keeps those out of loads
        # on consumers only (``defer_block_free``), and each of our engines may load: prefill engines load history.
        raise ConfigError(f"kv_role: kvshuttle needs kv_both on every engine, this one has {role}")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("pipeline_parallel_size: kvshuttle supports 1 only; use tensor parallelism")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}: kvshuttle supports 1 only, blocks would be spread over ranks")
    if getattr(parallel, "data_parallel_size", 1) > 1 and not getattr(parallel, "data_parallel_external_lb", False):
        raise ConfigError(
            "data_parallel_size: one API server would spread the legs of a request over its ranks; start an API server"
            " for each rank (--data-parallel-rank) and name them all to the router"
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError("speculative_config: kvshuttle does not hand off draft-model KV yet; start without it")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"kv_cache_groups: kvshuttle supports models whose layers all use full attention, this one has"
            f" {len(groups)} kinds of KV cache"
        )
    kind = type(groups[0].kv_cache_spec).__name__
    if "FullAttention" not in kind and "MLAAttention" not in kind:
        raise ConfigError(f"kv_cache_spec: kvshuttle supports full attention, this model uses {kind}")
    if getattr(groups[0].kv_cache_spec, "sliding_window", None):
        raise ConfigError("sliding_window: kvshuttle supports full attention only; early blocks would be missing")


def attention_spec(kv_cache_config: KVCacheConfig) -> Any:
    """The one KV cache spec of a supported model: block size, heads, head size, dtype."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec


def fingerprint(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    handshakes: Sequence[WorkerHandshake],
    *,
    model_identity: str,
) -> Fingerprint:
    """Everything that must agree between two engines. Raises ``ConfigError`` when an engine's own ranks differ."""
    layouts = {handshake.kv_layout for handshake in handshakes}
    lengths = {tuple(region.block_len_bytes for region in handshake.card.regions) for handshake in handshakes}
    if len(layouts) != 1 or len(lengths) != 1:
        raise ConfigError(f"kv_caches: ranks of one engine differ in layout ({sorted(layouts)}); not supported")
    spec = attention_spec(kv_cache_config)
    region_lens = lengths.pop()
    return Fingerprint(
        model=_model(vllm_config, model_identity),
        kv_dtype=vllm_compat.kv_dtype(spec, str(vllm_config.cache_config.cache_dtype)),
        block_size_tokens=spec.block_size,
        num_layers=len(kv_cache_config.kv_cache_groups[0].layer_names),
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        kv_layout=layouts.pop(),
        region_len_bytes=region_lens,
        chain_scheme=CHAIN_SCHEME,
    )


def _model(vllm_config: VllmConfig, model_identity: str) -> str:
    """``name/digest``: the last part of the model's path unless the operator names it, and its configuration.

    Paths differ between hosts, so they do not count; two fine-tunes of one architecture differ by name.
    """
    model_config = vllm_config.model_config
    name = model_identity or PurePath(str(model_config.model)).name
    described = {k: v for k, v in model_config.hf_config.to_dict().items() if k not in _VOLATILE_KEYS}
    text = json.dumps(described, sort_keys=True, default=str)
    return f"{name}/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
