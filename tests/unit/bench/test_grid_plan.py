"""Plans of load benchmarks: what is refused and how it is named, and the cells that a plan spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.bench.grid_plan import FEWEST_PROMPTS, GridCell, GridPlan, grid_plan_names, load_grid_plan
from kvshuttle.bench.plan_file import mapping_of
from kvshuttle.cli import main
from kvshuttle.errors import ConfigError
from support.grid_values import grid_plan

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"systems": ["shuttle-teleport"]}, "systems: names among plain, .*, got 'shuttle-teleport'"),
        ({"systems": []}, "systems: a list of different values, at least one"),
        ({"rates": [4, 4]}, "rates: a list of different values"),
        ({"rates": [1.0000001, 1.0000002]}, "rates: different in their first six digits"),
        (
            {"systems": ["shuttle-push", "shuttle-push-real"], "time_scale": 4},
            "time_scale: 1 beside systems on a model that computes, got 4",
        ),
        (
            {"systems": ["shuttle-push-real"], "time_scale": 1, "dtype": "float32"},
            "dtype: bfloat16 as in the profile h200-tp8-qwen3-32b, got 'float32'",
        ),
        (
            {"systems": ["shuttle-pull-real"], "time_scale": 1, "bytes_scale": 0.5},
            "bytes_scale: 1 beside systems on a model that computes, got 0.5",
        ),
        ({"rates": [0]}, "rates: a number above 0, got 0.0"),
        ({"rates": ["fast"]}, "rates: a number above 0, got 'fast'"),
        ({"input_tokens": [1024.5]}, "input_tokens: a whole number above 0, got 1024.5"),
        ({"output_tokens": [True]}, "output_tokens: a whole number above 0, got True"),
        ({"num_prompts": 8, "duration_s": 5}, "num_prompts, duration_s: one of them above 0, got 8 and 5"),
        ({"num_prompts": 0}, "num_prompts, duration_s: one of them above 0, got 0 and 0"),
        ({"num_prompts": -1}, "num_prompts: a whole number, 0 or more, got -1"),
        ({"seeds": [-1]}, "seeds: a whole number, 0 or more, got -1"),
        ({"repeats": 0}, "repeats: a whole number above 0, got 0"),
        ({"num_decode": 0}, "num_decode: a whole number above 0, got 0"),
        ({"time_scale": float("inf")}, "time_scale: a finite number, got inf"),
        ({"is_quiet_wait": 1}, "is_quiet_wait: true or false, got 1"),
        ({"profile": 7}, "profile: text, got 7"),
        ({"profile": "h300"}, "profile: no 'h300'; known are cpu2-smollm2-135m, "),
        ({"prompts": "old"}, "prompts: one of new, repeated, got 'old'"),
        ({"prompts": "repeated", "num_prefill": 2}, "prompts: repeated takes one prefill engine"),
        ({"prompts": "repeated", "has_decode_prefix_cache": True}, "prompts: repeated takes has_decode_prefix_cache"),
        (
            {"prompts": "repeated", "num_prompts": 1000, "cell_timeout_s": 2000},
            "prompts: the repeated ones take 2048000 tokens of KV",
        ),
        ({"input_tokens": [500_000]}, "prefill_kv_gib: holds 262144 tokens of 16384 bytes, but one request"),
        ({"rates": [1e300]}, r"rates: up to 1,000,000, got 1e\+300"),
        ({"rates": [10**400]}, "rates: up to 1,000,000, got 1000"),
        ({"rates": [1e-300]}, "rates: 0.000001 or more, got 1e-300"),
        ({"num_prompts": 0, "duration_s": 1e300}, r"duration_s: up to 1,000,000,000, got 1e\+300"),
        ({"num_prompts": 0, "duration_s": 10**400}, "duration_s: up to 1,000,000,000, got 1000"),
        ({"input_tokens": [10**400]}, "input_tokens: up to 1,000,000,000, got 1000"),
        ({"num_decode": 10**22}, "num_decode: up to 1,000, got 1"),
        ({"seeds": [2**32]}, "seeds: up to 4,294,967,295, got 4294967296"),
        (
            {"repeats": 10_000, "seeds": [1, 2]},
            "decode_slots, .*, repeats: up to 10,000 cells for a system, got 20,000",
        ),
        (
            {"num_prompts": 0, "duration_s": 1e6, "cell_timeout_s": 1e7},
            "duration_s: up to 100,000 requests in a cell, and at rate 4 it has 1,000,000",
        ),
        (
            {"num_prompts": 0, "duration_s": 700},
            "cell_timeout_s: longer than a cell sends requests, and at rate 4 that is 700 s, got 600; give it more, or"
            " lower duration_s",
        ),
        ({"bytes_scale": 1e6}, "bytes_scale: no more than 10,000 layers can be emulated, and"),
        (
            {
                "systems": ["shuttle-push-real"],
                "profile": "cpu2-smollm2-135m",
                "rates": [0.1],
                "time_scale": 1,
                "bytes_scale": 1,
            },
            "dtype: float32 as in the profile cpu2-smollm2-135m, got 'auto'",
        ),
        ({"dtype": "int3"}, "dtype: one of auto, half, float16, bfloat16, float, float32, got 'int3'"),
        ({"speed": 1}, "speed: unknown key; known are systems, rates,"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_by_the_name_of_its_key(knobs: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}"):
        grid_plan(**knobs)


def test_a_plan_without_a_key_that_it_needs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^input_tokens: missing"):
        GridPlan.from_mapping({"systems": "plain", "rates": 1, "num_prompts": 4})


def test_one_value_stands_for_a_list_of_one() -> None:
    plan = grid_plan(systems="plain", rates=2, input_tokens=1024, decode_slots=32)
    assert (plan.systems, plan.rates, plan.input_tokens, plan.decode_slots) == (("plain",), (2.0,), (1024,), (32,))


def test_cells_keep_engines_and_lengths_together() -> None:
    plan = grid_plan(decode_slots=[8, 32], input_tokens=[1024, 2048], rates=[1, 2], seeds=[0, 7], repeats=2)
    cells = plan.cells
    assert len(cells) == 2**5
    assert cells[0] == GridCell(8, 1024, 4, 1.0, 0, 0)
    assert [cell.slots for cell in cells] == [8] * 16 + [32] * 16
    assert [cell.input_tokens for cell in cells[:16]] == [1024] * 8 + [2048] * 8
    assert len({cell.file_name for cell in cells}) == len({cell.text for cell in cells}) == len(cells)


def test_rates_are_slowed_with_the_accelerator() -> None:
    plan = grid_plan(rates=[1, 8], num_prompts=0, duration_s=30, time_scale=4)
    low, high = plan.cells
    assert (plan.sent_rate(8), plan.num_prompts_of(high), plan.arrival_s(high)) == (2.0, 60, 30.0)
    assert plan.num_prompts_of(low) == FEWEST_PROMPTS
    assert plan.effective_profile().prefill.fixed_ms == pytest.approx(4 * 5.97)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = grid_plan(rates=[0.5, 2], seeds=[1, 2], prompts="repeated")
    assert GridPlan.from_mapping(mapping_of(plan)) == plan
    path = tmp_path / "mine.toml"
    path.write_text('systems = ["plain"]\nrates = [1]\ninput_tokens = 512\nnum_prompts = 4\n')
    assert load_grid_plan(str(path)).input_tokens == (512,)
    path.write_text('systems = ["plain"]\nrates = [1]\n')
    with pytest.raises(ConfigError, match=r"^mine.toml: input_tokens: missing"):
        load_grid_plan(str(path))
    path.write_text("systems = [")
    with pytest.raises(ConfigError, match=f"^plan: {path}: "):
        load_grid_plan(str(path))


def test_plans_that_come_with_the_package_can_be_run() -> None:
    names = grid_plan_names()
    assert {"quick", "push-pull-grid", "many-to-one", "one-to-many", "front-cost"} <= set(names)
    for name in names:
        plan = load_grid_plan(name)
        assert plan.cells
    published = load_grid_plan("push-pull-grid")
    assert published.rates == (1, 2, 4, 8)
    assert published.input_tokens == (1024, 2048, 4096, 8192, 16_384)
    assert (published.output_tokens, published.decode_slots) == ((128,), (8,))
    assert (load_grid_plan("many-to-one").num_prefill, load_grid_plan("one-to-many").num_decode) == (4, 4)


def test_a_plan_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path, capsys) -> None:
    assert main(["bench", "run", "quickest", "--out", str(tmp_path)]) == 2
    assert "plan: no 'quickest'; known are emulator-error, front-cost, " in capsys.readouterr().err
