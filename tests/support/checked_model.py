"""A model whose KV is a hash of the tokens before it: each forward pass can tell whether it reads the right KV."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_HEADS = 2
HEAD_SIZE = 4
_FIRST = 0x5EED


class WrongKv(AssertionError):
    """A forward pass would have attended to KV that is not of its own tokens."""


class CheckedModel:
    """KV of ``num_ranks`` tensor-parallel ranks and ``num_layers`` layers: int32 pages [block, head, token, content].

    The entry of a position is a hash of all tokens up to it, and differs by layer and rank. ``forward`` first checks
    everything that it would attend to, then writes what it computes, and returns the next token.
    """

    def __init__(self, *, num_blocks: int, block_size: int, num_layers: int, num_ranks: int) -> None:
        self._block_size = block_size
        shape = (num_blocks, NUM_HEADS, block_size, 2 * HEAD_SIZE)
        self.caches: list[dict[str, torch.Tensor]] = [
            {
                f"model.layers.{layer}.self_attn.attn": torch.zeros(shape, dtype=torch.int32)
                for layer in range(num_layers)
            }
            for _ in range(num_ranks)
        ]
        self.num_computed_tokens = 0

    def forward(self, token_ids: Sequence[int], block_ids: Sequence[int], *, start: int, end: int) -> int:
        """Compute positions [start, end) of a sequence whose block table is ``block_ids``."""
        hashes = prefix_hashes(token_ids[:end])
        self.check(hashes[:start], block_ids)
        self._put(hashes, block_ids, start)
        self.num_computed_tokens += end - start
        return next_token(token_ids[:end])

    def check(self, hashes: Sequence[int], block_ids: Sequence[int]) -> None:
        """Raise ``WrongKv`` unless the KV of the first ``len(hashes)`` positions is right on every rank and layer."""
        blocks, offsets, content = self._rows(hashes, block_ids, 0)
        for rank, layer, cache in self._pages():
            is_right = (
                (cache[blocks, :, offsets, :] == _salted(content, rank, layer)[:, None, None]).all(dim=2).all(dim=1)
            )
            if not bool(is_right.all()):
                position = int((~is_right).nonzero()[0])
                raise WrongKv(f"rank {rank} layer {layer}: wrong KV at position {position} of {len(hashes)}")

    def _put(self, hashes: Sequence[int], block_ids: Sequence[int], start: int) -> None:
        blocks, offsets, content = self._rows(hashes, block_ids, start)
        for rank, layer, cache in self._pages():
            cache[blocks, :, offsets, :] = _salted(content, rank, layer)[:, None, None].expand(
                -1, NUM_HEADS, 2 * HEAD_SIZE
            )

    def _pages(self) -> list[tuple[int, int, torch.Tensor]]:
        return [
            (rank, layer, cache)
            for rank, caches in enumerate(self.caches)
            for layer, cache in enumerate(caches.values())
        ]

    def _rows(
        self, hashes: Sequence[int], block_ids: Sequence[int], start: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, len(hashes))
        blocks = torch.tensor(list(block_ids))[positions // self._block_size]
        return blocks, positions % self._block_size, torch.tensor(list(hashes[start:]), dtype=torch.int32)


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """For each position a hash of all tokens up to it, as int32."""
    hashes: list[int] = []
    value = _FIRST
    for token_id in token_ids:
        value = zlib.crc32(int(token_id).to_bytes(4, "little"), value)
        hashes.append(value - (1 << 31))
    return hashes


def next_token(token_ids: Sequence[int]) -> int:
    """What the model answers after ``token_ids``."""
    return 10 + prefix_hashes(token_ids)[-1] % 30_000


def answer(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The reference: the first ``num_tokens`` tokens of the model's answer."""
    sequence = list(token_ids)
    for _ in range(num_tokens):
        sequence.append(next_token(sequence))
    return sequence[len(token_ids) :]


def _salted(content: torch.Tensor, rank: int, layer: int) -> torch.Tensor:
    return content ^ (1 + layer + 1000 * rank)
