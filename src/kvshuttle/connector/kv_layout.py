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

from kvshuttle.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from kvshuttle.handoff.cards import Region

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
    first = next(iter(kv_caches.values()))
    for name in sorted(kv_caches, key=_natural):
        tensor = kv_caches[name]
        if tensor.device != first.device:
            raise ConfigError(f"kv_caches[{name!r}]: on {tensor.device}, others on {first.device}; not supported")
        if tensor.data_ptr() in seen:  # layers that share one cache
            continue
        seen.add(tensor.data_ptr())
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        parts = (tensor[0], tensor[1]) if _is_split(tensor, num_blocks) else (tensor,)
        regions.extend(_region(name, part, num_blocks) for part in parts)
        # Without the block count: two engines may have pools of different sizes.
        layouts.append(f"{len(parts)}x{tuple(parts[0].shape[1:])}{_order(parts[0])}")
    return KvMemory(
        regions=tuple(regions),
        storage_spans=np.array(sorted(storages.items()), dtype=np.int64),
        device="DRAM" if first.device.type == "cpu" else "VRAM",
        device_id=0 if first.device.index is None else first.device.index,
        layout=";".join(sorted(set(layouts))),
    )


def plan_spans(
    plan: BlockPlan, source: Sequence[Region], destination: Sequence[Region]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte spans of a block plan: (source spans, destination spans), both int64 (n, 2) and row by row equal in length.

    A run of neighbouring blocks is one span where blocks are adjacent in memory on both sides, else a span a block.
    Raises ``RemoteProtocolError`` when the source's regions do not match ours, ``LocalProtocolError`` when a
    destination block does not exist.
    """
    _check_regions(plan, source, destination)
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


def _check_regions(plan: BlockPlan, source: Sequence[Region], destination: Sequence[Region]) -> None:
    source_lens = [region.block_len_bytes for region in source]
    if source_lens != [region.block_len_bytes for region in destination]:
        raise RemoteProtocolError(f"the source has {len(source)} regions, not our {len(destination)} of equal lengths")
    if max(run.source_first + run.num_blocks for run in plan.runs) > min(region.num_blocks for region in source):
        raise RemoteProtocolError("the source lends a block beyond the end of its memory")
    if max(run.destination_first + run.num_blocks for run in plan.runs) > min(r.num_blocks for r in destination):
        raise LocalProtocolError("a destination block lies beyond the end of this rank's memory")


def _is_dense(region: Region) -> bool:
    return region.block_len_bytes == region.block_stride_bytes


def _is_split(tensor: Tensor, num_blocks: int) -> bool:
    """``[2, B, ...]``: K and V apart, as some backends had it before 0.29."""
    return bool(tensor.dim() == 5 and tensor.shape[0] == 2 and tensor.shape[1] >= num_blocks > 2)


def _region(name: str, tensor: Tensor, num_blocks: int) -> Region:
    num_pages = tensor.shape[0]
    if num_pages < num_blocks or num_pages % num_blocks:
        raise ConfigError(
            f"kv_caches[{name!r}]: {num_pages} pages do not divide into {num_blocks} blocks; layout not supported"
        )
    pages_per_block = num_pages // num_blocks  # the attention kernel may use smaller pages than the scheduler
    page_len_bytes = tensor[0].numel() * tensor.element_size()
    page_stride_bytes = tensor.stride(0) * tensor.element_size()
    if not _is_compact(tensor[0]) or (pages_per_block > 1 and page_stride_bytes != page_len_bytes):
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


def _is_compact(page: Tensor) -> bool:
    """Its elements are one run of memory, in whatever order."""
    num_elements = 1
    for stride, size in sorted(zip(page.stride(), page.shape, strict=True)):
        if size != 1 and stride != num_elements:
            return False
        num_elements *= size
    return True


def _order(tensor: Tensor) -> str:
    """Dimensions from the outermost in memory to the innermost, e.g. ``@0,1,2,3``."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    return "@" + ",".join(str(dim) for dim in order)


def _natural(name: str) -> list[tuple[int, str]]:
    """``layers.2`` before ``layers.10``: the same order on every engine."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
