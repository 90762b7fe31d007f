"""What a calibration measured, and what follows from it: a profile, and thresholds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvshuttle.emulate.fit import (
    TimedChunk,
    decode_table,
    fit_prefill,
    largest_error,
    nonnegative_least_squares,
)
from kvshuttle.emulate.profile import Contention, Profile
from kvshuttle.handoff.break_even import LinearCost, break_even_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvshuttle.emulate.geometry import Geometry
    from kvshuttle.emulate.trace import Pass


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
    """All that was measured. ``decode_ms``: of each round, by (requests, context). ``pulls``, ``pushes``: by tokens of
    the prompt. ``prefill_slowed``, ``decode_slowed``: how many times longer steps took while the other engine computed;
    nothing where engines have an accelerator each."""

    chunks: list[TimedChunk] = field(default_factory=list)
    decode_ms: dict[tuple[int, int], list[list[float]]] = field(default_factory=dict)
    pulls: dict[int, list[HandOffTimes]] = field(default_factory=dict)
    pushes: dict[int, list[HandOffTimes]] = field(default_factory=dict)
    prefill_slowed: list[float] = field(default_factory=list)
    decode_slowed: list[float] = field(default_factory=list)

    def profile(self, name: str, provenance: str, geometry: Geometry) -> Profile:
        """The accelerator that takes as long. Raises ``ConfigError`` when too little was measured."""
        return Profile(
            name, provenance, geometry, fit_prefill(self.chunks), decode_table(self.decode_ms), self.contention()
        )

    def contention(self) -> Contention | None:
        """Medians, and no speeding up; None where it was not measured."""
        if not self.prefill_slowed or not self.decode_slowed:
            return None
        return Contention(*(max(1.0, round(median(times), 3)) for times in (self.prefill_slowed, self.decode_slowed)))

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
    shortest = min(chunk.num_tokens for chunk in calibration.chunks if chunk.before == 0)
    compute_s = (cost.per_token_ms + cost.per_token_squared_ms * shortest) / 1000
    read = calibration.read_cost()
    return Thresholds(compute_s, read, break_even_tokens(compute_per_token_s=compute_s, read=read))


def slowdown_of_prefill(prompts: Sequence[Pass], others: Sequence[Pass], alone_ms: float) -> float | None:
    """How many times slower a prompt goes on while another engine computes, which it did for ``others``.

    The prompt took ``alone_ms`` by itself; between the others' passes it went on as fast as then. None where that
    does not add up.
    """
    took_s = sum(forward.end_s - forward.start_s for forward in prompts)
    shared_s = sum(
        max(0.0, min(forward.end_s, other.end_s) - max(forward.start_s, other.start_s))
        for forward in prompts
        for other in others
    )
    done_beside_s = alone_ms / 1000 - (took_s - shared_s)
    return shared_s / done_beside_s if shared_s > 0 and done_beside_s > 0 else None


def slowdown_of_decoding(prompts: Sequence[Pass], decoding: Sequence[Pass]) -> float | None:
    """How many times longer decode steps took that ran inside another engine's passes than those that met none.

    None where either is missing.
    """
    beside, alone = [], []
    for step in decoding:
        if any(request.start < request.num_prompt_tokens for request in step.requests):
            continue
        if any(other.start_s <= step.start_s and step.end_s <= other.end_s for other in prompts):
            beside.append(step.planned_s)
        elif all(step.end_s <= other.start_s or other.end_s <= step.start_s for other in prompts):
            alone.append(step.planned_s)
    return fmean(beside) / fmean(alone) if beside and alone else None


def figures(calibration: Calibration, profile: Profile) -> dict[str, Any]:
    """JSON-able: what was measured, and what follows."""
    suggested = thresholds(calibration, profile)
    return {
        "prefill_ms": [[chunk.before, chunk.num_tokens, chunk.took_ms] for chunk in calibration.chunks],
        "prefill_largest_error": largest_error(profile.prefill, calibration.chunks),
        "decode_ms": [[*place, rounds] for place, rounds in sorted(calibration.decode_ms.items())],
        "prefill_slowed": calibration.prefill_slowed,
        "decode_slowed": calibration.decode_slowed,
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
