"""What a benchmark of conversations is asked to do, and what its engines and clients are told."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.plan import HandoffPlan
from kvshuttle.bench.plan_file import Benchmark, benchmark_in, claim, command_of, mapping_of, read_plan
from kvshuttle.bench.proxy import ProxyMode, proxy_from_json
from kvshuttle.bench.texts import emulated_words, prose
from kvshuttle.bench.turns_fleet import Host, emulated_subject, plan_front_of_turns, plan_pair_of_turns, real_subject
from kvshuttle.bench.turns_plan import Answers, EngineSetting, PrefillCache, TurnsCell, TurnsPlan, TurnsSystem
from kvshuttle.cli import main
from kvshuttle.emulate.profile import effective_profile
from kvshuttle.errors import ConfigError
from kvshuttle.handoff.params import Mode
from kvshuttle.launcher.plan import Machine

if TYPE_CHECKING:
    from pathlib import Path

    from kvshuttle.bench.turns_fleet import Subject
    from kvshuttle.launcher.plan import ProcessPlan

PROFILE = "h200-tp8-qwen3-32b"
LARGER = {"prefill_cache": ("off", "on", "larger")}


def host() -> Host:
    return Host(Machine(cores=(0, 1)), count(20_000), "python")


def option(process: ProcessPlan, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


@pytest.fixture
def real(tmp_path: Path) -> Subject:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return real_subject(TurnsPlan(), tmp_path, Machine(cores=(0, 1)))


# --- cells ---


def test_cells_begin_with_what_others_are_compared_with_and_keep_equal_engines_together() -> None:
    names = [cell.name for cell in TurnsPlan(**LARGER).cells]
    assert names == [
        "push-cache-off-reuse-off",
        "push-cache-off-reuse-on",
        "push-cache-on-reuse-off",
        "push-cache-on-reuse-on",
        "push-cache-larger-reuse-off",
    ]


def test_both_modes_are_measured_on_the_same_engines() -> None:
    plan = TurnsPlan(modes=("pull", "push"), prefill_cache=("off",))
    assert [(str(cell.mode), cell.is_reusing) for cell in plan.cells] == [
        ("push", False),
        ("pull", False),
        ("push", True),
        ("pull", True),
    ]


UPSTREAM = "upstream-pull-paced"


def test_vllms_connector_stands_beside_ours_with_engines_of_its_own_where_it_keeps_history() -> None:
    plan = TurnsPlan(profile=PROFILE, systems=("shuttle", UPSTREAM), answers=("streamed", "whole"), **LARGER)
    names = [cell.name for cell in plan.cells if cell.prefill_cache is PrefillCache.OFF]
    assert names == [
        "push-cache-off-reuse-off",
        "push-cache-off-reuse-off-whole",
        "push-cache-off-reuse-on",
        "push-cache-off-reuse-on-whole",
        "upstream-pull-paced-cache-off-reuse-off",
        "upstream-pull-paced-cache-off-reuse-on",
    ]
    larger = [cell for cell in plan.cells if cell.prefill_cache is PrefillCache.LARGER]
    assert [cell.system for cell in larger] == [TurnsSystem.SHUTTLE] * 2
    settings = dict.fromkeys(cell.engines for cell in plan.cells)
    assert [setting.name for setting in settings] == [
        "cache-off",
        "upstream-pull-paced-cache-off",
        "upstream-pull-paced-cache-off-reuse-on",
        "cache-on",
        "upstream-pull-paced-cache-on",
        "upstream-pull-paced-cache-on-reuse-on",
        "cache-larger",
    ]


def test_every_client_asks_the_same_engines() -> None:
    plan = TurnsPlan(prefill_cache=("off",), reuse=("on",), clients=("openai", "aiperf"), answers=("streamed", "whole"))
    assert [cell.name for cell in plan.cells] == [
        "push-cache-off-reuse-on",
        "push-cache-off-reuse-on-aiperf",
        "push-cache-off-reuse-on-whole",
        "push-cache-off-reuse-on-whole-aiperf",
    ]
    assert len({cell.engines for cell in plan.cells}) == 1


def test_pools_have_room_for_all_conversations_unless_they_are_given() -> None:
    plan = TurnsPlan(conversations=4)
    assert plan.pool_blocks(0) * 128 >= 4 * plan.longest_tokens
    assert plan.pool_blocks(16_000) == 126


def test_ten_turns_with_the_bundled_model_grow_beyond_six_thousand_tokens_and_fit_its_context() -> None:
    plan = TurnsPlan()
    assert plan.first_tokens + 8 * plan.turn_tokens + 9 * plan.output_tokens > 6000
    assert plan.longest_tokens < plan.max_model_len <= 8192
    assert plan.max_model_len % 128 == 0


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"reuse": ("maybe",)}, "--reuse: one of off, on, got 'maybe'"),
        ({"prefill_cache": ()}, "--prefill-cache: one of off, on, larger, got 'nothing'"),
        ({"modes": ("auto",)}, "--mode: one of push, pull, got 'auto'"),
        ({"systems": ("magic",)}, "--system: one of shuttle, upstream-pull-paced, got 'magic'"),
        ({"systems": (UPSTREAM,)}, "--system upstream-pull-paced: only with --profile"),
        ({"answers": ("half",)}, "--answers: one of streamed, whole, got 'half'"),
        ({"profile": PROFILE, "systems": (UPSTREAM,), **LARGER}, "--prefill-cache larger: .* and --system shuttle"),
        ({"clients": ("mine",)}, "--client: one of openai, aiperf, got 'mine'"),
        ({"turns": 0}, "--turns: a number above 0, got 0"),
        ({"think_s": -1.0}, "--think-s: a number of seconds, 0 or more"),
        ({"time_scale": 2.0}, "--time-scale: only with --profile"),
        ({"think_s": float("inf")}, "--think-s: a finite number"),
        ({"profile": PROFILE, "model": "other"}, "--model: not with --profile"),
        ({"profile": PROFILE, "dtype": "bfloat16"}, "--dtype: not with --profile"),
        ({"prefill_pool_tokens": 4096}, "--prefill-pool-tokens: 7680 or more, which one conversation can take"),
        ({"prefill_cache": ("larger",)}, "--prefill-cache larger: give --reuse on and --prefill-cache on"),
        ({"reuse": ("on",), **LARGER}, "--prefill-cache larger: give --reuse off as well"),
    ],
)
def test_a_bad_plan_of_turns_is_told_the_option(knobs, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TurnsPlan(**knobs)


# --- the file and the command line ---


def test_the_command_of_a_plan_makes_the_same_plan_again(tmp_path: Path, monkeypatch) -> None:
    taken = []
    monkeypatch.setattr("kvshuttle.bench.turns.run_turns", lambda plan, *_, **__: taken.append(plan))
    plan = TurnsPlan(profile=PROFILE, bytes_scale=0.25, conversations=4, think_s=0.5, **LARGER)
    words = command_of(plan).split()
    assert words[:5] == ["kvshuttle", "bench", "turns", "--out", "DIR"]
    main(["bench", "turns", "--out", str(tmp_path), *words[5:]])
    assert taken == [plan]
    assert command_of(HandoffPlan(is_quiet_wait=False)) == "kvshuttle bench handoff --out DIR --no-quiet-wait"


def test_a_directory_goes_on_with_more_cells_and_with_nothing_else(tmp_path: Path) -> None:
    claim(TurnsPlan(prefill_cache=("on",)), tmp_path)
    assert claim(TurnsPlan(modes=("pull",)), tmp_path).prefill_cache == ("off", "on")
    assert read_plan(TurnsPlan, tmp_path) == TurnsPlan(modes=("push", "pull"))
    for other in (TurnsPlan(seed=1), HandoffPlan()):
        with pytest.raises(ConfigError, match="holds a run with other options"):
            claim(other, tmp_path)


def test_a_run_says_what_it_measures_and_runs_from_before_that_are_of_hand_offs(tmp_path: Path) -> None:
    claim(TurnsPlan(), tmp_path)
    assert benchmark_in(tmp_path) is Benchmark.TURNS
    (tmp_path / "plan.json").write_text(json.dumps(mapping_of(HandoffPlan())))
    assert benchmark_in(tmp_path) is Benchmark.HANDOFF
    (tmp_path / "plan.json").write_text(json.dumps({"benchmark": "magic"}))
    with pytest.raises(ConfigError, match="is of no benchmark of this release: 'magic'"):
        benchmark_in(tmp_path)


def test_options_of_another_benchmark_are_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "turns", "--out", str(tmp_path), "--background", "4"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --background" in capsys.readouterr().err


# --- engines and routers ---


def test_engines_differ_only_where_the_cell_does(real: Subject) -> None:
    plan = TurnsPlan()
    prefill, decode = plan_pair_of_turns(real, plan, EngineSetting(PrefillCache.OFF), 200, host()).engines
    assert "--no-enable-prefix-caching" in prefill.argv
    assert "--no-enable-prefix-caching" not in decode.argv
    assert option(prefill, "--num-gpu-blocks-override") == "200"
    assert option(decode, "--num-gpu-blocks-override") == str(plan.pool_blocks(0))
    caching, _ = plan_pair_of_turns(real, plan, EngineSetting(PrefillCache.LARGER), 300, host()).engines
    assert "--no-enable-prefix-caching" not in caching.argv
    assert option(caching, "--num-gpu-blocks-override") == "300"
    for engine in (prefill, decode):
        assert (option(engine, "--dtype"), option(engine, "--block-size")) == ("float32", "128")
        assert option(engine, "--max-model-len") == str(plan.max_model_len)


def test_a_real_model_must_take_what_the_conversations_come_to(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    with pytest.raises(ConfigError, match="--turns: conversations may come to 7680 tokens, and smollm2 takes 2048"):
        real_subject(TurnsPlan(), tmp_path, Machine(cores=(0, 1)))


def test_emulated_engines_have_no_core_of_their_own_and_no_weights(tmp_path: Path) -> None:
    plan = TurnsPlan(profile=PROFILE)
    subject = emulated_subject(plan, effective_profile(plan), tmp_path / "model")
    for engine in plan_pair_of_turns(subject, plan, EngineSetting(PrefillCache.ON), 200, host()).engines:
        assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert option(engine, "--load-format") == "dummy"
        assert option(engine, "--served-model-name") == subject.name
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (8, plan.max_model_len)


@pytest.mark.parametrize("is_reusing", [True, False])
def test_only_the_router_knows_whether_history_is_reused(real: Subject, is_reusing: bool) -> None:
    plan = TurnsPlan()
    engines = plan_pair_of_turns(real, plan, EngineSetting(PrefillCache.ON), 200, host()).engines
    cell = TurnsCell(Mode.PULL, PrefillCache.ON, is_reusing)
    fleet = plan_front_of_turns(real, plan, cell, engines, host())
    assert fleet.engines == ()
    assert fleet.router is not None
    assert ("--no-reuse-history" in fleet.router.argv) is not is_reusing
    assert option(fleet.router, "--mode") == "pull"
    assert option(fleet.router, "--prefill") == f"{engines[0].url},{engines[0].side_address}"


@pytest.mark.parametrize("is_reusing", [True, False])
def test_vllms_engines_keep_history_only_where_the_proxy_remembers_it(tmp_path: Path, is_reusing: bool) -> None:
    plan = TurnsPlan(profile=PROFILE, systems=(UPSTREAM,))
    subject = emulated_subject(plan, effective_profile(plan), tmp_path / "model")
    cell = TurnsCell(Mode.PULL, PrefillCache.OFF, is_reusing, TurnsSystem.UPSTREAM, Answers.WHOLE)
    engines = plan_pair_of_turns(subject, plan, cell.engines, 200, host()).engines
    for engine in engines:
        values = json.loads(option(engine, "--kv-transfer-config"))
        assert (values["kv_connector"], values["engine_id"]) == ("NixlConnector", engine.name)
        assert values["kv_load_failure_policy"] == "recompute"
        assert values["kv_connector_extra_config"] == {"bidirectional_kv_xfer": is_reusing}
        assert engine.side_address.endswith(f":{engine.env['VLLM_NIXL_SIDE_CHANNEL_PORT']}")
        assert "nixl_progress_pause_us" in option(engine, "--additional-config")
    proxy = plan_front_of_turns(subject, plan, cell, engines, host()).router
    assert proxy is not None
    mode, config = proxy_from_json(proxy.argv[-1])
    assert mode is (ProxyMode.BOTH if is_reusing else ProxyMode.PULL)
    assert config.is_logging_requests
    assert [engine.side_address for engine in config.engines] == [engine.side_address for engine in engines]


# --- texts ---


def test_texts_are_the_same_for_a_seed_and_about_as_long_as_asked_for() -> None:
    text = prose(random.Random(3), 1000)
    assert text == prose(random.Random(3), 1000)
    assert text != prose(random.Random(4), 1000)
    assert 1000 / 1.2 - 1 <= len(text.split()) <= 1000 / 1.2 + 30


def test_an_emulated_text_has_a_word_for_each_token() -> None:
    assert len(emulated_words(random.Random(0), 321).split()) == 321
