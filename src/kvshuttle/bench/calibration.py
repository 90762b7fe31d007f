"""What a calibration measured, and what follows from it: a profile, and thresholds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from kvshuttle.emulate.fit import (
    TimedChunk,
    decode_table,
    fit_prefill,
    largest_error,
    nonnegative_least_squares,
)
from kvshuttle.emulate.profile import Profile
from kvshuttle.handoff.break_even import LinearCost, break_even_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.emulate.geometry import Geometry


@dataclass(frozen=True, slots=True)
class HandOffTimes:
    """Of one hand-off, by the connector's own metrics, in milliseconds.

    ``wire_ms`` counts from the beginning of the post, so ``post_ms`` is a part of it. ``acquire_ms``: pull only.
    """

    post_ms: float
    wire_ms: float
    acquire_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """From asking to the last byte."""
        return self.acquire_ms + self.wire_ms


@dataclass(slots=True)
class Calibration:
    """All that was measured. ``decode_ms``: by (requests, context). ``pulls``, ``pushes``: by tokens of the prompt."""

    chunks: list[TimedChunk] = field(default_factory=list)
    decode_ms: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    pulls: dict[int, list[HandOffTimes]] = field(default_factory=dict)
    pushes: dict[int, list[HandOffTimes]] = field(default_factory=dict)

    def profile(self, name: str, provenance: str, geometry: Geometry) -> Profile:
        """The accelerator that takes as long. Raises ``ConfigError`` when too little was measured."""
        return Profile(name, provenance, geometry, fit_prefill(self.chunks), decode_table(self.decode_ms))

    def read_cost(self) -> LinearCost:
        """Of a pull: medians by length, a line by relative errors."""
        medians = {num: median([each.total_ms for each in times]) for num, times in self.pulls.items() if times}
        rows = [[1.0 / took_ms, num / took_ms] for num, took_ms in medians.items()]
        fixed_ms, per_token_ms = nonnegative_least_squares(rows, [1.0] * len(rows))
        return LinearCost(fixed_ms / 1000, per_token_ms / 1000)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What to set, and the two costs that it follows from."""

    compute_per_token_s: float
    read: LinearCost
    num_tokens: int


def thresholds(calibration: Calibration, profile: Profile) -> Thresholds:
    """From how many tokens on a read pays: for both knobs the same, since both weigh the same two costs.

    What a token costs to compute is taken at the shortest prompt and without the fixed part, which is its least: behind
    a history each costs more, and then a read pays the sooner.
    """
    cost = profile.prefill
    shortest = min(chunk.num_tokens for chunk in calibration.chunks)
    compute_s = (cost.per_token_ms + cost.per_token_squared_ms * shortest) / 1000
    read = calibration.read_cost()
    return Thresholds(compute_s, read, break_even_tokens(compute_per_token_s=compute_s, read=read))


def figures(calibration: Calibration, profile: Profile) -> dict[str, Any]:
    """JSON-able: what was measured, and what follows."""
    suggested = thresholds(calibration, profile)
    return {
        "prefill_ms": [[chunk.before, chunk.num_tokens, chunk.took_ms] for chunk in calibration.chunks],
        "prefill_largest_error": largest_error(profile.prefill, calibration.chunks),
        "decode_ms": [[*place, times] for place, times in sorted(calibration.decode_ms.items())],
        "pull_ms": _times(calibration.pulls),
        "push_ms": _times(calibration.pushes),
        "read_fixed_ms": suggested.read.fixed_s * 1000,
        "read_per_token_ms": suggested.read.per_token_s * 1000,
        "compute_per_token_ms": suggested.compute_per_token_s * 1000,
        "kv_recompute_threshold": suggested.num_tokens,
        "recompute_threshold_tokens": suggested.num_tokens,
    }


def _times(by_length: Mapping[int, list[HandOffTimes]]) -> list[dict[str, Any]]:
    return [
        {"tokens": num, "acquire_ms": each.acquire_ms, "post_ms": each.post_ms, "wire_ms": each.wire_ms}
        for num, times in sorted(by_length.items())
        for each in times
    ]
