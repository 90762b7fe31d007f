"""Which remote block goes into which local block, and how much of a prompt is worth reading.

Blocks are paired strictly by *absolute index*: index ``i`` is tokens ``[i * block_size, (i + 1) * block_size)`` of
the sequence on both sides. Lists are never trimmed from one end to make them fit, because the two ends may hold
different numbers of blocks (a local prefix hit, a speculative block, a first sampled token).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

NULL_BLOCK_ID = 0
"""vLLM's padding block: nothing is ever read from it or written into it."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks that are neighbours on both sides: one descriptor per region can move them."""

    source_first: int
    destination_first: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What one read moves: absolute indices ``[first_index, first_index + num_blocks)``, as runs in index order."""

    first_index: int
    num_blocks: int
    runs: tuple[BlockRun, ...]


class ReadReason(StrEnum):
    """Why so many tokens are offered to the engine."""

    READ = "read"
    """Reading pays."""
    FULL_LOCAL_HIT = "full_local_hit"
    """Everything but the last token, which is always computed, is here."""
    LOCAL_COVERS_VERIFIED = "local_covers_verified"
    """The peer has nothing that is not here."""
    BELOW_THRESHOLD = "below_threshold"
    """So few tokens that computing them is cheaper than reading them."""


@dataclass(frozen=True, slots=True)
class ReadDecision:
    """How many tokens to read behind the local prefix, and why."""

    num_tokens: int
    reason: ReadReason


def plan_blocks(
    *, source_block_ids: Sequence[int], destination_block_ids: Sequence[int], first_index: int, end_index: int
) -> BlockPlan:
    """Pair source and destination blocks of absolute indices ``[first_index, end_index)``, at least one.

    Both sequences start at absolute index 0; the destination is the request's whole block table.
    Raises ``LocalProtocolError`` when an index is out of range, or a destination is the null block or appears twice.
    """
    _check_span(first_index, end_index, num_source=len(source_block_ids), num_destination=len(destination_block_ids))
    destinations = destination_block_ids[first_index:end_index]
    if NULL_BLOCK_ID in destinations:
        raise LocalProtocolError(f"the null block is a destination in indices [{first_index}, {end_index})")
    if len(set(destinations)) != len(destinations):
        raise LocalProtocolError(f"a destination block appears twice in indices [{first_index}, {end_index})")
    runs: list[BlockRun] = []
    for source, destination in zip(source_block_ids[first_index:end_index], destinations, strict=True):
        if runs and _continues(runs[-1], source, destination):
            last = runs[-1]
            runs[-1] = BlockRun(last.source_first, last.destination_first, last.num_blocks + 1)
        else:
            runs.append(BlockRun(source, destination, 1))
    return BlockPlan(first_index=first_index, num_blocks=end_index - first_index, runs=tuple(runs))


def span_to_read(
    *,
    num_local_tokens: int,
    num_verified_tokens: int,
    num_prompt_tokens: int,
    block_size_tokens: int,
    recompute_threshold_tokens: int = 0,
) -> ReadDecision:
    """Decide how many tokens to read behind a block-aligned local prefix.

    ::

        needed = min(verified, prompt) - local
        prompt - 1 - local <= 0   ->  0, FULL_LOCAL_HIT          (the engine always computes the last token)
        needed <= 0               ->  0, LOCAL_COVERS_VERIFIED
        needed < threshold        ->  0, BELOW_THRESHOLD
        otherwise                 ->  needed, READ
    """
    assert num_local_tokens % block_size_tokens == 0, f"local prefix of {num_local_tokens} tokens is not block aligned"
    if num_prompt_tokens - 1 - num_local_tokens <= 0:
        return ReadDecision(0, ReadReason.FULL_LOCAL_HIT)
    needed = min(num_verified_tokens, num_prompt_tokens) - num_local_tokens
    if needed <= 0:
        return ReadDecision(0, ReadReason.LOCAL_COVERS_VERIFIED)
    if needed < recompute_threshold_tokens:
        return ReadDecision(0, ReadReason.BELOW_THRESHOLD)
    return ReadDecision(needed, ReadReason.READ)


def _continues(run: BlockRun, source: int, destination: int) -> bool:
    return source == run.source_first + run.num_blocks and destination == run.destination_first + run.num_blocks


def _check_span(first_index: int, end_index: int, *, num_source: int, num_destination: int) -> None:
    if not 0 <= first_index < end_index:
        raise LocalProtocolError(f"no blocks in indices [{first_index}, {end_index})")
    if end_index > num_source or end_index > num_destination:
        raise LocalProtocolError(
            f"indices [{first_index}, {end_index}) exceed {num_source} source or {num_destination} destination blocks"
        )
