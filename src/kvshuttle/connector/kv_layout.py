"""KV cache tensors as memory regions: where block ``b`` of each layer lies.

vLLM hands every layer's cache as a tensor whose first dimension counts blocks (``[B, H, N, C]``), or, before
0.29 on some backends, as ``[2, B, ...]`` with K and V apart. Either way one block of one region is one
contiguous run of bytes in every layout that we accept; what is not is refused at start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvshuttle.errors import ConfigError
from kvshuttle.handoff.messages import Region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvshuttle.handoff.block_plan import BlockPlan


@dataclass(frozen=True, slots=True)
class KvMemory:
    """An engine rank's KV memory: regions in layer order, and the spans to register with a transport.

    ``storage_spans``: int64 (n, 2), address and length in bytes of each backing storage, once.
    ``layout``: text that must be equal on both sides for bytes to mean the same.
    """

    regions: tuple[Region, ...]
    storage_spans: NDArray[np.int64]
    device: str
    device_id: int
    layout: str


def kv_memory(kv_caches: Mapping[str, Tensor], *, num_blocks: int) -> KvMemory:
    """Describe the registered caches. Raises ``ConfigError`` for a layout whose blocks are not contiguous."""
    regions: list[Region] = []
    storages: dict[int, int] = {}
    seen: set[int] = set()
    layouts: list[str] = []
    if not kv_caches:
        raise ConfigError("kv_caches: vLLM registered no KV cache; kvshuttle needs a model with attention layers")
    for name in sorted(kv_caches, key=_natural):
        tensor = kv_caches[name]
        if tensor.data_ptr() in seen:  # layers that share one cache
            continue
        seen.add(tensor.data_ptr())
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        layers = (tensor,) if tensor.shape[0] != 2 or tensor.shape[1] < num_blocks else (tensor[0], tensor[1])
        regions.extend(_region(name, layer, num_blocks) for layer in layers)
        layouts.append(f"{len(layers)}x{tuple(tensor.shape[1:])}{_order(tensor)}")
    first = next(iter(kv_caches.values()))
    return KvMemory(
        regions=tuple(regions),
        storage_spans=np.array(sorted(storages.items()), dtype=np.int64),
        device="DRAM" if first.device.type == "cpu" else "VRAM",
        device_id=0 if first.device.index is None else first.device.index,
        layout=";".join(sorted({_without_block_count(layout, num_blocks) for layout in layouts})),
    )


def plan_spans(
    plan: BlockPlan, source: Sequence[Region], destination: Sequence[Region]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte spans of a block plan: (source spans, destination spans), both int64 (n, 2) and row by row equal in length.

    A run of neighbouring blocks is one span where blocks are adjacent in memory on both sides, else a span a block.
    """
    firsts = np.array([(run.source_first, run.destination_first, run.num_blocks) for run in plan.runs], dtype=np.int64)
    sources: list[NDArray[np.int64]] = []
    destinations: list[NDArray[np.int64]] = []
    for ours, theirs in zip(source, destination, strict=True):
        runs = firsts
        if not (_is_dense(ours) and _is_dense(theirs)):
            runs = np.array(
                [(s + i, d + i, 1) for s, d, n in firsts.tolist() for i in range(n)],
                dtype=np.int64,
            )
        length = runs[:, 2] * ours.block_len_bytes
        sources.append(np.stack((ours.base_address + runs[:, 0] * ours.block_stride_bytes, length), axis=1))
        destinations.append(np.stack((theirs.base_address + runs[:, 1] * theirs.block_stride_bytes, length), axis=1))
    return np.concatenate(sources), np.concatenate(destinations)


def _is_dense(region: Region) -> bool:
    return region.block_len_bytes == region.block_stride_bytes


def _region(name: str, tensor: Tensor, num_blocks: int) -> Region:
    num_pages = tensor.shape[0]
    if num_pages % num_blocks:
        raise ConfigError(
            f"kv_caches[{name!r}]: {num_pages} pages do not divide into {num_blocks} blocks; layout not supported"
        )
    pages_per_block = num_pages // num_blocks  # the attention kernel may use smaller pages than the scheduler
    page_len_bytes = tensor[0].numel() * tensor.element_size()
    page_stride_bytes = tensor.stride(0) * tensor.element_size()
    steps = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    page_extent = 1 + sum((size - 1) * stride for size, stride in steps)
    is_compact = page_extent * tensor.element_size() == page_len_bytes
    if not is_compact or (pages_per_block > 1 and page_stride_bytes != page_len_bytes):
        raise ConfigError(
            f"kv_caches[{name!r}]: a block is not one run of bytes (shape {tuple(tensor.shape)},"
            f" stride {tensor.stride()}); set VLLM_KV_CACHE_LAYOUT=HND"
        )
    return Region(
        base_address=tensor.data_ptr(),
        block_len_bytes=page_len_bytes * pages_per_block,
        block_stride_bytes=page_stride_bytes * pages_per_block,
        num_blocks=num_blocks,
    )


def _order(tensor: Tensor) -> str:
    """Dimensions from the outermost in memory to the innermost, e.g. ``@0,1,2,3``."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    return "@" + ",".join(str(dim) for dim in order)


def _without_block_count(layout: str, num_blocks: int) -> str:
    # Two engines may have pools of different sizes; where the count stands inside the shape, blank it.
    return re.sub(rf"\b{num_blocks}\b", "B", layout)


def _natural(name: str) -> list[tuple[int, str]]:
    """``layers.2`` before ``layers.10``: the same order on every engine."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
