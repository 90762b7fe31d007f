"""How the KV of one request gets from the prefill engine to the decode engine, and why.

Pushing takes the hand-off off the way to the first token, but binds the request to a decode engine while its prompt
is still to be computed. That is worth it as long as some decode engine can take the request now. When all of them are
busy, the choice is better made late: whichever frees up first, meanwhile, gets the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.config import ModeChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.policy.placement import EngineView


class ModeReason(StrEnum):
    """Why this mode. Also the metric label."""

    CONFIGURED = "configured"
    REQUESTED = "requested"
    """By the request's own header."""
    DECODE_FREE = "decode_free"
    """``auto`` pushes: some decode engine can take the request at once."""
    DECODE_QUEUES = "decode_queues"
    """``auto`` pulls, as it does for the rest: every decode engine has requests waiting."""
    DECODE_SLOTS = "decode_slots"
    """Every decode engine runs as many requests as it may."""
    DECODE_MEMORY = "decode_memory"
    """No decode engine has room for the prompt."""
    DECODE_BUSY = "decode_busy"
    """All are busy, for different ones of these reasons."""


@dataclass(frozen=True, slots=True)
class ModeDecision:
    """A mode, never ``auto``, the reason for it, and the decode engines to choose from if the choice is now."""

    mode: ModeChoice
    reason: ModeReason
    decodes: tuple[EngineView, ...]


def choose_mode(
    knob: ModeChoice, asked: ModeChoice | None, decodes: Sequence[EngineView], *, num_tokens: int
) -> ModeDecision:
    """``asked`` by the request, else the ``knob``; ``auto`` looks at the ``decodes`` that could serve the request.

    ``num_tokens``: estimated prompt length. With no decode engine at all ``auto`` pushes, and placement says why not.
    """
    choice = asked or knob
    if choice is not ModeChoice.AUTO:
        reason = ModeReason.REQUESTED if asked else ModeReason.CONFIGURED
        return ModeDecision(choice, reason, tuple(decodes))
    verdicts = [why_busy(view, num_tokens=num_tokens) for view in decodes]
    free = tuple(view for view, verdict in zip(decodes, verdicts, strict=True) if verdict is None)
    if free or not decodes:
        return ModeDecision(ModeChoice.PUSH, ModeReason.DECODE_FREE, free)
    reasons = {verdict for verdict in verdicts if verdict is not None}
    reason = reasons.pop() if len(reasons) == 1 else ModeReason.DECODE_BUSY
    return ModeDecision(ModeChoice.PULL, reason, tuple(decodes))


def why_busy(view: EngineView, *, num_tokens: int) -> ModeReason | None:
    """Why a decode engine could not take a prompt of ``num_tokens`` at once; None when it could, or nothing is known.

    Its report is up to a probe old, so what this router has sent counts where it is more.
    """
    if view.num_queued > 0:
        return ModeReason.DECODE_QUEUES
    if view.num_slots and view.load >= view.num_slots:
        return ModeReason.DECODE_SLOTS
    if view.num_blocks and view.block_size_tokens:
        num_needed_blocks = -(-num_tokens // view.block_size_tokens)
        num_sent_blocks = -(-view.outstanding_tokens // view.block_size_tokens)
        num_taken_blocks = max(view.num_blocks - view.num_free_blocks, num_sent_blocks)
        if num_taken_blocks + num_needed_blocks > view.num_blocks:
            return ModeReason.DECODE_MEMORY
    return None
