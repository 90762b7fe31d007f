"""A block pool whose blocks have content on every rank, for ``PushPair``."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RankedPool:
    """Blocks 1 … ``num_blocks`` with reference counts and, for each rank, content. The last freed is reused first.

    ``on_free`` is called with each block whose last reference goes, just before it is scribbled over on all ranks.
    """

    def __init__(self, num_blocks: int, num_ranks: int, on_free: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.contents = [[b"null"] + [b"scrap"] * num_blocks for _ in range(num_ranks)]
        self._references = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))
        self._scraps = count()
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        return self._references[block_id] == 0

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        if num_blocks > len(self._free):
            return None
        block_ids = tuple(self._free.pop() for _ in range(num_blocks))
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def touch(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is free and cannot be kept"
            self._references[block_id] += 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} was given back twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._on_free(block_id)
                self.scribble(block_id)
                self._free.append(block_id)

    def scribble(self, block_id: int) -> None:
        scrap = b"reused-%d" % next(self._scraps)
        for contents in self.contents:
            contents[block_id] = scrap


def right_content(link: bytes, rank: int) -> bytes:
    """What a rank's share of a block holds, when it holds everything up to ``link``."""
    return link + b"@%d" % rank
