"""Accelerator profiles: what a bad file is told, and how long steps take."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.emulate.geometry import Geometry
from kvshuttle.emulate.profile import load_profile, parse_profile, profile_names, to_mapping
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "name": "small",
    "provenance": "made up",
    "geometry": {"num_layers": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"},
    "prefill": {"fixed_ms": 10.0, "per_token_ms": 0.1, "per_token_squared_ms": 0.001},
    "decode": {"batches": [1, 3], "contexts": [100, 200], "steps_ms": [[10.0, 20.0], [30.0, 40.0]]},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one value replaced; ``...`` takes it out."""
    values = copy.deepcopy(GOOD)
    *tables, key = path.split(".")
    table = values
    for name in tables:
        table = table[name]
    if value is ...:
        del table[key]
    else:
        table[key] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("name", ..., "name: text, got None"),
        ("provenance", " ", "provenance: text"),
        ("speed", 3, "speed: unknown key; known are name, provenance, geometry, prefill, decode, contention"),
        ("contention", 2, r"\[contention\]: a table with prefill, decode, got 2"),
        ("contention", {"decode": 1.2}, r"contention.prefill: missing; write it under \[contention\]"),
        (
            "contention",
            {"prefill": 0.9, "decode": 1},
            "contention.prefill: how many times longer, 1 to 1,000,000, got 0.9",
        ),
        (
            "contention",
            {"prefill": 1, "decode": True},
            "contention.decode: how many times longer, 1 to 1,000,000, got True",
        ),
        ("geometry", ..., r"\[geometry\]: a table with num_layers"),
        ("geometry.layers", 3, "geometry.layers: unknown key; known are num_layers"),
        ("geometry.num_layers", 0, "geometry.num_layers: a whole number from 1 to 10,000, got 0"),
        ("geometry.num_kv_heads", True, "geometry.num_kv_heads: a whole number from 1 to 10,000, got True"),
        ("geometry.num_layers", 10**400, "geometry.num_layers: a whole number from 1 to 10,000, got 1000"),
        ("prefill.fixed_ms", 1e300, r"prefill.fixed_ms: a number of milliseconds, 0 to 1,000,000, got 1e\+300"),
        ("prefill.fixed_ms", 10**400, "prefill.fixed_ms: a number of milliseconds, 0 to 1,000,000, got 1000"),
        ("decode.batches", [1, 10**400], "decode.batches: a rising list of whole numbers from 1 to 1,000,000, got "),
        ("decode.batches", [True, 2], "decode.batches: a rising list of whole numbers"),
        ("geometry.head_dim", 100, "geometry.head_dim: one of 32, 64"),
        ("geometry.dtype", "int3", "geometry.dtype: one of bfloat16"),
        ("prefill.fixed_ms", ..., r"prefill.fixed_ms: missing; write it under \[prefill\]"),
        ("prefill.per_token_ms", -1, "prefill.per_token_ms: a number of milliseconds, 0 to 1,000,000, got -1"),
        ("prefill.per_token_ms", float("nan"), "prefill.per_token_ms: a number of milliseconds"),
        ("decode.batches", [3, 1], r"decode.batches: a rising list of whole numbers from 1 to 1,000,000, got \[3, 1\]"),
        ("decode.contexts", [], "decode.contexts: a rising list"),
        ("decode.steps_ms", [[1.0, 2.0]], "decode.steps_ms: one row for each of the 2 batches"),
        ("decode.steps_ms", [[1.0, 2.0], [3.0]], r"decode.steps_ms\[1\]: one value for each of the 2 contexts"),
        (
            "decode.steps_ms",
            [[1.0, 2.0], [3.0, "4"]],
            "decode.steps_ms: a number of milliseconds, 0 to 1,000,000, got '4'",
        ),
    ],
)
def test_a_bad_profile_is_told_the_field_and_the_fix(path: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_profile(changed(path, value))


def test_a_file_that_is_not_toml_or_not_there_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(ConfigError, match=r"profile: .*broken\.toml: "):
        load_profile(str(broken))
    with pytest.raises(ConfigError, match=r"profile: no 'h300'; known are .*h200-tp8-qwen3-32b"):
        load_profile("h300")


def test_a_bad_field_is_told_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: \[geometry\]"):
        load_profile(str(path))


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_of_ours_loads_and_survives_the_way_through_json(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert parse_profile(to_mapping(profile)) == profile


def test_the_qwen_profile_is_near_the_table_that_it_was_fitted_to() -> None:
    profile = load_profile("h200-tp8-qwen3-32b")
    table_ms = {1024: 24.7, 4096: 83.5, 8192: 164.6, 16384: 346.1, 24576: 555.1}
    for tokens, expected_ms in table_ms.items():
        assert profile.step_s([(0, tokens)], []) * 1000 == pytest.approx(expected_ms, rel=0.04)
    assert profile.geometry.kv_bytes_per_token == 262_144
    assert profile.geometry.scaled(0.25).kv_bytes_per_token == 65_536


def test_the_glm_profile_has_nearly_the_bytes_and_times_that_it_stands_for() -> None:
    profile = load_profile("h200-tp8-glm-5-fp8")
    assert profile.geometry.kv_bytes_per_token == pytest.approx(100_152, rel=0.01)
    assert profile.step_s([(0, 2900)], []) == pytest.approx(0.403, rel=0.02)
    assert profile.step_s([(0, 20900)], []) == pytest.approx(2.703, rel=0.02)


def test_a_prompt_in_chunks_costs_the_whole_and_the_fixed_part_of_each_step() -> None:
    profile = parse_profile(GOOD)
    whole_ms = profile.step_s([(0, 300)], []) * 1000
    assert whole_ms == pytest.approx(10 + 0.1 * 300 + 0.001 * 300**2)
    chunks_ms = sum(profile.step_s([(before, 100)], []) for before in (0, 100, 200)) * 1000
    assert chunks_ms == pytest.approx(whole_ms + 2 * 10)


@pytest.mark.parametrize(
    ("contexts", "expected_ms"),
    [
        ([100], 10.0),
        ([150], 15.0),
        ([100, 100], 20.0),
        ([150, 150], 25.0),
        ([100] * 9, 30.0),
        ([10], 10.0),
        ([900], 20.0),
        ([50, 150, 400], 40.0),
    ],
)
def test_decode_is_interpolated_inside_its_table_and_held_at_its_edges(contexts: list[int], expected_ms: float) -> None:
    assert parse_profile(GOOD).step_s([], contexts) * 1000 == pytest.approx(expected_ms)


def test_decoding_beside_a_chunk_adds_only_what_is_above_the_cheapest_step() -> None:
    profile = parse_profile(GOOD)
    alone_ms = profile.step_s([(0, 100)], []) * 1000
    assert profile.step_s([(0, 100)], [100] * 3) * 1000 == pytest.approx(alone_ms + 30 - 10)


def test_an_empty_step_takes_no_time() -> None:
    assert parse_profile(GOOD).step_s([], []) == 0


def test_a_slowed_profile_takes_longer_in_every_part_and_says_so() -> None:
    profile = parse_profile(GOOD)
    slowed = profile.slowed(4)
    assert slowed.name == "small x 4"
    for chunks, contexts in (([(0, 300)], []), ([], [100, 150]), ([(64, 32)], [200])):
        assert slowed.step_s(chunks, contexts) == pytest.approx(4 * profile.step_s(chunks, contexts))
    assert profile.slowed(1) == profile
    with pytest.raises(ConfigError, match="time_scale: a number above 0"):
        profile.slowed(0)


def test_only_a_profile_with_contention_slows_its_steps_down_beside_others() -> None:
    alone = parse_profile(GOOD)
    assert [alone.slowdown(computes_prompts=each) for each in (True, False)] == [1, 1]
    shared = parse_profile(changed("contention", {"prefill": 1.1, "decode": 1.5}))
    assert parse_profile(to_mapping(shared)) == shared
    for profile in (shared, shared.slowed(4)):
        assert [profile.slowdown(computes_prompts=each) for each in (True, False)] == [1.1, 1.5]


def test_bytes_are_scaled_by_layers_and_never_to_none() -> None:
    geometry = Geometry(64, 8, 128)
    assert geometry.scaled(0.5).num_layers == 32
    assert geometry.scaled(0.001).num_layers == 1
    with pytest.raises(ConfigError, match="bytes_scale: a number above 0"):
        geometry.scaled(-1)


def test_no_step_is_shorter_than_the_cheapest_decode_step() -> None:
    profile = parse_profile(changed("prefill.fixed_ms", 0.0))
    assert profile.step_s([(0, 1)], []) == pytest.approx(0.010)
    assert profile.step_s([(0, 1)], [100]) == pytest.approx(0.010)
    assert profile.step_s([(0, 300)], []) > 0.1
