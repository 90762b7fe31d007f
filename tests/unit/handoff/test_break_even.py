from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.handoff.break_even import (
    DEFAULT_THRESHOLD_TOKENS,
    MAX_THRESHOLD_TOKENS,
    MIN_THRESHOLD_TOKENS,
    CostEstimate,
    LinearCost,
    break_even_tokens,
    threshold_tokens,
)


@pytest.mark.parametrize(
    ("compute_per_token_s", "fixed_s", "per_token_s", "expected"),
    [
        (0.002, 0.2, 0.0005, 134),  # a small model on a CPU: 500 tokens/s, 2,000 tokens/s over the wire
        (0.00005, 0.004, 0.000002, 84),  # a large one on a GPU over a fast network
        (0.00001, 0.02, 0.000002, 2500),
        (0.001, 0.0001, 0.0, MIN_THRESHOLD_TOKENS),
        (0.001, 0.1, 0.001, MAX_THRESHOLD_TOKENS),
        (0.001, 0.1, 0.002, MAX_THRESHOLD_TOKENS),
        (0.001, 1e6, 0.0, MAX_THRESHOLD_TOKENS),
        (0.001, math.inf, 0.0, MAX_THRESHOLD_TOKENS),
    ],
)
def test_the_break_even_point_is_where_the_two_lines_cross(
    compute_per_token_s: float, fixed_s: float, per_token_s: float, expected: int
) -> None:
    read = LinearCost(fixed_s, per_token_s)
    assert break_even_tokens(compute_per_token_s=compute_per_token_s, read=read) == expected


COSTS = st.floats(1e-7, 1.0)


@given(compute=COSTS, fixed=COSTS, per_token=COSTS, num_tokens=st.integers(MIN_THRESHOLD_TOKENS, MAX_THRESHOLD_TOKENS))
def test_within_its_bounds_the_threshold_decides_as_the_costs_do(
    compute: float, fixed: float, per_token: float, num_tokens: int
) -> None:
    threshold = break_even_tokens(compute_per_token_s=compute, read=LinearCost(fixed, per_token))
    reading_s, computing_s = fixed + per_token * num_tokens, compute * num_tokens
    if MIN_THRESHOLD_TOKENS < threshold < MAX_THRESHOLD_TOKENS and not math.isclose(reading_s, computing_s):
        assert (num_tokens >= threshold) == (reading_s < computing_s)


def test_an_estimate_finds_the_line_behind_its_observations() -> None:
    estimate = CostEstimate()
    for number, num_tokens in enumerate((100, 2000, 500, 6000, 50, 1000)):
        estimate.observe(num_tokens, 0.05 + 0.001 * num_tokens, now_s=float(number))
    line = estimate.line(6.0)
    assert line is not None
    assert math.isclose(line.fixed_s, 0.05, rel_tol=1e-6)
    assert math.isclose(line.per_token_s, 0.001, rel_tol=1e-6)


def test_an_estimate_follows_a_change() -> None:
    estimate = CostEstimate()
    for number in range(200):
        slowness = 1.0 if number < 100 else 5.0
        num_tokens = 100 + 37 * (number % 11)
        estimate.observe(num_tokens, slowness * (0.01 + 0.0001 * num_tokens), now_s=float(number))
    line = estimate.line(200.0)
    assert line is not None
    assert math.isclose(line.fixed_s, 0.05, rel_tol=0.01)


def test_observations_of_one_length_cannot_tell_the_parts_apart() -> None:
    estimate = CostEstimate()
    for number in range(5):
        estimate.observe(1000, 0.3, now_s=float(number))
    line = estimate.line(5.0)
    assert line is not None
    assert math.isclose(line.fixed_s, 0.3)
    assert line.per_token_s == 0.0


@pytest.mark.parametrize(("num_tokens", "duration_s"), [(0, 1.0), (-5, 1.0), (5, 0.0), (5, -1.0), (5, math.nan)])
def test_what_cannot_be_is_not_observed(num_tokens: int, duration_s: float) -> None:
    estimate = CostEstimate()
    estimate.observe(num_tokens, duration_s, now_s=0.0)
    assert estimate.line(0.0) is None
    assert estimate.per_token_s(0.0) is None


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 100.0)), min_size=1, max_size=30))
def test_no_observations_make_a_cost_negative(observations: list[tuple[int, float]]) -> None:
    estimate = CostEstimate()
    for number, (num_tokens, duration_s) in enumerate(observations):
        estimate.observe(num_tokens, duration_s, now_s=float(number))
    line = estimate.line(float(len(observations)))
    assert line is not None
    assert line.per_token_s >= 0
    assert line.fixed_s >= -1e-6


def test_an_old_estimate_counts_for_nothing_and_then_starts_anew() -> None:
    estimate = CostEstimate()
    estimate.observe(100, 9.0, now_s=0.0)
    assert estimate.line(299.0) is not None
    assert estimate.line(300.0) is None
    assert estimate.per_token_s(300.0) is None
    estimate.observe(100, 1.0, now_s=400.0)
    assert estimate.per_token_s(400.0) == 0.01
    assert repr(estimate) == "<CostEstimate weight=1.0 x=100 y=1.000>"


def test_the_threshold_is_the_published_one_until_both_costs_are_known() -> None:
    compute, read = CostEstimate(), CostEstimate()
    assert threshold_tokens(compute, read, now_s=0.0) == DEFAULT_THRESHOLD_TOKENS
    compute.observe(1000, 2.0, now_s=0.0)
    assert threshold_tokens(compute, read, now_s=0.0) == DEFAULT_THRESHOLD_TOKENS
    read.observe(1000, 0.4, now_s=0.0)
    assert threshold_tokens(compute, read, now_s=0.0) == 200
    assert threshold_tokens(compute, read, now_s=1000.0) == DEFAULT_THRESHOLD_TOKENS
