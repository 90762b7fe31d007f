"""What a proxy must remember for vLLM's bidirectional transfer: which blocks a decode engine keeps, by conversation."""

from __future__ import annotations

from typing import Any

RETAINED_METRIC = "kvshuttle:retained_blocks"
"""The series under which our own decode engines tell the same."""


class KeptHandles:
    """The ``kv_transfer_params`` of each conversation's last answer. Each is good for one read.

    There is no limit and no check: whoever uses it trusts the client's names, and that histories only grow.
    """

    def __init__(self) -> None:
        self._params: dict[str, dict[str, Any]] = {}

    def peek(self, conversation: str) -> dict[str, Any] | None:
        """What the last answer of ``conversation`` gave; None for a first turn."""
        return self._params.get(conversation)

    def drop(self, conversation: str) -> None:
        """The decode engine has let go of it."""
        self._params.pop(conversation, None)

    def keep(self, conversation: str, params: object) -> None:
        """Remember what an answer carried; what names no blocks is none."""
        if isinstance(params, dict) and params.get("remote_block_ids"):
            self._params[conversation] = params

    @property
    def num_blocks(self) -> int:
        """All blocks that are kept, by what is remembered of them."""
        return sum(_num_blocks(params["remote_block_ids"]) for params in self._params.values())

    def metrics_text(self) -> str:
        """The same as an engine would publish it."""
        return f"{RETAINED_METRIC} {self.num_blocks}\n"


def _num_blocks(ids: list[Any]) -> int:
    """One list, or one for each group of layers, of which the longest counts."""
    return max((len(group) for group in ids), default=0) if isinstance(ids[0], list) else len(ids)
