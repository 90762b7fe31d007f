"""How fast this engine computes prompts and reads from each peer, and from how many tokens on a read pays by that."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvshuttle.handoff.break_even import CostEstimate, threshold_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvshuttle.connector.stats import ShuttleStats

_MIN_STEP_TOKENS = 64
"""Shorter steps tell more about the engine's fixed costs than about a token's."""
_MAX_STEPS_AHEAD = 8


class Pace:
    """``setting``: tokens, or ``auto``. Peers are told apart by engine id, so that a restart changes nothing."""

    def __init__(self, setting: int | str, stats: ShuttleStats) -> None:
        self._fixed_tokens = None if isinstance(setting, str) else setting
        self._stats = stats
        self._compute = CostEstimate()
        self._reads: dict[str, CostEstimate] = {}
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MAX_STEPS_AHEAD)
        self._last_done_at_s = 0.0

    def note_scheduled(self, nums_tokens: Iterable[int], now: float) -> None:
        """A step begins that computes so many tokens of each of its requests."""
        nums = tuple(nums_tokens)
        num_prompt_tokens = sum(num for num in nums if num > 1)
        self._steps.append((now, sum(nums) if num_prompt_tokens >= len(nums) else 0))

    def note_done(self, now: float) -> None:
        """The results of the oldest step are here."""
        if not self._steps:
            return
        began_at_s, num_tokens = self._steps.popleft()
        # Where vLLM schedules ahead, a step waits for the one before it.
        duration_s = now - max(began_at_s, self._last_done_at_s)
        self._last_done_at_s = now
        if num_tokens >= _MIN_STEP_TOKENS:
            self._compute.observe(num_tokens, duration_s, now_s=now)

    def note_read(self, engine_id: str, num_tokens: int, duration_s: float, now: float) -> None:
        """A read has brought so many tokens."""
        self._reads.setdefault(engine_id, CostEstimate()).observe(num_tokens, duration_s, now_s=now)

    def threshold_tokens(self, engine_id: str, now: float) -> int:
        """The fewest tokens of an earlier turn that are worth a read from this engine."""
        value = self._fixed_tokens
        if value is None:
            value = threshold_tokens(self._compute, self._reads.get(engine_id) or CostEstimate(), now_s=now)
        self._stats.set("recompute_threshold_tokens", value, engine_id)
        return value
