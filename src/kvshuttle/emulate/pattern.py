"""What an emulated forward pass leaves in the KV cache: a stamp for each token, head and layer, and its verification.

A stamp is a 64-bit word made of all tokens up to its position, the layer and the head. So a block that was never
written, written half, written late, or belongs to another request or another place of the same one, does not match.
Pages are numpy arrays of int64 words, ``[block, head, token, word]``; the stamp is word 0 of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Words = NDArray[np.uint64]
    Pages = NDArray[np.int64]
    BlockIds = Sequence[int] | NDArray[np.int32]

UNWRITTEN = 0x5A5A5A5A5A5A5A5A
"""What pages hold before anything is written."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SALT = np.uint64(0xD1B54A32D192ED03)
_ANSWER = np.uint64(0x8CB92BA72F3D8DD7)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place where the cache does not hold what it must: layer, block of the request, and position."""

    layer: int
    block_index: int
    block_id: int
    position: int
    num_wrong: int


def mix(values: Words) -> Words:
    """Scatter 64-bit words (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def prefix_sums(token_ids: NDArray[np.int32], *, start: int = 0, before: int = 0) -> Words:
    """For each of ``token_ids``, at positions from ``start`` on, a word that depends on all tokens up to it.

    ``before``: the word of the position before ``start``, 0 for none.
    """
    with np.errstate(over="ignore"):
        positions = np.arange(start + 1, start + 1 + len(token_ids), dtype=np.uint64)
        terms = mix(token_ids.astype(np.uint64) + positions * _GOLDEN)
        return np.cumsum(terms, dtype=np.uint64) + np.uint64(before)


def next_token(prefix_sum: int, *, first: int, num_tokens: int) -> int:
    """The answer after a prefix: one of ``num_tokens`` ids from ``first`` on."""
    word = mix(np.array([prefix_sum], dtype=np.uint64) ^ _ANSWER)
    return first + int(word[0] % np.uint64(num_tokens))


def prompt_key(prefix_sum: int) -> str:
    """Names a prompt by its last prefix sum: the same on every engine, whatever they call the request."""
    return f"{prefix_sum:016x}"


class Stamps:
    """Writes and checks the stamps of one engine's pages, one array for each layer."""

    def __init__(self, layers: Sequence[Pages]) -> None:
        assert layers, "a model has layers"
        self._layers = list(layers)
        _, num_heads, self._block_size, _ = layers[0].shape
        salts = mix(np.arange(1, 1 + len(layers) * num_heads, dtype=np.uint64) * _SALT)
        self._salts = salts.reshape(len(layers), num_heads)

    def clear(self) -> None:
        """Mark everything as never written. Also makes the memory resident, as an accelerator's is."""
        for pages in self._layers:
            pages.fill(UNWRITTEN)

    def write(self, sums: Words, block_ids: BlockIds, *, start: int) -> None:
        """Stamp positions from ``start`` on, whose prefix sums are ``sums``. ``block_ids``: the request's blocks."""
        words = mix(sums)
        size = self._block_size
        end = start + len(sums)
        for index in range(start // size, -(-end // size)):
            first, last = max(start, index * size), min(end, (index + 1) * size)
            rows = words[first - start : last - start]
            place = slice(first - index * size, last - index * size)
            for pages, salts in zip(self._layers, self._salts, strict=True):
                pages[block_ids[index], :, place, 0] = (rows[None, :] ^ salts[:, None]).view(np.int64)

    def check(self, sums: Words, block_ids: BlockIds) -> Mismatch | None:
        """Compare every position from 0 on, whose prefix sums are ``sums``. None when all of it is right."""
        words = mix(sums)
        num_full = len(words) // self._block_size
        for layer in range(len(self._layers)):
            wrong = self._check_full(layer, words, block_ids[:num_full])
            wrong = wrong or self._check_tail(layer, words, block_ids, num_full)
            if wrong is not None:
                return wrong
        return None

    def _check_full(self, layer: int, words: Words, block_ids: BlockIds) -> Mismatch | None:
        """Whole blocks, all at once: this is most of the work."""
        if not len(block_ids):
            return None
        expected = words[: len(block_ids) * self._block_size].reshape(len(block_ids), 1, self._block_size)
        found = self._layers[layer][np.asarray(block_ids), :, :, 0].view(np.uint64)
        wrong = found != (expected ^ self._salts[layer][None, :, None])
        if not wrong.any():
            return None
        index, _, offset = (int(each[0]) for each in np.nonzero(wrong))
        position = index * self._block_size + offset
        return Mismatch(layer, index, int(block_ids[index]), position, int(wrong.sum()))

    def _check_tail(self, layer: int, words: Words, block_ids: BlockIds, index: int) -> Mismatch | None:
        """The last block, where it is not full."""
        tail = words[index * self._block_size :]
        if not len(tail):
            return None
        found = self._layers[layer][block_ids[index], :, : len(tail), 0].view(np.uint64)
        wrong = found != (tail[None, :] ^ self._salts[layer][:, None])
        if not wrong.any():
            return None
        offset = int(np.nonzero(wrong.any(axis=0))[0][0])
        position = index * self._block_size + offset
        return Mismatch(layer, index, int(block_ids[index]), position, int(wrong.sum()))
