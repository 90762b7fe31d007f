"""From timed steps to the costs of a profile: least squares in which no cost is below zero. Pure."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import TYPE_CHECKING

from kvshuttle.emulate.profile import DecodeCost, PrefillCost
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROUND_DIGITS = 4


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """A step over one chunk of a prompt: tokens before it, tokens in it, how long it took."""

    before: int
    num_tokens: int
    took_ms: float


def nonnegative_least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The factors, none below zero, by which the columns of ``rows`` come closest to ``values``.

    The best factors of each set of columns are looked at, so it is for few columns. Raises ``ValueError`` without rows.
    """
    if not rows or len(rows) != len(values):
        raise ValueError("as many values as rows, at least one")
    num_columns = len(rows[0])
    best, best_error = [0.0] * num_columns, sum(value * value for value in values)
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            found = _least_squares([[row[column] for column in columns] for row in rows], values)
            if found is None or min(found) < 0:
                continue
            factors = [0.0] * num_columns
            for column, factor in zip(columns, found, strict=True):
                factors[column] = factor
            error = _error(rows, values, factors)
            if error < best_error * (1 - 1e-9):
                best, best_error = factors, error
    return best


def fit_prefill(chunks: Sequence[TimedChunk]) -> PrefillCost:
    """The cost that fits all chunks, by relative errors. A chunk's time is the median of those alike.

    Chunks of one token, which a decode engine computes of each prompt that it was handed, count as alike all together.
    Raises ``ConfigError`` with fewer than three kinds of chunks.
    """
    alike = alike_chunks(chunks)
    if len(alike) < 3:
        raise ConfigError(f"prompt_tokens: three lengths of prompts tell a cost, {len(alike)} were measured; give more")
    rows, ones = [], []
    for (before, num), times_ms in alike.items():
        took_ms = median(times_ms)
        rows.append([part / took_ms for part in (1.0, num, (before + num) ** 2 - before**2)])
        ones.append(1.0)
    return PrefillCost(*(_rounded(factor) for factor in nonnegative_least_squares(rows, ones)))


def largest_error(cost: PrefillCost, chunks: Sequence[TimedChunk]) -> float:
    """Of the medians of chunks alike, as a fraction of them."""
    return max(abs(cost.step_ms([place]) / median(times) - 1) for place, times in alike_chunks(chunks).items())


def decode_table(steps: Mapping[tuple[int, int], Sequence[Sequence[float]]]) -> DecodeCost:
    """From milliseconds of steps by (requests, context), in rounds: medians of the rounds' means, as a table.

    A client's time per token is a mean over steps, some of which take half as long again on a machine with neighbours;
    the median of all steps would leave those out.

    Raises ``ConfigError`` naming a place without steps.
    """
    batches, contexts = (tuple(sorted({place[axis] for place in steps})) for axis in (0, 1))
    for batch, context in itertools.product(batches, contexts):
        if not any(steps.get((batch, context), ())):
            raise ConfigError(
                f"decode: no step of {batch} requests at {context} tokens was measured; give more --steps, so that as"
                " many decode together for a while, or leave that many out of --batches"
            )
    rows = tuple(
        tuple(round(median([fmean(times) for times in steps[batch, context] if times]), 3) for context in contexts)
        for batch in batches
    )
    return DecodeCost(batches, contexts, rows)


def alike_chunks(chunks: Sequence[TimedChunk]) -> dict[tuple[int, int], list[float]]:
    """Milliseconds by (tokens before, tokens in it); chunks of one token all together, behind a median of tokens."""
    singles = [chunk.before for chunk in chunks if chunk.num_tokens == 1]
    alike: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for chunk in chunks:
        before = chunk.before if chunk.num_tokens > 1 else median_low(singles)
        alike[before, chunk.num_tokens].append(chunk.took_ms)
    return alike


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Normal equations, columns scaled to length one, by elimination; None where columns depend on each other."""
    num_columns = len(rows[0])
    scales = [math.sqrt(sum(row[column] ** 2 for row in rows)) for column in range(num_columns)]
    if min(scales) == 0:
        return None
    scaled = [[row[column] / scales[column] for column in range(num_columns)] for row in rows]
    system = [
        [
            *(sum(row[one] * row[other] for row in scaled) for other in range(num_columns)),
            sum(row[one] * value for row, value in zip(scaled, values, strict=True)),
        ]
        for one in range(num_columns)
    ]
    for pivot in range(num_columns):
        best = max(range(pivot, num_columns), key=lambda index: abs(system[index][pivot]))
        system[pivot], system[best] = system[best], system[pivot]
        if abs(system[pivot][pivot]) < 1e-12:
            return None
        for index in range(num_columns):
            if index != pivot:
                factor = system[index][pivot] / system[pivot][pivot]
                system[index] = [a - factor * b for a, b in zip(system[index], system[pivot], strict=True)]
    return [system[index][-1] / system[index][index] / scales[index] for index in range(num_columns)]


def _error(rows: Sequence[Sequence[float]], values: Sequence[float], factors: Sequence[float]) -> float:
    sums = [sum(factor * part for factor, part in zip(factors, row, strict=True)) for row in rows]
    return sum((total - value) ** 2 for total, value in zip(sums, values, strict=True))


def _rounded(value: float) -> float:
    """To so many digits that count."""
    return float(f"{value:.{_ROUND_DIGITS}g}")
