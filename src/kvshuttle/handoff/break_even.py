"""From how many tokens on reading KV is cheaper than computing it, by what was measured.

Two costs are compared, both linear in the number of tokens. Reading has a fixed part (ask, post, wait for the next
engine step) and computing has hardly one, so there is a length below which reading does not pay; and on a slow network
with a small model it never does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_THRESHOLD_TOKENS = 64
"""vLLM's own figure, which holds for a fast network and a large model."""
MIN_THRESHOLD_TOKENS = 16
MAX_THRESHOLD_TOKENS = 65_536
_DECAY = 0.9
"""Weight of everything observed before, at each observation: ten of them are about half of the estimate."""
_STALE_S = 300.0
"""Older estimates count for nothing, so that a way that was slow once is tried again."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """``fixed_s + per_token_s * num_tokens``."""

    fixed_s: float
    per_token_s: float


def break_even_tokens(*, compute_per_token_s: float, read: LinearCost) -> int:
    """The fewest tokens worth a read.

    ::

        compute(n) = c * n              c = compute_per_token_s
        read(n)    = f + r * n          f = read.fixed_s, r = read.per_token_s

        read(n) < compute(n)   <=>   n > f / (c - r)       if c > r, else never

    The result is ``f / (c - r)``, rounded up, within ``[MIN_THRESHOLD_TOKENS, MAX_THRESHOLD_TOKENS]``; the upper bound
    where reading never pays, so that a measurement gone wrong cannot switch reuse off for long histories.
    """
    gain_per_token_s = compute_per_token_s - read.per_token_s
    if gain_per_token_s <= 0:
        return MAX_THRESHOLD_TOKENS
    num_tokens = min(read.fixed_s / gain_per_token_s, MAX_THRESHOLD_TOKENS)
    return max(math.ceil(num_tokens), MIN_THRESHOLD_TOKENS)


class CostEstimate:
    """A linear cost from observations, the newer the heavier: a weighted least-squares line, held above zero."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._observed_at_s = -math.inf

    def __repr__(self) -> str:
        return f"<CostEstimate weight={self._weight:.1f} x={self._x:.0f} y={self._y:.3f}>"

    def observe(self, num_tokens: int, duration_s: float, *, now_s: float) -> None:
        """So many tokens took so long. What cannot be is ignored."""
        if num_tokens <= 0 or not (math.isfinite(duration_s) and duration_s > 0):
            return
        decay = _DECAY if now_s - self._observed_at_s < _STALE_S else 0.0
        self._observed_at_s = now_s
        x, y = float(num_tokens), duration_s
        self._weight = self._weight * decay + 1.0
        self._x = self._x * decay + x
        self._y = self._y * decay + y
        self._xx = self._xx * decay + x * x
        self._xy = self._xy * decay + x * y

    def line(self, now_s: float) -> LinearCost | None:
        """The best line; None before the first observation and long after the last one.

        Observations of one length only cannot tell the two parts apart: then all of it counts as fixed, which errs on
        the side of computing for short histories and of trying for long ones.
        """
        if not self._weight or now_s - self._observed_at_s >= _STALE_S:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        if spread <= (0.01 * mean_x) ** 2:
            return LinearCost(mean_y, 0.0)
        slope = (self._xy / self._weight - mean_x * mean_y) / spread
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return LinearCost(mean_y - slope * mean_x, slope)

    def per_token_s(self, now_s: float) -> float | None:
        """The mean cost of a token, fixed parts included; None as in ``line``."""
        if not self._weight or now_s - self._observed_at_s >= _STALE_S:
            return None
        return self._y / self._x


def threshold_tokens(compute: CostEstimate, read: CostEstimate, *, now_s: float) -> int:
    """The threshold by what was measured so far; ``DEFAULT_THRESHOLD_TOKENS`` while one of the two is unknown."""
    per_token_s, line = compute.per_token_s(now_s), read.line(now_s)
    if per_token_s is None or line is None:
        return DEFAULT_THRESHOLD_TOKENS
    return break_even_tokens(compute_per_token_s=per_token_s, read=line)
