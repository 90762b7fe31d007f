"""From timed steps to a profile: costs are found again that times were made of, and a file that loads comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvshuttle.emulate.fit import TimedChunk, decode_table, fit_prefill, largest_error, nonnegative_least_squares
from kvshuttle.emulate.geometry import Geometry
from kvshuttle.emulate.profile import Contention, DecodeCost, PrefillCost, Profile, load_profile
from kvshuttle.emulate.profile_file import profile_toml
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

COST = PrefillCost(12.0, 0.8, 0.0001)


def chunks(cost: PrefillCost, *places: tuple[int, int], factor: float = 1.0) -> list[TimedChunk]:
    return [TimedChunk(before, num, cost.step_ms([(before, num)]) * factor) for before, num in places]


def test_costs_are_found_again_from_whole_prompts_and_chunks() -> None:
    found = fit_prefill(chunks(COST, (0, 128), (0, 512), (0, 2048), (2048, 2048), (4096, 100)))
    assert (found.fixed_ms, found.per_token_ms) == pytest.approx((12.0, 0.8), rel=1e-3)
    assert found.per_token_squared_ms == pytest.approx(0.0001, rel=1e-3)


def test_one_slow_repeat_changes_nothing() -> None:
    times = chunks(COST, (0, 128), (0, 512), (0, 2048)) * 3 + chunks(COST, (0, 512), factor=5)
    found = fit_prefill(times)
    assert found.per_token_ms == pytest.approx(0.8, rel=1e-3)
    assert largest_error(found, times) < 0.001


def test_last_tokens_of_all_lengths_count_as_one_kind_of_chunk() -> None:
    prompts = chunks(COST, (0, 128), (0, 512), (0, 2048))
    singles = [TimedChunk(before, 1, 40.0) for before in (127, 511, 2047)]
    found = fit_prefill([*prompts, *singles])
    assert found == fit_prefill([*prompts, *[TimedChunk(511, 1, 40.0)] * 5])
    assert 12.0 < found.fixed_ms < 40.0


def test_no_cost_is_below_zero_where_longer_prompts_are_cheaper_by_the_token() -> None:
    found = fit_prefill([TimedChunk(0, 100, 100.0), TimedChunk(0, 1000, 900.0), TimedChunk(0, 2000, 1700.0)])
    assert min(found.fixed_ms, found.per_token_ms, found.per_token_squared_ms) >= 0
    assert found.per_token_squared_ms == 0
    assert found.step_ms([(0, 1000)]) == pytest.approx(900, rel=0.05)


def test_too_few_lengths_are_refused_with_the_option() -> None:
    with pytest.raises(ConfigError, match="prompt_tokens: three lengths of prompts tell a cost, 2 were measured"):
        fit_prefill(chunks(COST, (0, 128), (0, 512), (0, 512)))


def test_factors_are_the_best_ones_that_are_not_below_zero() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        rows, values = rng.normal(size=(8, 3)), rng.normal(size=8)
        found = np.array(nonnegative_least_squares(rows.tolist(), values.tolist()))
        slope = rows.T @ (rows @ found - values)
        assert (found >= 0).all()
        assert (slope > -1e-9).all()
        assert slope[found > 0] == pytest.approx(0, abs=1e-9)


def test_columns_that_say_the_same_are_used_once() -> None:
    assert nonnegative_least_squares([[1.0, 1.0], [2.0, 2.0]], [3.0, 6.0]) == pytest.approx([3.0, 0.0])
    with pytest.raises(ValueError, match="at least one"):
        nonnegative_least_squares([], [])


def test_a_decode_table_is_made_of_medians_of_means_and_needs_every_place() -> None:
    # One stream: two rounds at 31 ms on average, half of whose steps are slow, one that was slow as a whole, one empty.
    one = [[21.0, 41.0], [11.0, 51.0], [90.0], []]
    steps = {(1, 268): one, (4, 268): [[40.0]], (1, 1036): [[33.0]], (4, 1036): [[50.0]]}
    table = decode_table(steps)
    assert table == DecodeCost((1, 4), (268, 1036), ((31.0, 33.0), (40.0, 50.0)))
    with pytest.raises(ConfigError, match="decode: no step of 4 requests at 1036 tokens was measured"):
        decode_table(steps | {(4, 1036): [[], []]})


def test_a_profile_that_is_written_is_read_back(tmp_path: Path) -> None:
    told = "Measured by a test, on this machine, at some length, so that it does not fit one line of the file."
    decode = DecodeCost((1, 4), (268, 1036), ((31.0, 33.5), (40.0, 50.0)))
    prefill, contention = PrefillCost(0.0, 0.8123, 1.5e-7), Contention(1.05, 1.2)
    profile = Profile("mine", told, Geometry(30, 3, 64), prefill, decode, contention)
    path = tmp_path / "mine.toml"
    path.write_text(profile_toml(profile))
    read = load_profile(str(path))
    assert " ".join(read.provenance.split()) == told
    assert replace(read, provenance=told) == profile
    path.write_text(profile_toml(replace(profile, contention=None)))
    assert load_profile(str(path)) == replace(read, contention=None)


def test_a_provenance_that_would_end_its_own_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="provenance: no backslash and no three quotes"):
        profile_toml(Profile("mine", 'a """ b', Geometry(1, 1, 64), COST, DecodeCost((1,), (1,), ((1.0,),))))
