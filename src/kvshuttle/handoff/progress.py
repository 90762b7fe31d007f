"""What a prefill engine has computed of a prompt, step by step, as its workers need to know it.

A *source* is one prefill request. Its scheduler half publishes with each step the blocks that will be complete when
the step's forward pass is over; a worker acts on it after that. When vLLM takes a request's blocks away or computes
them again, the source *restarts*: a new epoch begins, and nothing published before counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.blocks import num_blocks_for
from kvshuttle.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Progress:
    """Absolute block indices from ``first_index`` on are complete in ``block_ids``. ``is_final``: the prompt is."""

    source_id: str
    epoch: int
    first_index: int
    block_ids: tuple[int, ...]
    is_final: bool


@dataclass(frozen=True, slots=True)
class Restarted:
    """Blocks of epochs before ``epoch`` may be overwritten from now on. True before the step's forward pass."""

    source_id: str
    epoch: int


class Publisher:
    """Turns one prefill request's steps into progress, each block once an epoch."""

    def __init__(self, source_id: str, *, num_prompt_tokens: int, block_size_tokens: int) -> None:
        self.source_id = source_id
        self.epoch = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._block_size_tokens = block_size_tokens
        self._num_published = 0
        self._is_final = False

    def __repr__(self) -> str:
        return f"<Publisher {self.source_id} epoch={self.epoch} published={self._num_published}>"

    def on_preempted(self) -> Restarted | None:
        """The request's blocks are gone. None when nothing was published of them."""
        if not self._num_published:
            return None
        self.epoch += 1
        self._num_published, self._is_final = 0, False
        return Restarted(self.source_id, self.epoch)

    def on_step(
        self, *, num_before_tokens: int, num_after_tokens: int, block_ids: Sequence[int]
    ) -> tuple[Restarted | Progress, ...]:
        """A step takes the request from so many computed tokens to so many; ``block_ids``: its whole block table.

        Raises ``LocalProtocolError`` when the table is too short.
        """
        restarted = None
        if num_before_tokens < min(self._num_published * self._block_size_tokens, self._num_prompt_tokens):
            restarted = self.on_preempted()
        num_done_tokens = min(num_after_tokens, self._num_prompt_tokens)
        is_final = num_done_tokens == self._num_prompt_tokens
        end = num_done_tokens // self._block_size_tokens
        if is_final:
            end = num_blocks_for(num_done_tokens, self._block_size_tokens)
        if len(block_ids) < end:
            raise LocalProtocolError(f"{self!r}: {len(block_ids)} blocks for {num_done_tokens} tokens")
        facts: list[Restarted | Progress] = [restarted] if restarted else []
        if end > self._num_published or (is_final and not self._is_final):
            first = self._num_published
            facts.append(Progress(self.source_id, self.epoch, first, tuple(block_ids[first:end]), is_final))
            self._num_published, self._is_final = end, is_final
        return tuple(facts)
