"""Who an engine is and where its memory lies: what peers learn of each other before KV moves between them."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Feature(StrEnum):
    """What an engine can do that others of its protocol version may not: it says so, and is not asked for it else."""

    TURNS = "turns"
    """Its legs may say ``keep`` and ``history``, and it knows the leg ``local``."""


FEATURES: tuple[str, ...] = tuple(Feature)
"""Those of this release."""


class Region(msgspec.Struct, frozen=True):
    """One registered span of KV memory: a layer (or K or V of it).

    Block ``b`` occupies ``[base_address + b * block_stride_bytes, + block_len_bytes)``.
    """

    base_address: int
    block_len_bytes: int
    block_stride_bytes: int
    num_blocks: int


class WorkerCard(msgspec.Struct, frozen=True):
    """How to reach one worker (one tensor-parallel rank) of an engine."""

    rank: int
    address: str
    """``host:port`` of the worker's own side channel."""
    agent_metadata: bytes
    """Opaque transport metadata (NIXL agent metadata)."""
    device: str
    """"DRAM" or "VRAM"."""
    device_id: int
    regions: tuple[Region, ...]


class Fingerprint(msgspec.Struct, frozen=True):
    """What must agree before one engine may use another's KV bytes."""

    model: str
    """A digest of the model's architecture-relevant configuration plus its served name."""
    kv_dtype: str
    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    tensor_parallel_size: int
    kv_layout: str
    """Order of a page's content; includes the attention backend, and on CPU the instruction set."""
    region_len_bytes: tuple[int, ...]
    chain_scheme: str

    def differences(self, other: Fingerprint) -> list[str]:
        """Each differing field as ``name: ours != theirs``; empty when the two are compatible."""
        return [
            f"{name}: {getattr(self, name)!r} != {getattr(other, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


class EngineCard(msgspec.Struct, frozen=True):
    """Who an engine is; the body of ``HelloAck``.

    ``features``: see ``Feature``; names that are not known here mean nothing here, and older engines say none.
    """

    engine_id: str
    incarnation: str
    kv_role: str
    protocol_version: int
    vllm_version: str
    fingerprint: Fingerprint
    workers: tuple[WorkerCard, ...]
    features: tuple[str, ...] = ()
